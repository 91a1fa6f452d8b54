// SlabSlot: one block swapped out by the slab tier. SlabParts: the parts that the copy-out queue, the spiller and the
// copy-in queue share: the pinned pool, the spill file, the device's two copy streams, the function that frees a slot.
//
// A lane is a stream of the host driver: a queue of tasks that a worker thread runs in order.
//
// Not thread safe: callers hold the store's lock, `mutex`, unless a method says otherwise.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "swap_store.h"

namespace offload {

struct Transfer {  // one issued transfer, shared by its blocks
  EventRef begin;  // null once its duration has been added to the statistics
  EventRef end;
  size_t copies = 0, bytes = 0;  // number of blocks and their bytes; set only for copy-ins
};

// A slot's state in the spiller. It is separate from Slot::state, because a block may be prefetched while it is being
// written to the file.
enum class Spill : uint8_t {
  none,
  queued,
  writing,
  failed  // the block stays in RAM
};

struct SlabSlot final : Slot {
  Block block;               // null unless the bytes are in pinned memory
  Stream compute = nullptr;  // the stream on which `produced`, and later `target_free`, is recorded
  EventRef produced;         // completes when the compute stream has produced the bytes
  std::shared_ptr<Transfer> out;  // null once the copy-out has been added to the statistics
  std::shared_ptr<Transfer> in;
  EventRef target_free;  // recorded on the compute stream at prefetch
  EventRef filled;       // a lane's event; completes once a copy-in from disk has been issued, failed or cancelled
  Extent extent;
  uint32_t crc_out = 0;
  uint32_t crc_in = 0;
  size_t issued_bytes = 0;  // bytes of the current copy-in that have been issued
  Spill spill = Spill::none;
  double fill_began_seconds = 0;
};
using SlabRef = std::shared_ptr<SlabSlot>;
using SlabRefs = std::vector<SlabRef>;

struct SlabParts {
  // Throws SpillError, DriverError, and PoolExhausted if the pool is too small for the two bounce buffers.
  SlabParts(SwapStore& owner, std::mutex& lock, StoreStats& figures, CopyLog& copies, std::shared_ptr<Driver> driver,
            std::shared_ptr<HostDriver> host_driver, const std::shared_ptr<EventPool>& device_events,
            const std::shared_ptr<EventPool>& host_events, const StoreOptions& options);

  // Returns a reference that keeps the store alive. Every task on a lane that uses the store holds one.
  std::shared_ptr<SwapStore> keep() const { return store.shared_from_this(); }
  bool is_small(const SlabSlot& slot) const { return slot.bytes < std::min(kSmallBytes, slice_bytes); }
  // Returns whether the device has reached an event. Returns false also if the query fails: a block is then copied
  // alone instead of in a batch, and if the device has failed, this copy fails too.
  bool is_reached(const EventRef& event);
  // Waits for everything issued on `stream`. Returns false if the device's context is lost.
  bool settle(Stream stream);
  // Returns the event after which no copy reads or writes the slot's block any more.
  EventRef last_copy(const SlabSlot& slot);
  // Adds the slot's copy-out to the statistics, if it has ended.
  void count_out(SlabSlot& slot);
  // Notes a copy-in that has been issued. The first count_in after the copy-in's end adds it to the statistics, even if
  // its slot has been freed by then: the host may free a slot long before the device has run the slot's copy-in.
  void note_in(const std::shared_ptr<Transfer>& transfer) noexcept;
  void count_in() noexcept;
  // Frees the block and the extent, and drops the target's owner. If a copy is still in flight, the block is reused
  // only after that copy's event.
  void free_slot(SlabSlot& slot);

  SwapStore& store;
  std::mutex& mutex;
  StoreStats& stats;
  CopyLog& log;
  const std::shared_ptr<Driver> device;
  const std::shared_ptr<HostDriver> lanes;
  const std::shared_ptr<EventPool> events;
  const std::shared_ptr<EventPool> lane_events;
  const size_t slice_bytes;
  const std::unique_ptr<SpillFile> file;  // null: no disk
  SlabPool pool;
  const size_t bounce_bytes;
  const std::array<Block, 2> bounces;  // for reads from disk; allocated at construction, so a read never waits for room
  const OwnedStream out_stream;
  const OwnedStream in_stream;

 private:
  std::array<Block, 2> take_bounces();
  double seconds_once(Transfer& transfer);

  std::deque<std::shared_ptr<Transfer>> copies_in_;  // issued, not yet in the statistics; they end in this order
};

// Limits how many transfers of a lane are in flight.
class InFlight {
 public:
  // Two transfers keep a copy engine busy, and an urgent block waits for at most two.
  static constexpr size_t kMax = 2;

  explicit InFlight(SlabParts& parts) : parts_(parts) {}
  // Waits until fewer than kMax transfers are in flight; releases the lock while it waits.
  void await_room(std::unique_lock<std::mutex>& lock);
  // Records an event on `stream`: everything issued since the previous event counts as one transfer. If the event
  // cannot be recorded, the transfer is not counted, and later transfers do not wait for it. If the device has failed,
  // the later transfers report this failure.
  void note(Stream stream);

 private:
  SlabParts& parts_;
  std::deque<EventRef> events_;
};

}  // namespace offload
