#include "copy_in_queue.h"

#include <algorithm>
#include <new>

#include "error.h"
#include "mutants.h"

namespace offload {
namespace {

std::deque<SlabRef>::iterator position(std::deque<SlabRef>& queue, const SlabSlot& slot) {
  return std::find_if(queue.begin(), queue.end(), [&](const SlabRef& each) { return each.get() == &slot; });
}

}  // namespace

void CopyInQueue::push(const SlabRef& slot, Stream compute) {
  const EventRef target_free = parts_.events->record(compute);
  const bool in_slab = static_cast<bool>(slot->block);
  const size_t part_bytes = in_slab ? parts_.slice_bytes : parts_.bounce_bytes;
  const size_t slices = std::max<size_t>((slot->bytes + part_bytes - 1) / part_bytes, 1);
  const EventRef filled = in_slab ? nullptr : parts_.lane_events->take();
  if (filled != nullptr) parts_.lanes->event_arm(filled.get());
  // The tasks are queued before the slot: if push_back below fails, there are more tasks than slices, and the last ones
  // find an empty queue.
  for (size_t slice = 0; slice < slices; ++slice) {
    if (in_slab) {
      parts_.lanes->call(pump_lane_, [this, store = parts_.keep()] { pump(); });
    } else {
      parts_.lanes->call(fill_lane_, [this, store = parts_.keep()] { fill(); });
    }
  }
  (in_slab ? from_slab_ : from_disk_).push_back(slot);
  advance(*slot, in_slab ? State::copying_in : State::filling);
  slot->target_free = target_free;
  slot->filled = filled;
  slot->compute = compute;
  slot->crc_in = 0;
  slot->issued_bytes = 0;
  // free_slot releases the extent. The next line releases it too early, and only in a test: OFFLOAD_BROKEN is false in
  // normal builds (mutants.h).
  if (!in_slab && OFFLOAD_BROKEN("extent outlives its fill")) parts_.file->release(slot->extent);
}

// Makes the copy-in stream wait until the compute stream no longer uses the target's memory and the copy-out has ended.
void CopyInQueue::await_target(const SlabSlot& slot) {
  OFFLOAD_EDGE("copy-in waits for compute", parts_.device->stream_wait(parts_.in_stream, slot.target_free.get()));
  OFFLOAD_EDGE("copy-in waits for its copy-out", parts_.device->stream_wait(parts_.in_stream, slot.out_event.get()));
}

void CopyInQueue::issue_slice(SlabSlot& slot, const char* from, size_t bytes) {
  if (slot.issued_bytes == 0) {
    await_target(slot);
    slot.in = std::make_shared<Transfer>();
    slot.in->copies = 1;
    slot.in->bytes = slot.bytes;
    slot.in->begin = parts_.events->record(parts_.in_stream);
  }
  if (bytes > 0)
    parts_.device->copy_in(static_cast<char*>(slot.target) + slot.issued_bytes, from, bytes, parts_.in_stream);
  slot.issued_bytes += bytes;
  ++parts_.stats.in_transfers;
  if (slot.issued_bytes < slot.bytes) return;
  slot.in->end = parts_.events->record(parts_.in_stream);
  parts_.note_in(slot.in);
  end(slot);
}

// Called when the last slice of a copy-in has been issued: sets in_event, logs the copy, and changes the state to
// `arriving`.
void CopyInQueue::end(SlabSlot& slot) {
  slot.in_event = slot.in->end;
  parts_.log.add(CopyKind::in, slot.id, slot.bytes, slot.in->begin, slot.in->end);
  advance(slot, State::arriving);
}

void CopyInQueue::issue_from_slab(const SlabRef& slot, size_t bytes) {
  try {
    issue_slice(*slot, slot->block.data + slot->issued_bytes, bytes);
  } catch (...) {
    slot->failure = std::current_exception();
    parts_.settle(parts_.in_stream);  // earlier slices may still write to the target, which may be freed from here on
    slot->issued_bytes = 0;
    advance(*slot, State::out);
  }
  if (slot->state == State::copying_in) return;
  remove_from_slab(*slot);
}

// Issues several small blocks as one transfer, which waits for nothing (see next_run). If that fails, each is tried
// alone.
void CopyInQueue::issue_run(const SlabRefs& slots) {
  try {
    copy(slots);
  } catch (...) {
    parts_.settle(parts_.in_stream);
    for (const SlabRef& slot : slots) issue_from_slab(slot, slot->bytes);
    return;
  }
  for (const SlabRef& slot : slots) {
    end(*slot);
    remove_from_slab(*slot);
  }
}

void CopyInQueue::copy(const SlabRefs& slots) {
  auto transfer = std::make_shared<Transfer>();
  std::vector<Copy> copies;
  for (const SlabRef& slot : slots) {
    copies.push_back({slot->target, slot->block.data, slot->bytes});
    transfer->bytes += slot->bytes;
  }
  transfer->copies = slots.size();
  transfer->begin = parts_.events->record(parts_.in_stream);
  parts_.device->copy_in_batch(copies.data(), copies.size(), parts_.in_stream);
  transfer->end = parts_.events->record(parts_.in_stream);
  ++parts_.stats.in_transfers;
  parts_.note_in(transfer);
  for (const SlabRef& slot : slots) {
    slot->in = transfer;
    slot->issued_bytes = slot->bytes;
  }
}

// Returns `first` and the small blocks directly behind it that can be copied without a wait, of at most slice_bytes in
// total; fewer if memory runs out. Empty if `first` is large, partly issued, or has to wait.
SlabRefs CopyInQueue::next_run(const SlabRef& first) {
  SlabRefs run;
  size_t run_bytes = 0;
  for (auto each = std::find(from_slab_.begin(), from_slab_.end(), first); each != from_slab_.end(); ++each) {
    const SlabSlot& slot = **each;
    if (!parts_.is_small(slot) || slot.issued_bytes > 0) break;
    if ((run_bytes += slot.bytes) > parts_.slice_bytes) break;
    if (!OFFLOAD_BROKEN("a batch has only free targets") && !parts_.is_reached(slot.target_free)) break;
    if (!OFFLOAD_BROKEN("a batch has only blocks that are copied out") && !parts_.is_reached(slot.out_event)) break;
    try {
      run.push_back(*each);
    } catch (const std::bad_alloc&) {
      break;
    }
  }
  return run;
}

// Issues one slice of the first block, or several small blocks, once fewer than InFlight::kMax transfers are in flight.
void CopyInQueue::pump() {
  std::unique_lock lock(parts_.mutex);
  in_flight_.await_room(lock);
  if (from_slab_.empty()) return;
  const SlabRef first = from_slab_.front();
  const SlabRefs run = next_run(first);
  if (run.size() > 1) {
    issue_run(run);
  } else {
    issue_from_slab(first, std::min(parts_.slice_bytes, first->bytes - first->issued_bytes));
  }
  in_flight_.note(parts_.in_stream);
}

void CopyInQueue::fill() {
  std::unique_lock lock(parts_.mutex);
  if (from_disk_.empty()) return;
  const SlabRef slot = from_disk_.front();
  filling_ = slot.get();
  try {
    fill_slice(slot, lock);
  } catch (...) {
    const std::exception_ptr failure = std::current_exception();
    if (lock.owns_lock()) lock.unlock();
    // Earlier slices may still write to the target; the caller may free the target once it sees the failure.
    OFFLOAD_EDGE("failure is reported after earlier slices have ended", parts_.settle(parts_.in_stream));
    lock.lock();
    slot->failure = failure;
    slot->issued_bytes = 0;
    if (slot->state != State::released) advance(*slot, State::on_disk);
  }
  filling_ = nullptr;
  if (slot->state == State::filling) return;
  remove_from_disk(*slot);
  parts_.lanes->event_fire(slot->filled.get());
  if (slot->state == State::released) parts_.free_slot(*slot);
}

void CopyInQueue::fill_slice(const SlabRef& slot, std::unique_lock<std::mutex>& lock) {
  const Block& bounce = parts_.bounces[next_bounce_];
  EventRef& last_read = last_reads_[next_bounce_];
  next_bounce_ = (next_bounce_ + 1) % parts_.bounces.size();
  const size_t at = slot->issued_bytes;
  const size_t bytes = std::min(parts_.bounce_bytes, slot->bytes - at);
  const EventRef fence = last_read;
  lock.unlock();
  if (fence != nullptr) OFFLOAD_EDGE("bounce waits for its last read", parts_.device->event_synchronize(fence.get()));
  if (at == 0) slot->fill_began_seconds = now_seconds();
  const size_t sectors_bytes = std::min<size_t>(parts_.bounce_bytes, slot->extent.bytes - at);
  slot->crc_in = parts_.file->read(slot->extent, at, bounce.data, sectors_bytes, slot->crc_in);
  if (at + bytes == slot->bytes) parts_.file->verify(slot->extent, slot->crc_out, slot->crc_in);
  lock.lock();
  if (at + bytes == slot->bytes) parts_.log.add(CopyKind::fill, slot->id, slot->bytes, slot->fill_began_seconds);
  if (slot->state == State::released) return;
  issue_slice(*slot, bounce.data, bytes);
  last_read = slot->state == State::arriving ? slot->in_event : parts_.events->record(parts_.in_stream);
}

void CopyInQueue::issue(const SlabRef& slot, std::unique_lock<std::mutex>& lock) {
  if (slot->state == State::filling) {
    make_urgent(*slot);
    const EventRef filled = slot->filled;
    lock.unlock();
    parts_.lanes->event_synchronize(filled.get());
    lock.lock();
  }
  if (slot->state == State::copying_in) issue_from_slab(slot, slot->bytes - slot->issued_bytes);
}

bool CopyInQueue::cancel(const SlabSlot& slot) {
  remove_from_slab(slot);
  if (&slot == filling_) return true;
  if (slot.state != State::filling) return false;
  remove_from_disk(slot);
  parts_.lanes->event_fire(slot.filled.get());
  return false;
}

void CopyInQueue::drain() {
  parts_.lanes->stream_synchronize(pump_lane_);
  parts_.lanes->stream_synchronize(fill_lane_);
}

void CopyInQueue::make_urgent(const SlabSlot& slot) {
  const auto end_of_urgent = from_disk_.begin() + static_cast<std::ptrdiff_t>(urgent_count_);
  const auto at = position(from_disk_, slot);
  if (at < end_of_urgent || at == from_disk_.end()) return;
  std::rotate(end_of_urgent, at, at + 1);
  ++urgent_count_;
}

void CopyInQueue::remove_from_disk(const SlabSlot& slot) {
  const auto at = position(from_disk_, slot);
  if (at == from_disk_.end()) return;
  if (static_cast<size_t>(at - from_disk_.begin()) < urgent_count_) --urgent_count_;
  from_disk_.erase(at);
}

void CopyInQueue::remove_from_slab(const SlabSlot& slot) {
  const auto at = position(from_slab_, slot);
  if (at != from_slab_.end()) from_slab_.erase(at);
}

}  // namespace offload
