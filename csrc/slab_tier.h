// The slab tier's store: device ↔ pinned slab over the device's own copy streams, slab ↔ spill file over host lanes.
//
// A block waits in the copy-out queue, lies in a slab, goes to disk by the spiller where the slabs are full, and comes
// back by the copy-in queue. This file ties the three together and makes room for new blocks.
//
// A caller queues its lanes' work first, which finds nothing to do where the block then cannot be queued itself, and
// moves the block on last, which needs no memory.
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

  SlotRef begin_out(const void* source, size_t bytes, Stream compute, uint64_t need) override;
  bool out_done(Slot& slot) override;
  void issue_out(Slot& slot) override;
  bool cancel(Slot& slot) override;
  void begin_in(const SlotRef& slot, void* target, Stream compute, std::shared_ptr<void> owner) override;
  void finish_in(const SlotRef& slot, Stream compute) override;
  void settle(const SlotRef& slot) override;
  void release(const SlotRef& slot) override;
  void quiesce() override;
  size_t trim() override;
  StoreStats stats() override;
  size_t alignment_bytes() const override { return 1; }
  SpillFile* spill_file() override { return parts_.file.get(); }

 private:
  Block obtain_block(std::unique_lock<std::mutex>& lock, size_t bytes);

  // Destroyed from the last on, which waits for nothing: work on a lane that uses these holds the store.
  SlabParts parts_;
  Spiller spiller_;
  CopyOutQueue copy_out_queue_;
  CopyInQueue copy_in_queue_;
};

}  // namespace offload
