#include "spiller.h"

#include <new>
#include <utility>

#include "error.h"
#include "mutants.h"

namespace offload {

EventRef Spiller::make_room(size_t bytes) {
  size_t queued_bytes = 0;
  const EventRef spilled = parts_.lane_events->take();
  parts_.lanes->event_arm(spilled.get());
  // Fires the event when the last spill queued below has ended, or on return if none is queued.
  const std::shared_ptr<void> under_way(spilled.get(),
                                        [lanes = parts_.lanes, spilled](void*) { lanes->event_fire(spilled.get()); });
  for (auto entry = resident_.begin(); entry != resident_.end() && queued_bytes < bytes;) {
    const SlabRef slot = *entry;
    queue_spill(slot, under_way);
    slot->spill = Spill::queued;
    queued_bytes += slot->bytes;
    last_spill_ = spilled;
    entry = resident_.erase(entry);
  }
  if (last_spill_ != nullptr && parts_.lanes->event_done(last_spill_.get())) last_spill_ = nullptr;
  return last_spill_;
}

// Queues a wait for the copy-out, then the spill. If this throws, no spill is queued; a queued wait is harmless.
void Spiller::queue_spill(const SlabRef& slot, const std::shared_ptr<void>& under_way) {
  if (parts_.lanes == parts_.device) {
    OFFLOAD_EDGE("spill waits for copy-out", parts_.lanes->stream_wait(lane_, slot->out_event.get()));
  } else {
    OFFLOAD_EDGE("spill waits for copy-out",
                 parts_.lanes->call(lane_, [device = parts_.device, done = slot->out_event] {
                   try {
                     device->event_synchronize(done.get());
                   } catch (const std::exception&) {  // `spill` asks again whether the copy has ended
                   }
                 }));
  }
  const SlabRef held = OFFLOAD_BROKEN("a queued spill holds its slot") ? SlabRef(SlabRef(), slot.get()) : slot;
  parts_.lanes->call(lane_, [this, store = parts_.keep(), held, under_way] { spill(held); });
}

void Spiller::spill(const SlabRef& slot) {
  std::unique_lock lock(parts_.mutex);
  slot->spill = Spill::none;
  if (slot->state == State::released) return parts_.free_slot(*slot);
  try {
    const bool has_arrived =
        OFFLOAD_BROKEN("spill waits for copy-out") || parts_.device->event_done(slot->out_event.get());
    if (!has_arrived) return offer(slot);  // waiting for the copy-out failed
    if (slot->state == State::copying_out) {
      parts_.count_out(*slot);
      advance(*slot, State::out);
    }
  } catch (const std::exception&) {  // a failed query, or no memory for its message
    failure_ = std::current_exception();
    OFFLOAD_EDGE("a spill that failed may be tried again", offer(slot));
    return;
  }
  if (slot->state != State::out && slot->state != State::ready) return;  // prefetched meanwhile: the block stays in RAM
  advance(*slot, State::spilling);
  slot->spill = Spill::writing;
  const bool written = static_cast<bool>(slot->extent) || write_extent(*slot, lock);
  slot->spill = written ? Spill::none : Spill::failed;
  if (slot->state == State::spilling && written) {
    parts_.pool.release(slot->block, parts_.last_copy(*slot));
    slot->block = {};
    advance(*slot, State::on_disk);
  } else if (slot->state == State::spilling) {
    advance(*slot, State::out);
  }
  if (slot->state == State::released) return parts_.free_slot(*slot);
  offer(slot);
}

void Spiller::offer(const SlabRef& slot) {
  const bool has_begun = slot->out_event != nullptr;
  const bool is_wanted = slot->state == State::copying_in || slot->state == State::arriving;
  if (!has_begun || !slot->block || is_wanted || slot->spill != Spill::none) return;
  try {
    resident_.insert(slot);
  } catch (const std::bad_alloc&) {
    // The block stays in RAM; others are spilled instead.
  }
}

// Writes the block to disk; releases the lock while it writes. Returns false if writing failed.
bool Spiller::write_extent(SlabSlot& slot, std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  const double begin = now_seconds();
  Extent extent;
  uint32_t crc = 0;
  bool written = true;
  try {
    // Whole sectors are written. Blocks are allocated in multiples of 4 KiB, so the last sector can be read in full. At
    // least one sector is written, because an extent of zero bytes means that the block has no extent.
    extent = parts_.file->allocate((std::max<size_t>(slot.bytes, 1) + kPageBytes - 1) / kPageBytes * kPageBytes);
    crc = parts_.file->write(extent, 0, slot.block.data, extent.bytes, 0);
  } catch (...) {
    OFFLOAD_EDGE("a failed write gives its extent back", parts_.file->release(extent));
    extent = {};
    written = OFFLOAD_BROKEN("a write that failed is reported");
  }
  lock.lock();
  slot.extent = extent;
  slot.crc_out = crc;
  parts_.stats.failed += written ? 0 : 1;
  parts_.stats.spilled_bytes += written ? slot.bytes : 0;
  if (written) parts_.log.add(CopyKind::spill, slot.id, slot.bytes, begin);
  return written;
}

}  // namespace offload
