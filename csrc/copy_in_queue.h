// The way back to a device: slab → device on the store's copy-in stream, fed by the pump lane; file → bounce → device
// by the fill lane.
//
// A lane takes one slice of the most urgent block when its turn comes, or several small blocks as one transfer, so that
// an urgent block overtakes. Callers hold the store's lock. Where there is no memory for what a lane needs, its blocks
// fail, each by itself; a lane throws nothing but DriverError.
#pragma once

#include <array>
#include <deque>
#include <mutex>

#include "slab_slot.h"

namespace offload {

class CopyInQueue {
 public:
  explicit CopyInQueue(SlabParts& parts)
      : parts_(parts), in_flight_(parts), pump_lane_(*parts.lanes), fill_lane_(*parts.lanes) {}

  // Queues a block that has its target. Throws DriverError, std::bad_alloc: then nothing was queued.
  void push(const SlabRef& slot, Stream compute);
  // Lets the block overtake all others: afterwards its copy-in has been issued, or has failed. Releases the lock while
  // it waits for the disk.
  void issue(const SlabRef& slot, std::unique_lock<std::mutex>& lock);
  // Nobody wants the block any more. Whether a lane is reading for it, which then frees the slot.
  bool cancel(const SlabSlot& slot);
  // Waits for the lanes; without the lock.
  void drain();

 private:
  void issue_slice(SlabSlot& slot, const char* from, size_t bytes);
  void issue_from_slab(const SlabRef& slot, size_t bytes);
  void issue_run(const SlabRefs& slots);
  void copy(const SlabRefs& slots);
  void await_target(const SlabSlot& slot);
  void end(SlabSlot& slot);
  SlabRefs next_run(const SlabRef& first);
  void pump();
  void fill();
  void fill_slice(const SlabRef& slot, std::unique_lock<std::mutex>& lock);
  void make_urgent(const SlabSlot& slot);
  void remove_from_disk(const SlabSlot& slot);
  void remove_from_slab(const SlabSlot& slot);

  SlabParts& parts_;
  size_t next_bounce_ = 0;
  std::array<EventRef, 2> last_reads_;  // of the bounces, by the copy-in stream
  std::deque<SlabRef> from_slab_;
  std::deque<SlabRef> from_disk_;  // the urgent ones first
  size_t urgent_count_ = 0;
  const SlabSlot* filling_ = nullptr;  // that the fill lane is reading for
  InFlight in_flight_;
  const OwnedStream pump_lane_;  // feeds the copy-in stream slice by slice
  const OwnedStream fill_lane_;  // file → bounce → copy-in stream
};

}  // namespace offload
