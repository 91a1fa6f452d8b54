// Slab → file: which blocks make room when the pinned memory is full, on a lane of its own.
//
// A block is offered while nobody wants it back; the one that is needed last goes first. Callers hold the store's lock.
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

  // Lets the block go to disk, where that is possible now. A retained graph may want it again; until then its room may
  // be needed elsewhere.
  void offer(const SlabRef& slot);
  // The block stays, unless it is on its way.
  void withdraw(const SlabRef& slot) { resident_.erase(slot); }
  // Whether the lane will free the slot where its ticket goes.
  static bool holds(const SlabSlot& slot) { return slot.spill == Spill::queued || slot.spill == Spill::writing; }
  // Queues the coldest blocks for the disk until `bytes` are on their way. A lane event that completes when they have
  // gone; null where none can go, or is going.
  EventRef make_room(size_t bytes);
  // For who has waited for room: the driver could not say what has arrived. Told once.
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
  std::set<SlabRef, ColdestFirst> resident_;  // in a slab, with no copy-in or spill pending
  EventRef last_spill_;                       // lane event: every spill queued so far has ended; null where all have
  std::exception_ptr failure_;
  const OwnedStream lane_;
};

}  // namespace offload
