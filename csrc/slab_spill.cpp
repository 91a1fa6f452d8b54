// Slab → file: which blocks make room when the pinned memory is full, on the spill lane.
#include <new>

#include "error.h"
#include "mutants.h"
#include "slab_tier.h"

namespace offload {

// Queues the coldest residents for the disk until `bytes` are on their way. Null where none can go, or is going.
EventRef SlabStore::spill_coldest(size_t bytes) {
  size_t leaving_bytes = 0;
  const EventRef spilled = lane_events_->take();
  lanes_->event_arm(spilled.get());
  // Fires when the last spill below has ended and is gone; at once where there is none.
  const std::shared_ptr<void> under_way(spilled.get(),
                                        [lanes = lanes_, spilled](void*) { lanes->event_fire(spilled.get()); });
  for (auto entry = resident_.begin(); entry != resident_.end() && leaving_bytes < bytes;) {
    const Ref slot = *entry;
    if (!slot->spill_failed) {
      queue_spill(slot, under_way);
      slot->spill_queued = true;
      leaving_bytes += slot->bytes;
      last_spill_ = spilled;
    }
    entry = resident_.erase(entry);
  }
  if (last_spill_ != nullptr && lanes_->event_done(last_spill_.get())) last_spill_ = nullptr;
  return last_spill_;
}

// Where that throws, nothing has changed: a wait without its spill harms nobody.
void SlabStore::queue_spill(const Ref& slot, const std::shared_ptr<void>& under_way) {
  if (lanes_ == device_) {
    OFFLOAD_EDGE("spill waits for copy-out", lanes_->stream_wait(spill_lane_, slot->out_event.get()));
  } else {
    OFFLOAD_EDGE("spill waits for copy-out", lanes_->call(spill_lane_, [device = device_, done = slot->out_event] {
      device->event_synchronize(done.get());
    }));
  }
  const Ref held = OFFLOAD_BROKEN("a queued spill holds its slot") ? Ref(Ref(), slot.get()) : slot;
  lanes_->call(spill_lane_, [store = self(), held, under_way] { store->spill(held); });
}

void SlabStore::spill(const Ref& slot) {
  std::unique_lock lock(mutex_);
  slot->spill_queued = false;
  if (slot->released) return free_slot(*slot);
  try {
    const bool has_arrived = OFFLOAD_BROKEN("spill waits for copy-out") || device_->event_done(slot->out_event.get());
    if (!has_arrived) return make_spillable(slot);  // the wait for it failed
    if (slot->state == State::copying_out) {
      count_out(*slot);
      advance(*slot, State::out);
    }
  } catch (const DriverError&) {
    spill_failure_ = std::current_exception();
    OFFLOAD_EDGE("a spill that failed may be tried again", make_spillable(slot));
    return;
  }
  if (!slot->consumed || (slot->state != State::out && slot->state != State::ready)) return;  // wanted back: it stays
  advance(*slot, State::spilling);
  slot->busy = true;
  const bool written = static_cast<bool>(slot->extent) || write_extent(*slot, lock);
  slot->busy = false;
  if (slot->state == State::spilling && written) {
    pool_.release(slot->block, last_copy(*slot));
    slot->block = {};
    advance(*slot, State::on_disk);
  } else if (slot->state == State::spilling) {
    advance(*slot, State::out);
  }
  if (slot->released) return free_slot(*slot);
  make_spillable(slot);
}

// A retained graph may want the block again; until then its room may be needed elsewhere.
void SlabStore::make_spillable(const Ref& slot) {
  const bool has_begun = slot->out_event != nullptr;
  if (!has_begun || !slot->block || !slot->consumed || slot->busy || slot->spill_queued) return;
  try {
    resident_.insert(slot);
  } catch (const std::bad_alloc&) {
    // It stays in RAM: others make room.
  }
}

// Writes the block out with the lock released meanwhile. False where that failed: the block stays in RAM for good.
bool SlabStore::write_extent(SlabSlot& slot, std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  const double begin = now_seconds();
  Extent extent;
  uint32_t crc = 0;
  bool written = true;
  try {
    // Whole sectors: a block is rounded up to 4 KiB, so the bytes behind the last one exist. Never an empty extent,
    // which is none.
    extent = file_->allocate((std::max<size_t>(slot.bytes, 1) + kPageBytes - 1) / kPageBytes * kPageBytes);
    crc = file_->write(extent, 0, slot.block.data, extent.bytes, 0);
  } catch (...) {
    OFFLOAD_EDGE("a failed write gives its extent back", file_->release(extent));
    extent = {};
    written = OFFLOAD_BROKEN("a write that failed is told");
  }
  lock.lock();
  slot.extent = extent;
  slot.crc_out = crc;
  slot.spill_failed = !written;
  stats_.failed += written ? 0 : 1;
  stats_.spilled_bytes += written ? slot.bytes : 0;
  if (written) log_.add(CopyKind::spill, slot.id, slot.bytes, begin);
  return written;
}

}  // namespace offload
