// The copy-ins of the direct tier: sectors are read from the file into the target, its unaligned ends are copied from
// RAM.
#include <algorithm>
#include <new>
#include <stdexcept>

#include "direct_tier.h"

namespace offload {

void DirectStore::restore_ends(const DirectSlot& slot) {
  char* target = static_cast<char*>(slot.target);
  const auto head_end = slot.ends.begin() + static_cast<std::ptrdiff_t>(slot.head_bytes);
  std::copy(slot.ends.begin(), head_end, target);
  std::copy(head_end, slot.ends.end(), target + slot.head_bytes + slot.middle_bytes);
}

void DirectStore::prefetch(const SlotRef& base, void* target, Stream, std::shared_ptr<void> owner) {
  auto slot = std::static_pointer_cast<DirectSlot>(base);
  const size_t alignment = file_.alignment_bytes();
  if ((reinterpret_cast<uintptr_t>(target) - reinterpret_cast<uintptr_t>(slot->source)) % alignment != 0)
    throw std::invalid_argument("the target's address must be congruent to the source's modulo alignment_bytes");
  // The copy-out must have ended. This rarely waits: while the copy-out is in flight, the caller can use the source.
  if (!out_done(*slot)) {
    issue_out(*slot);
    device_->event_synchronize(slot->out_event.get());
  }
  std::lock_guard lock(mutex_);
  require_prefetchable(*slot);
  if (slot->middle_bytes == 0) {
    set_target(*slot, target, owner);
    advance(*slot, State::copying_in);
    const double begin = now_seconds();
    restore_ends(*slot);
    log_.add(CopyKind::in, slot->id, slot->bytes, begin);
    slot->target_owner = nullptr;
    advance(*slot, State::ready);
    return;
  }
  const EventRef in_event = events_->take();
  lanes_->event_arm(in_event.get());
  begin_reading();  // before the block is queued: if push_back fails, the task has nothing to read
  incoming_.push_back(slot);
  set_target(*slot, target, owner);
  advance(*slot, State::copying_in);
  slot->in_event = in_event;
  slot->middle_done = 0;
  slot->crc_in = 0;
  slot->urgent = false;
}

// Caller holds the lock.
void DirectStore::begin_reading() {
  if (is_reading_) return;
  lanes_->call(in_lane_, [store = std::static_pointer_cast<DirectStore>(shared_from_this())] { store->read(); });
  is_reading_ = true;
}

void DirectStore::read() {
  for (;;) {
    read_next();
    std::lock_guard lock(mutex_);
    is_reading_ = false;
    if (incoming_.empty()) return;
    try {
      return begin_reading();
    } catch (const std::bad_alloc&) {
      is_reading_ = true;  // there is no memory for another task: this one goes on
    }
  }
}

// Reads a slice of the first block for which a caller waits, or, if there is none, of the first block: so an urgent
// block overtakes others. If this block is small, reads all of it, and the small blocks directly behind it that are as
// urgent.
void DirectStore::read_next() {
  Ref first;
  Refs run;
  {
    std::lock_guard lock(mutex_);
    if (incoming_.empty()) return;
    auto next = std::find_if(incoming_.begin(), incoming_.end(), [](const Ref& each) { return each->urgent; });
    if (next == incoming_.end()) next = incoming_.begin();
    first = *next;
    run = small_run(next, incoming_.end());
    first->busy = true;
    for (const Ref& slot : run) slot->busy = true;
    ++stats_.in_transfers;
  }
  if (run.empty()) {
    read_slice(*first);
  } else {
    read_small(run);
  }
}

void DirectStore::read_slice(DirectSlot& slot) {
  const double begin_seconds = now_seconds();
  const size_t at = slot.middle_done;
  const size_t bytes = std::min(slice_bytes_, slot.middle_bytes - at);
  if (at == 0) slot.in_began_seconds = begin_seconds;
  std::exception_ptr failure;
  try {
    slot.crc_in = file_.read(slot.extent, at, target_middle(slot) + at, bytes, slot.crc_in);
    lanes_->pace(begin_seconds, bytes);
    if (at + bytes == slot.middle_bytes) file_.verify(slot.extent, slot.crc_out, slot.crc_in);
  } catch (...) {
    failure = std::current_exception();
  }
  std::lock_guard lock(mutex_);
  stats_.in_seconds += now_seconds() - begin_seconds;
  end_slice(slot, bytes, failure);
}

void DirectStore::read_small(const Refs& slots) {
  const double begin_seconds = now_seconds();
  std::vector<Piece> pieces;
  try {
    pieces.reserve(slots.size());
  } catch (const std::bad_alloc&) {
    for (const Ref& slot : slots) read_slice(*slot);
    return;
  }
  size_t bytes = 0;
  for (const Ref& slot : slots) {
    bytes += slot->middle_bytes;
    slot->in_began_seconds = begin_seconds;
    pieces.push_back({slot->extent, target_middle(*slot), slot->middle_bytes, 0, nullptr});
  }
  file_.read_together(pieces);
  lanes_->pace(begin_seconds, bytes);
  for (size_t each = 0; each < slots.size(); ++each) {
    Piece& piece = pieces[each];
    if (piece.failure != nullptr) continue;
    try {
      file_.verify(piece.extent, slots[each]->crc_out, piece.crc);
    } catch (...) {
      piece.failure = std::current_exception();
    }
  }
  std::lock_guard lock(mutex_);
  stats_.in_seconds += now_seconds() - begin_seconds;
  for (size_t each = 0; each < slots.size(); ++each)
    end_slice(*slots[each], slots[each]->middle_bytes, pieces[each].failure);
}

// Caller holds the lock.
void DirectStore::end_slice(DirectSlot& slot, size_t bytes, std::exception_ptr failure) {
  slot.busy = false;
  slot.middle_done += bytes;
  if (slot.state == State::released) {
    end_in(slot, State::released);
  } else if (failure != nullptr) {
    slot.failure = failure;
    end_in(slot, State::on_disk);
  } else if (slot.middle_done == slot.middle_bytes) {
    restore_ends(slot);
    ++stats_.in_copies;
    stats_.in_bytes += slot.bytes;
    log_.add(CopyKind::in, slot.id, slot.bytes, slot.in_began_seconds);
    end_in(slot, State::ready);
  }
}

void DirectStore::end_in(DirectSlot& slot, State state) {
  incoming_.erase(
      std::find_if(incoming_.begin(), incoming_.end(), [&](const Ref& each) { return each.get() == &slot; }));
  slot.target_owner = nullptr;
  advance(slot, state);
  lanes_->event_fire(slot.in_event.get());
  if (state == State::released) free_slot(slot);
}

void DirectStore::swap_in(const SlotRef& slot, Stream) {
  settle(slot);
  std::lock_guard lock(mutex_);
  require_swapped_in(*slot);
}

void DirectStore::settle(const SlotRef& slot) {
  EventRef in_event;
  {
    std::lock_guard lock(mutex_);
    static_cast<DirectSlot&>(*slot).urgent = true;
    in_event = slot->in_event;
  }
  if (in_event != nullptr) device_->event_synchronize(in_event.get());
}

}  // namespace offload
