// The copy-outs of the slab tier: device → slab on the store's copy-out stream.
//
// Small blocks are coalesced: with a separate copy for each, the link would be idle between copies. A lane issues all
// queued blocks as one transfer when fewer than two transfers are in flight: while the link is idle, a block is copied
// at once; while it is busy, blocks collect and are copied as one batch. The queued blocks are issued immediately when
// a large block is queued, when they would exceed a slice, when the pool is full, and when wait_out or prefetch needs
// one of them.
//
// Callers hold the store's lock. If a lane task gets std::bad_alloc, only the blocks of that task fail; lane tasks
// throw only DriverError.
#pragma once

#include <deque>

#include "slab_slot.h"
#include "spiller.h"

namespace offload {

class CopyOutQueue {
 public:
  CopyOutQueue(SlabParts& parts, Spiller& spiller)
      : parts_(parts), spiller_(spiller), in_flight_(parts), lane_(*parts.lanes) {}

  // Queues a slot whose block is allocated. A large block is issued at once; if this fails, the slot's state is
  // `failed` on return. Throws DriverError or std::bad_alloc before anything is queued.
  void push(const SlabRef& slot);
  // Issues everything queued.
  void issue();
  // Cancels a queued slot and frees its block.
  void cancel(SlabSlot& slot);
  void cancel_all();
  // Waits until the lane has run all its tasks. Call it without the lock.
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
