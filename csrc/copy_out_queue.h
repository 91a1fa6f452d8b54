// The way out of a device: blocks that wait for their copy-out, then device → slab on the store's copy-out stream.
//
// Small blocks are coalesced, as a copy of its own for each would leave the link idle between them. They wait here for
// the feed lane, which issues all that have gathered as one transfer whenever fewer than two are in flight: at once
// where the link is idle, in batches where it is the bottleneck. A large block, wait_out and a full pool issue them at
// once.
//
// Callers hold the store's lock. Where there is no memory for what the lane needs, its blocks fail, each by itself; a
// lane throws nothing but DriverError.
#pragma once

#include <deque>

#include "slab_slot.h"
#include "spiller.h"

namespace offload {

class CopyOutQueue {
 public:
  CopyOutQueue(SlabParts& parts, Spiller& spiller)
      : parts_(parts), spiller_(spiller), in_flight_(parts), lane_(*parts.lanes) {}

  // Queues a block that has its room; issues it at once where it is large: its state may be failed then. Throws
  // DriverError, std::bad_alloc: then nothing was queued.
  void push(const SlabRef& slot);
  // Issues everything that waits.
  void issue();
  // Takes a block that waits out of the queue: it is cancelled, and its room is free.
  void cancel(SlabSlot& slot);
  void cancel_all();
  // Waits for the lane; without the lock.
  void drain() { parts_.lanes->stream_synchronize(lane_); }

 private:
  void feed();
  SlabRefs next_run();
  void issue_run(const SlabRef* slots, size_t count);
  void copy(const SlabRef* slots, size_t count);
  void fail(SlabSlot& slot);

  SlabParts& parts_;
  Spiller& spiller_;
  std::deque<SlabRef> slots_;  // whose copy-out has not been issued
  size_t bytes_ = 0;
  bool feed_queued_ = false;
  InFlight in_flight_;
  const OwnedStream lane_;  // feeds the copy-out stream with small blocks
};

}  // namespace offload
