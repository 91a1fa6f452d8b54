// A block of the slab tier, and what the copy-out queue, the spiller and the copy-in queue share: the pinned pool, the
// spill file, the device's two copy streams, and how a slot is freed.
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
  EventRef begin;  // null once its time has been counted
  EventRef end;
};

// A slot's state in the spiller. It is separate from Slot::state: a block may be prefetched while it is written.
enum class Spill : uint8_t {
  none,
  queued,
  writing,
  failed  // the block stays in RAM
};

struct SlabSlot final : Slot {
  Block block;               // while in RAM
  Stream compute = nullptr;  // the stream of `produced`, then of `target_free`
  EventRef produced;
  std::shared_ptr<Transfer> out;  // null once it has been counted
  std::shared_ptr<Transfer> in;
  EventRef target_free;  // recorded on the compute stream at prefetch
  EventRef filled;       // lane event: every slice of a copy-in from disk has been issued
  Extent extent;
  uint32_t crc_out = 0;
  uint32_t crc_in = 0;
  size_t issued_bytes = 0;  // of the current copy-in
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

  // Every task on a lane holds this reference.
  std::shared_ptr<SwapStore> keep() const { return store.shared_from_this(); }
  bool is_small(const SlabSlot& slot) const { return slot.bytes < std::min(kSmallBytes, slice_bytes); }
  // Waits for everything issued on `stream`. Returns false if the device's context is lost.
  bool settle(Stream stream);
  // The event after which no copy touches the slot's block any more.
  EventRef last_copy(const SlabSlot& slot);
  void count_out(SlabSlot& slot);
  void count_in(SlabSlot& slot);
  // Frees the block, the extent and the target. A copy may still be under way: its event fences the block.
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
  const std::array<Block, 2> bounces;  // for reads from disk; allocated first, so that they never wait for room
  const OwnedStream out_stream;
  const OwnedStream in_stream;

 private:
  std::array<Block, 2> take_bounces();
  double seconds_once(Transfer& transfer);
};

// Limits how many transfers of a lane are in flight.
class InFlight {
 public:
  // Enough to keep a copy engine busy, few enough for an urgent block to overtake.
  static constexpr size_t kMax = 2;

  explicit InFlight(SlabParts& parts) : parts_(parts) {}
  // Waits until fewer than kMax are in flight; releases the lock meanwhile.
  void await_room(std::unique_lock<std::mutex>& lock);
  // Records an event on `stream` and counts what was issued before it as one transfer. If no event can be recorded,
  // nothing is counted, so the next transfer is issued early and reports the device's error itself.
  void note(Stream stream);

 private:
  SlabParts& parts_;
  std::deque<EventRef> events_;
};

}  // namespace offload
