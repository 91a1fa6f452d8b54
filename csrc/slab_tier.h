// The slab tier's store: device ↔ pinned slab over the device's own copy streams, slab ↔ spill file over host lanes.
//
// slab_tier.cpp holds the way out and the slots; slab_spill.cpp what makes room; slab_return.cpp the way back.
//
// Small blocks are coalesced, as a copy of its own for each would leave the link idle between them. On the way out they
// wait in `outgoing_` for the feed lane, which issues all that have gathered as one transfer whenever fewer than two
// are in flight: at once where the link is idle, in batches where it is the bottleneck. A large block, wait_out and a
// full pool issue them at once. On the way back the pump lane takes neighbours of its queue along.
//
// Where there is no memory for what a lane needs, the blocks it is working on fail, each by itself; a lane throws
// nothing but DriverError. A caller queues its lanes' work first, which finds nothing to do where the block then cannot
// be queued itself, and moves the block on last, which needs no memory.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "swap_store.h"

namespace offload {

struct Transfer {  // what its blocks, one or many, share
  EventRef begin;
  EventRef end;
  bool timed = false;
};

struct SlabSlot final : Slot {
  Block block;               // while in RAM
  Stream compute = nullptr;  // of `produced`, then of `target_free`
  EventRef produced;
  std::shared_ptr<Transfer> out;
  std::shared_ptr<Transfer> in;
  EventRef target_free;  // the compute stream's present point when the target was handed over
  EventRef filled;       // lane event: every slice of a copy-in from disk has been issued
  Extent extent;
  uint32_t crc_out = 0;
  uint32_t crc_in = 0;
  size_t issued_bytes = 0;  // of the copy-in under way
  bool out_counted = false;
  bool spill_queued = false;
  bool spill_failed = false;
  bool busy = false;  // a lane reads or writes for it
  bool urgent = false;
  bool consumed = true;  // no copy-in pending: swap_in has been called since the last prefetch
  double fill_began_seconds = 0;
};

class SlabStore final : public SwapStore {
 public:
  SlabStore(std::shared_ptr<Driver> device, std::shared_ptr<HostDriver> lanes, const StoreOptions& options);
  ~SlabStore() override;

  SlotRef begin_out(const void* source, size_t bytes, Stream compute, uint64_t need) override;
  bool out_done(Slot& slot) override;
  void issue_out(Slot& slot) override;
  bool cancel(Slot& slot) override;
  void begin_in(const SlotRef& slot, Stream compute) override;
  void finish_in(const SlotRef& slot, Stream compute) override;
  void settle(const SlotRef& slot) override;
  void release(const SlotRef& slot) override;
  void quiesce() override;
  size_t trim() override;
  StoreStats stats() override;
  size_t alignment_bytes() const override { return 1; }
  SpillFile* spill_file() override { return file_.get(); }

 private:
  using Ref = std::shared_ptr<SlabSlot>;
  using Refs = std::vector<Ref>;

  // Enough to keep a copy engine busy, few enough for an urgent block to overtake.
  static constexpr size_t kInFlight = 2;

  struct ColdestFirst {  // needed last first; age breaks ties so that the order is total
    bool operator()(const Ref& a, const Ref& b) const { return a->need != b->need ? a->need > b->need : a->id < b->id; }
  };
  struct Bounce {  // a slice on its way from disk to the device
    Block block;
    EventRef fence;
  };

  std::array<Bounce, kInFlight> take_bounce();
  Block obtain_block(std::unique_lock<std::mutex>& lock, size_t bytes);
  void feed();
  void issue_outgoing();
  Refs next_outgoing();
  void issue_out(const Ref* slots, size_t count);
  void copy_out(const Ref* slots, size_t count);
  void fail_out(SlabSlot& slot);
  void withdraw(SlabSlot& slot);
  EventRef spill_coldest(size_t bytes);
  void queue_spill(const Ref& slot, const std::shared_ptr<void>& under_way);
  void spill(const Ref& slot);
  void make_spillable(const Ref& slot);
  bool write_extent(SlabSlot& slot, std::unique_lock<std::mutex>& lock);
  EventRef last_copy(const SlabSlot& slot);

  void issue_slice(SlabSlot& slot, const char* from, size_t bytes);
  void issue_from_slab(const Ref& slot, size_t bytes);
  void issue_in(const Refs& slots);
  void copy_in(const Refs& slots);
  void await_target(const SlabSlot& slot);
  void end_in(SlabSlot& slot);
  Refs next_incoming(const Ref& first);
  void pump();
  void issue_rest(const Ref& slot, std::unique_lock<std::mutex>& lock);
  void fill();
  void fill_slice(const Ref& slot, std::unique_lock<std::mutex>& lock);

  // Whatever has been issued on `stream` has ended afterwards; false where the device's context is lost.
  bool settle(Stream stream);
  void note_in_flight(std::deque<EventRef>& in_flight, Stream stream);
  void await_oldest(std::deque<EventRef>& in_flight, std::unique_lock<std::mutex>& lock);
  void count_out(SlabSlot& slot);
  void count_in(SlabSlot& slot);
  double seconds_once(Transfer& transfer);
  void free_slot(SlabSlot& slot);
  std::shared_ptr<SlabStore> self() { return std::static_pointer_cast<SlabStore>(shared_from_this()); }
  bool is_small(const SlabSlot& slot) const { return slot.bytes < std::min(kSmallBytes, slice_bytes_); }
  static Ref most_urgent(const std::deque<Ref>& queue);
  static void remove(std::deque<Ref>& queue, const SlabSlot& slot);

  const size_t slice_bytes_;
  const std::unique_ptr<SpillFile> file_;
  SlabPool pool_;
  const size_t bounce_bytes_;
  std::array<Bounce, kInFlight> bounce_;  // taken up front: bringing back from disk must never wait for room
  size_t next_bounce_ = 0;
  std::set<Ref, ColdestFirst> resident_;  // in a slab, with no copy-in or spill pending
  EventRef last_spill_;                   // lane event: every spill queued so far has ended; null where all have
  std::exception_ptr spill_failure_;      // for who waits for its room: the driver could not say what has arrived
  std::deque<Ref> outgoing_;              // small blocks whose copy-out has not been issued
  size_t outgoing_bytes_ = 0;
  bool feed_queued_ = false;
  std::deque<Ref> from_slab_;
  std::deque<Ref> from_disk_;
  std::deque<EventRef> fed_in_flight_;
  std::deque<EventRef> slices_in_flight_;
  // Last, so that they go first. Waits for nothing: work on a lane that uses the above holds the store.
  const OwnedStream out_stream_;
  const OwnedStream in_stream_;
  const OwnedStream feed_lane_;   // feeds the copy-out stream with small blocks
  const OwnedStream pump_lane_;   // feeds the copy-in stream slice by slice
  const OwnedStream spill_lane_;  // slab → file
  const OwnedStream fill_lane_;   // file → bounce → copy-in stream
};

}  // namespace offload
