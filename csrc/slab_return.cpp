// The way back: slab → device on the copy-in stream, fed by the pump lane; file → bounce → device by the fill lane.
#include <algorithm>
#include <new>
#include <stdexcept>

#include "error.h"
#include "mutants.h"
#include "slab_tier.h"

namespace offload {

void SlabStore::begin_in(const SlotRef& base, Stream compute) {
  auto slot = std::static_pointer_cast<SlabSlot>(base);
  std::lock_guard lock(mutex_);
  if (slot->state == State::queued) issue_outgoing();
  if (slot->state == State::failed || slot->state == State::cancelled)
    throw std::logic_error("nothing was swapped out: the copy-out did not succeed");
  const EventRef target_free = events_->record(compute);
  const bool in_slab = static_cast<bool>(slot->block);
  const size_t part_bytes = in_slab ? slice_bytes_ : bounce_bytes_;
  const size_t slices = std::max<size_t>((slot->bytes + part_bytes - 1) / part_bytes, 1);
  const EventRef filled = in_slab ? nullptr : lane_events_->take();
  if (filled != nullptr) lanes_->event_arm(filled.get());
  for (size_t slice = 0; slice < slices; ++slice) {  // each finds nothing to do where the queue has no room
    if (in_slab) {
      lanes_->call(pump_lane_, [store = self()] { store->pump(); });
    } else {
      lanes_->call(fill_lane_, [store = self()] { store->fill(); });
    }
  }
  (in_slab ? from_slab_ : from_disk_).push_back(slot);
  resident_.erase(slot);
  advance(*slot, in_slab ? State::copying_in : State::filling);
  slot->target_free = target_free;
  slot->filled = filled;
  slot->compute = compute;
  slot->crc_in = 0;
  slot->issued_bytes = 0;
  slot->urgent = false;
  slot->consumed = false;
  if (!in_slab && OFFLOAD_BROKEN("extent outlives its fill")) file_->release(slot->extent);
}

// The copy-in stream waits for the target's last use and for the bytes.
void SlabStore::await_target(const SlabSlot& slot) {
  OFFLOAD_EDGE("copy-in waits for compute", device_->stream_wait(in_stream_, slot.target_free.get()));
  OFFLOAD_EDGE("copy-in waits for its copy-out", device_->stream_wait(in_stream_, slot.out_event.get()));
}

void SlabStore::issue_slice(SlabSlot& slot, const char* from, size_t bytes) {
  if (slot.issued_bytes == 0) {
    await_target(slot);
    slot.in = std::make_shared<Transfer>();
    slot.in->begin = events_->record(in_stream_);
  }
  if (bytes > 0) device_->copy_in(static_cast<char*>(slot.target) + slot.issued_bytes, from, bytes, in_stream_);
  slot.issued_bytes += bytes;
  ++stats_.in_transfers;
  if (slot.issued_bytes < slot.bytes) return;
  slot.in->end = events_->record(in_stream_);
  end_in(slot);
}

// All of the slot's copy-in has been issued.
void SlabStore::end_in(SlabSlot& slot) {
  slot.in_event = slot.in->end;
  ++stats_.in_copies;
  stats_.in_bytes += slot.bytes;
  log_.add(CopyKind::in, slot.id, slot.bytes, slot.in->begin, slot.in->end);
  advance(slot, State::ready);
}

void SlabStore::issue_from_slab(const Ref& slot, size_t bytes) {
  try {
    issue_slice(*slot, slot->block.data + slot->issued_bytes, bytes);
  } catch (...) {
    slot->failure = std::current_exception();
    settle(in_stream_);  // slices issued before write to the target, which is free to go when this is known
    slot->issued_bytes = 0;
    advance(*slot, State::out);
  }
  if (slot->state == State::copying_in) return;
  remove(from_slab_, *slot);
}

// One transfer for several small blocks. Where that fails each is tried alone.
void SlabStore::issue_in(const Refs& slots) {
  try {
    copy_in(slots);
  } catch (...) {
    settle(in_stream_);
    for (const Ref& slot : slots) issue_from_slab(slot, slot->bytes);
    return;
  }
  for (const Ref& slot : slots) {
    end_in(*slot);
    remove(from_slab_, *slot);
  }
}

void SlabStore::copy_in(const Refs& slots) {
  auto transfer = std::make_shared<Transfer>();
  std::vector<Copy> copies;
  for (size_t each = 0; each < slots.size(); ++each) {  // later ones cover earlier ones of the same stream, or transfer
    const SlabSlot& slot = *slots[each];
    const SlabSlot* next = each + 1 < slots.size() ? slots[each + 1].get() : nullptr;
    if (next == nullptr || next->compute != slot.compute)
      OFFLOAD_EDGE("batch waits for compute", device_->stream_wait(in_stream_, slot.target_free.get()));
    if (next == nullptr || next->out_event != slot.out_event)
      OFFLOAD_EDGE("batch waits for its copy-outs", device_->stream_wait(in_stream_, slot.out_event.get()));
    copies.push_back({slot.target, slot.block.data, slot.bytes});
  }
  transfer->begin = events_->record(in_stream_);
  device_->copy_in_batch(copies.data(), copies.size(), in_stream_);
  transfer->end = events_->record(in_stream_);
  ++stats_.in_transfers;
  for (const Ref& slot : slots) {
    slot->in = transfer;
    slot->issued_bytes = slot->bytes;
  }
}

// `first` and, where it is small, the small ones behind it that are as urgent, within a slice and what memory there is
// to name them in.
SlabStore::Refs SlabStore::next_incoming(const Ref& first) {
  Refs run;
  size_t run_bytes = 0;
  for (auto each = std::find(from_slab_.begin(), from_slab_.end(), first); each != from_slab_.end(); ++each) {
    const SlabSlot& slot = **each;
    if (!is_small(slot) || slot.issued_bytes > 0 || slot.urgent != first->urgent) break;
    if ((run_bytes += slot.bytes) > slice_bytes_) break;
    try {
      run.push_back(*each);
    } catch (const std::bad_alloc&) {
      break;
    }
  }
  return run;
}

// Issues one slice of the most urgent block, or several small blocks, once less than kInFlight are on their way.
void SlabStore::pump() {
  std::unique_lock lock(mutex_);
  await_oldest(slices_in_flight_, lock);
  const Ref first = most_urgent(from_slab_);
  if (first == nullptr) return;
  const Refs run = next_incoming(first);
  if (run.size() > 1) {
    issue_in(run);
  } else {
    issue_from_slab(first, std::min(slice_bytes_, first->bytes - first->issued_bytes));
  }
  note_in_flight(slices_in_flight_, in_stream_);
}

void SlabStore::fill() {
  std::unique_lock lock(mutex_);
  const Ref slot = most_urgent(from_disk_);
  if (slot == nullptr) return;
  slot->busy = true;
  try {
    fill_slice(slot, lock);
  } catch (...) {
    const std::exception_ptr failure = std::current_exception();
    if (lock.owns_lock()) lock.unlock();
    // Slices issued before write to the target: nobody may hear of it, and free it, before them.
    OFFLOAD_EDGE("failure is told after the slices before it", settle(in_stream_));
    lock.lock();
    slot->failure = failure;
    slot->issued_bytes = 0;
    advance(*slot, State::on_disk);
  }
  slot->busy = false;
  if (slot->state == State::filling && !slot->released) return;
  remove(from_disk_, *slot);
  lanes_->event_fire(slot->filled.get());
  if (slot->released) free_slot(*slot);
}

void SlabStore::fill_slice(const Ref& slot, std::unique_lock<std::mutex>& lock) {
  Bounce& bounce = bounce_[next_bounce_];
  next_bounce_ = (next_bounce_ + 1) % bounce_.size();
  const size_t at = slot->issued_bytes;
  const size_t bytes = std::min(bounce_bytes_, slot->bytes - at);
  const EventRef fence = bounce.fence;
  lock.unlock();
  if (fence != nullptr) OFFLOAD_EDGE("bounce waits for its last read", device_->event_synchronize(fence.get()));
  if (at == 0) slot->fill_began_seconds = now_seconds();
  const size_t sectors_bytes = std::min<size_t>(bounce_bytes_, slot->extent.bytes - at);
  slot->crc_in = file_->read(slot->extent, at, bounce.block.data, sectors_bytes, slot->crc_in);
  if (at + bytes == slot->bytes) file_->verify(slot->extent, slot->crc_out, slot->crc_in);
  lock.lock();
  if (at + bytes == slot->bytes) log_.add(CopyKind::fill, slot->id, slot->bytes, slot->fill_began_seconds);
  if (slot->released) return;
  issue_slice(*slot, bounce.block.data, bytes);
  bounce.fence = slot->state == State::ready ? slot->in_event : events_->record(in_stream_);
}

// Lets the block overtake all others: afterwards its copy-in has been issued, or has failed.
void SlabStore::issue_rest(const Ref& slot, std::unique_lock<std::mutex>& lock) {
  slot->urgent = true;
  if (slot->state == State::filling) {
    const EventRef filled = slot->filled;
    lock.unlock();
    lanes_->event_synchronize(filled.get());
    lock.lock();
  }
  if (slot->state == State::copying_in) issue_from_slab(slot, slot->bytes - slot->issued_bytes);
}

void SlabStore::settle(const SlotRef& base) {
  auto slot = std::static_pointer_cast<SlabSlot>(base);
  std::unique_lock lock(mutex_);
  issue_rest(slot, lock);
  const EventRef in_event = slot->in_event;
  lock.unlock();
  if (in_event != nullptr) device_->event_synchronize(in_event.get());
}

void SlabStore::finish_in(const SlotRef& base, Stream compute) {
  auto slot = std::static_pointer_cast<SlabSlot>(base);
  std::unique_lock lock(mutex_);
  issue_rest(slot, lock);
  slot->consumed = true;
  make_spillable(slot);
  require_brought_back(*slot);
  const EventRef in_event = slot->in_event;
  lock.unlock();
  if (OFFLOAD_BROKEN("a read that failed is told") && in_event == nullptr) return;  // the bytes are asked, not a crash
  OFFLOAD_EDGE("consumer waits for copy-in", device_->stream_wait(compute, in_event.get()));
}

}  // namespace offload
