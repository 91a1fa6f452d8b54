// The copy-ins of the slab tier: slab → device on the store's copy-in stream, issued by the pump lane; file → bounce
// buffer → device, issued by the fill lane.
//
// A lane issues one slice of its first block at a time, or several small blocks as one transfer, so that an urgent
// block can overtake. Callers hold the store's lock. If a lane runs out of memory, only the blocks it works on fail; it
// throws nothing but DriverError.
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

  // Queues a slot. Throws DriverError, std::bad_alloc: nothing was queued then.
  void push(const SlabRef& slot, Stream compute);
  // Lets the slot overtake all others and returns when its copy-in has been issued or has failed. Releases the lock
  // while it waits for the disk.
  void issue(const SlabRef& slot, std::unique_lock<std::mutex>& lock);
  // Removes a slot that is being released. Returns true if the fill lane is reading for it, and so frees it.
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
  const SlabSlot* filling_ = nullptr;  // the slot that the fill lane is reading for
  InFlight in_flight_;
  const OwnedStream pump_lane_;  // slab → copy-in stream, slice by slice
  const OwnedStream fill_lane_;  // file → bounce → copy-in stream
};

}  // namespace offload
