// Slab → file: which blocks make room when the pinned memory is full, on a lane of its own.
//
// Blocks without a copy-in under way are candidates; the one that is needed last goes first. Callers hold the store's
// lock.
#pragma once

#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "slab_slot.h"

namespace offload {

class Spiller {
 public:
  explicit Spiller(SlabParts& parts) : parts_(parts), lane_(*parts.lanes) {}

  // Makes the block a candidate, if its state allows. This includes blocks already swapped in: a retained graph may
  // swap them in again.
  void offer(const SlabRef& slot);
  // The block is no candidate any more; a spill that is queued stays queued.
  void remove(const SlabRef& slot) { resident_.erase(slot); }
  // Whether the lane frees the slot when its ticket is released.
  static bool holds(const SlabSlot& slot) { return slot.spill == Spill::queued || slot.spill == Spill::writing; }
  // Queues spills of the coldest candidates, of `bytes` bytes or more. Returns a lane event that completes when all
  // queued spills have ended; null if none is queued.
  EventRef make_room(size_t bytes);
  // The driver's error that kept the last spill from starting, for the caller that waits for room. Returned once.
  std::exception_ptr take_failure() { return std::exchange(failure_, nullptr); }
  // Waits for the lane; without the lock.
  void drain() { parts_.lanes->stream_synchronize(lane_); }

 private:
  struct ColdestFirst {  // needed last first; age breaks ties so that the order is total
    bool operator()(const SlabRef& a, const SlabRef& b) const {
      return a->need != b->need ? a->need > b->need : a->id < b->id;
    }
  };

  void queue_spill(const SlabRef& slot, const std::shared_ptr<void>& under_way);
  void spill(const SlabRef& slot);
  bool write_extent(SlabSlot& slot, std::unique_lock<std::mutex>& lock);

  SlabParts& parts_;
  std::set<SlabRef, ColdestFirst> resident_;  // candidates: in a slab, with no copy-in or spill pending
  EventRef last_spill_;                       // lane event: every spill queued so far has ended; null if none is queued
  std::exception_ptr failure_;
  const OwnedStream lane_;
};

}  // namespace offload
