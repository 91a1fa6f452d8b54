// The spills of the slab tier: slab → file, on a separate lane, when the pinned memory is full.
//
// Blocks whose copy-out has been issued and that have no copy-in in flight are candidates; the one that is needed last
// is spilled first. Callers hold the store's lock.
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

  // Makes the block a candidate if its state allows it. A block that has been swapped in can be a candidate too: a
  // second backward over a retained graph may swap it in again.
  void offer(const SlabRef& slot);
  // Removes the block from the candidates; a spill that is queued already stays queued.
  void remove(const SlabRef& slot) { resident_.erase(slot); }
  // Returns whether a spill of the slot is queued or running. If its ticket is released, the lane then frees the slot.
  static bool holds(const SlabSlot& slot) { return slot.spill == Spill::queued || slot.spill == Spill::writing; }
  // Queues spills of candidates, the one that is needed last first, until they have at least `bytes` bytes in total or
  // no candidate is left. Returns a lane event that completes when all queued spills have ended; null if none is
  // queued.
  EventRef make_room(size_t bytes);
  // Returns the error (DriverError, std::bad_alloc) because of which a spill could not start, and clears it; null if
  // there is none. A failed write is not such an error.
  std::exception_ptr take_failure() { return std::exchange(failure_, nullptr); }
  // Waits until the lane has run all its tasks. Call it without the lock.
  void drain() { parts_.lanes->stream_synchronize(lane_); }

 private:
  struct ColdestFirst {  // the block needed last comes first; the id breaks ties
    bool operator()(const SlabRef& a, const SlabRef& b) const {
      return a->need != b->need ? a->need > b->need : a->id < b->id;
    }
  };

  void queue_spill(const SlabRef& slot, const std::shared_ptr<void>& under_way);
  void spill(const SlabRef& slot);
  bool write_extent(SlabSlot& slot, std::unique_lock<std::mutex>& lock);

  SlabParts& parts_;
  std::set<SlabRef, ColdestFirst> resident_;  // the candidates: in a slab, with no copy-in or spill pending
  EventRef last_spill_;                       // lane event, done when all queued spills have ended; null: none queued
  std::exception_ptr failure_;
  const OwnedStream lane_;
};

}  // namespace offload
