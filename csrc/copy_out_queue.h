// The copy-outs of the slab tier: device → slab on the store's copy-out stream.
//
// Small blocks are coalesced: with a separate copy for each, the link would be idle between copies. A
// lane issues all queued blocks as one transfer when fewer than two transfers are in flight, so an idle link starts at
// once and a busy link gets batches. A large block, wait_out and a full pool issue everything at once.
//
// Callers hold the store's lock. If memory runs out on a lane, only the blocks that it works on fail; the
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

  // Queues a slot that has its block. A large one is issued at once; if that fails, its state is `failed` on return.
  // Throws DriverError or std::bad_alloc before anything is queued.
  void push(const SlabRef& slot);
  // Issues everything queued.
  void issue();
  // Cancels a queued slot and frees its block.
  void cancel(SlabSlot& slot);
  void cancel_all();
  // Waits for the lane. Call it without the lock.
  void drain() { parts_.lanes->stream_synchronize(lane_); }

 private:
  void feed();
  SlabRefs next_run();
  void issue_run(const SlabRef* slots, size_t count);
  void copy(const SlabRef* slots, size_t count);
  void fail(SlabSlot& slot);

  SlabParts& parts_;
  Spiller& spiller_;
  std::deque<SlabRef> slots_;  // not issued yet
  size_t bytes_ = 0;
  bool feed_queued_ = false;
  InFlight in_flight_;
  const OwnedStream lane_;  // issues small blocks on the copy-out stream
};

}  // namespace offload
