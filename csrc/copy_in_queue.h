// The copy-ins of the slab tier: slab → device on the store's copy-in stream, issued by the pump lane; file → bounce
// buffer → device, issued by the fill lane.
//
// A task on the pump lane issues one slice of its first block, or several small blocks as one transfer. A task on the
// fill lane issues one slice, of the size of a bounce buffer. So an urgent block can overtake the rest of a large one.
//
// Callers hold the store's lock. If a lane task gets std::bad_alloc, only the blocks of that task fail; lane tasks
// throw only DriverError.
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

  // Queues a slot. If it throws (DriverError, std::bad_alloc), the slot is not queued.
  void push(const SlabRef& slot, Stream compute);
  // Issues the slot's copy-in before all copy-ins for which no caller waits. Returns when it has been issued or has
  // failed. Releases the lock while it waits for the disk.
  void issue(const SlabRef& slot, std::unique_lock<std::mutex>& lock);
  // Removes a slot that is being released. Returns true if the fill lane is reading its bytes; that lane then frees it.
  bool cancel(const SlabSlot& slot);
  // Waits until both lanes have run all their tasks. Call it without the lock.
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
  std::array<EventRef, 2> last_reads_;  // for each bounce buffer: the end of its last copy to the device
  std::deque<SlabRef> from_slab_;
  std::deque<SlabRef> from_disk_;      // the slots for which a caller waits come first
  size_t urgent_count_ = 0;            // number of slots in from_disk_ for which a caller waits
  const SlabSlot* filling_ = nullptr;  // the slot whose bytes the fill lane is reading
  InFlight in_flight_;
  const OwnedStream pump_lane_;  // slab → copy-in stream, slice by slice
  const OwnedStream fill_lane_;  // file → bounce → copy-in stream
};

}  // namespace offload
