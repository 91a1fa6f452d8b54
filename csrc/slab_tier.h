// The slab tier's store: device ↔ pinned slab over the device's own copy streams, slab ↔ spill file over host lanes.
//
// The copy-out queue copies a block to a slab, the spiller writes it to disk when the slabs are full, and the copy-in
// queue copies it back. SlabStore combines the three and makes room for new blocks.
//
// A lane is a stream of the host driver (slab_slot.h). If memory runs out, the queues stay consistent. The lane task
// that is to issue a block is queued before the block. If queuing the block then fails, the task issues another block
// or finds an empty queue. The block's state changes last; this needs no memory.
#pragma once

#include <memory>
#include <mutex>

#include "copy_in_queue.h"
#include "copy_out_queue.h"
#include "slab_slot.h"
#include "spiller.h"
#include "swap_store.h"

namespace offload {

class SlabStore final : public SwapStore {
 public:
  SlabStore(std::shared_ptr<Driver> device, std::shared_ptr<HostDriver> lanes, const StoreOptions& options);
  ~SlabStore() override;

  SlotRef queue_copy_out(const void* source, size_t bytes, Stream compute, uint64_t need) override;
  bool out_done(Slot& slot) override;
  void issue_out(Slot& slot) override;
  bool cancel(Slot& slot) override;
  void prefetch(const SlotRef& slot, void* target, Stream compute, std::shared_ptr<void> owner) override;
  void swap_in(const SlotRef& slot, Stream compute) override;
  void settle(const SlotRef& slot) override;
  void release(const SlotRef& slot) override;
  void quiesce() override;
  size_t trim() override;
  size_t trim_pool(size_t keep_bytes) override;
  void restart_high_water() override;
  StoreStats stats() override;
  size_t alignment_bytes() const override { return 1; }
  SpillFile* spill_file() override { return parts_.file.get(); }

 private:
  Block obtain_block(std::unique_lock<std::mutex>& lock, size_t bytes);

  // The destructors of these members need not wait for a lane: every task on a lane that uses the store holds a
  // reference to it, so no such task is left.
  SlabParts parts_;
  Spiller spiller_;
  CopyOutQueue copy_out_queue_;
  CopyInQueue copy_in_queue_;
};

}  // namespace offload
