// The copy-outs of the slab tier: device → slab on the store's copy-out stream.
//
// Small blocks are coalesced: with a separate copy for each, the link would be idle between copies. Whenever fewer than
// two transfers are in flight, a lane issues the next one. This transfer has the small blocks at the front of the queue
// that the device has already produced. If the device has not yet produced the first block, the transfer has only this
// block, and the copy-out stream waits for it. So while the link is idle, a block is copied at once; while the link is
// busy, several blocks gather in the queue for the next transfer. The host may queue a whole forward pass before the
// device has run it; therefore no block ever waits until a later block is produced.
//
// All queued blocks are issued immediately when a large block is queued and when the pool is full. wait_out and
// prefetch issue the queued blocks up to the one that they need.
//
// Callers hold the store's lock. If a transfer fails, each of its blocks is tried alone, and a block that fails again
// gets the state `failed`. Lane tasks throw nothing but DriverError, as HostDriver::call requires.
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
  // Issues the queued slots up to this one, and those after it that fit into its transfer. Later slots stay queued, so
  // that they can still be joined into one transfer.
  void issue(const SlabSlot& slot);
  // Cancels a queued slot and frees its block.
  void cancel(SlabSlot& slot);
  void cancel_all();
  // Waits until the lane has run all its tasks. Call it without the lock.
  void drain() { parts_.lanes->stream_synchronize(lane_); }

 private:
  void feed();
  void issue_next();
  SlabRefs next_run();
  void issue_run(const SlabRef* slots, size_t count);
  void copy(const SlabRef* slots, size_t count);
  void fail(SlabSlot& slot);

  SlabParts& parts_;
  Spiller& spiller_;
  std::deque<SlabRef> slots_;  // not issued yet
  bool feed_queued_ = false;
  InFlight in_flight_;
  const OwnedStream lane_;  // issues small blocks on the copy-out stream
};

}  // namespace offload
