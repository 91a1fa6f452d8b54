#include "direct_tier.h"

#include <algorithm>
#include <new>
#include <numeric>
#include <stdexcept>

#include "mutants.h"

namespace offload {

void DirectStore::save_ends(DirectSlot& slot) {
  const char* source = static_cast<const char*>(slot.source);
  const size_t tail_at = slot.head_bytes + slot.middle_bytes;
  slot.ends.assign(source, source + slot.head_bytes);
  slot.ends.insert(slot.ends.end(), source + tail_at, source + slot.bytes);
}

SlotRef DirectStore::queue_copy_out(const void* source, size_t bytes, Stream, uint64_t need) {
  auto slot = std::make_shared<DirectSlot>();
  slot->id = ++last_id_;
  slot->bytes = bytes;
  slot->need = need;
  slot->source = source;
  const size_t alignment = file_.alignment_bytes();
  slot->head_bytes = std::min(bytes, (alignment - reinterpret_cast<uintptr_t>(source) % alignment) % alignment);
  slot->middle_bytes = (bytes - slot->head_bytes) / alignment * alignment;
  std::lock_guard lock(mutex_);
  if (slot->middle_bytes == 0) {
    const double begin = now_seconds();
    save_ends(*slot);
    log_.add(CopyKind::out, slot->id, bytes, begin);
    advance(*slot, State::out);
  } else {
    slot->out_event = events_->take();
    lanes_->event_arm(slot->out_event.get());
    slot->deferred = defers_;
    if (!defers_) begin_writing();  // before push_back: if that throws, the task finds an empty queue
    outgoing_.push_back(slot);
  }
  ++stats_.live_tickets;
  return slot;
}

// Caller holds the lock.
void DirectStore::begin_writing() {
  if (is_writing_) return;
  lanes_->call(out_lane_, [store = std::static_pointer_cast<DirectStore>(shared_from_this())] { store->write_out(); });
  is_writing_ = true;
}

// Caller holds the lock.
void DirectStore::issue_deferred() {
  for (const Ref& slot : outgoing_) slot->deferred = false;
  if (!outgoing_.empty()) begin_writing();
}

void DirectStore::defer_copy_outs(bool defers) {
  std::lock_guard lock(mutex_);
  defers_ = defers;
  if (!defers) issue_deferred();
}

void DirectStore::issue_out(Slot&) {
  std::lock_guard lock(mutex_);
  issue_deferred();
}

// Returns the blocks that one transfer copies: the first block and the small blocks that follow it in the queue without
// a gap and have the same `urgent` flag, up to slice_bytes_ in total. Fewer if an allocation fails. Empty if the first
// block is large: it is copied alone.
DirectStore::Refs DirectStore::small_run(Queue::const_iterator first, Queue::const_iterator end) const {
  Refs run;
  size_t run_bytes = 0;
  for (auto each = first; each != end; ++each) {
    run_bytes += (*each)->middle_bytes;
    if (!is_small(**each) || (*each)->urgent != (*first)->urgent || run_bytes > slice_bytes_) break;
    try {
      run.push_back(*each);
    } catch (const std::bad_alloc&) {
      break;
    }
  }
  return run;
}

void DirectStore::write_out() {
  for (;;) {
    write_next();
    std::lock_guard lock(mutex_);
    is_writing_ = false;
    if (outgoing_.empty() || outgoing_.front()->deferred) return;
    try {
      return begin_writing();
    } catch (const std::bad_alloc&) {
      is_writing_ = true;  // no memory for another task: this task writes the next block
    }
  }
}

// Writes the first queued block. If it is small, the small blocks that follow it are written in the same transfer.
void DirectStore::write_next() {
  Ref first;
  Refs run;
  {
    std::lock_guard lock(mutex_);
    if (outgoing_.empty() || outgoing_.front()->deferred) return;
    first = outgoing_.front();
    run = small_run(outgoing_.begin(), outgoing_.end());
    for (size_t left = std::max<size_t>(run.size(), 1); left > 0; --left) {
      advance(*outgoing_.front(), State::copying_out);
      outgoing_.pop_front();
    }
    ++stats_.out_transfers;
  }
  if (run.empty()) {
    write_large(*first);
    lanes_->event_fire(first->out_event.get());
  } else {
    write_small(run);
  }
  for (const Ref& slot : run) lanes_->event_fire(slot->out_event.get());
}

void DirectStore::write_large(DirectSlot& slot) {
  const double begin_seconds = now_seconds();
  Extent extent;
  uint32_t crc = 0;
  std::exception_ptr failure;
  try {
    save_ends(slot);
    extent = file_.allocate(slot.middle_bytes);
    crc = file_.write(extent, 0, static_cast<const char*>(slot.source) + slot.head_bytes, slot.middle_bytes, 0);
    lanes_->pace(begin_seconds, slot.middle_bytes);
  } catch (...) {
    failure = std::current_exception();
  }
  std::lock_guard lock(mutex_);
  stats_.out_seconds += now_seconds() - begin_seconds;
  end_out(slot, extent, crc, failure, begin_seconds);
}

// Writes several small blocks in one transfer. If disk space or memory for all of them cannot be allocated, each block
// is written separately.
void DirectStore::write_small(const Refs& slots) {
  const double begin_seconds = now_seconds();
  std::vector<uint64_t> bytes;
  std::vector<Extent> extents;
  std::vector<Piece> pieces;
  try {
    for (const Ref& slot : slots) {
      save_ends(*slot);
      bytes.push_back(slot->middle_bytes);
    }
    pieces.reserve(slots.size());
    extents = file_.allocate_adjacent(bytes);
  } catch (...) {
    if (slots.size() > 1) {
      for (const Ref& slot : slots) write_large(*slot);
      return;
    }
    std::lock_guard lock(mutex_);
    return end_out(*slots.front(), {}, 0, std::current_exception(), begin_seconds);
  }
  for (size_t each = 0; each < slots.size(); ++each) {
    auto* source = static_cast<char*>(const_cast<void*>(slots[each]->source));  // only read
    pieces.push_back({extents[each], source + slots[each]->head_bytes, slots[each]->middle_bytes, 0, nullptr});
  }
  file_.write_together(pieces);
  lanes_->pace(begin_seconds, std::accumulate(bytes.begin(), bytes.end(), size_t{0}));
  std::lock_guard lock(mutex_);
  stats_.out_seconds += now_seconds() - begin_seconds;
  for (size_t each = 0; each < slots.size(); ++each)
    end_out(*slots[each], pieces[each].extent, pieces[each].crc, pieces[each].failure, begin_seconds);
}

// Caller holds the lock.
void DirectStore::end_out(DirectSlot& slot, const Extent& extent, uint32_t crc, std::exception_ptr failure,
                          double begin_seconds) {
  const bool is_released = slot.state == State::released;
  if (failure != nullptr && !OFFLOAD_BROKEN("a write that failed is reported")) {
    OFFLOAD_EDGE("a failed write gives its extent back", file_.release(extent));
    slot.failure = failure;
    ++stats_.failed;
    if (!is_released) advance(slot, State::failed);
  } else {
    slot.extent = extent;
    slot.crc_out = crc;
    ++stats_.out_copies;
    stats_.out_bytes += slot.bytes;
    stats_.spilled_bytes += slot.middle_bytes;
    log_.add(CopyKind::out, slot.id, slot.bytes, begin_seconds);
    if (!is_released) advance(slot, State::on_disk);
  }
  if (is_released) free_slot(slot);
}

bool DirectStore::cancel(Slot& slot) {
  std::lock_guard lock(mutex_);
  // OFFLOAD_BROKEN is false in normal builds (mutants.h).
  if (slot.state != State::queued) return OFFLOAD_BROKEN("cancel refuses a copy that has begun");
  cancel_queued(
      *std::find_if(outgoing_.begin(), outgoing_.end(), [&](const Ref& each) { return each.get() == &slot; }));
  return true;
}

// Caller holds the lock.
void DirectStore::cancel_queued(const Ref& slot) {
  const Ref cancelled = slot;  // `slot` may be the queue's own reference
  outgoing_.erase(std::find(outgoing_.begin(), outgoing_.end(), cancelled));
  advance(*cancelled, State::cancelled);
  ++stats_.cancelled;
  lanes_->event_fire(cancelled->out_event.get());
}

void DirectStore::release(const SlotRef& base) {
  auto slot = std::static_pointer_cast<DirectSlot>(base);
  std::lock_guard lock(mutex_);
  if (slot->state == State::queued) cancel_queued(slot);
  const bool is_transferred = slot->busy || slot->state == State::copying_out;
  const bool is_incoming = slot->state == State::copying_in;
  advance(*slot, State::released);
  if (is_transferred) return;  // the lane task that copies the slot frees it
  if (is_incoming) return end_in(*slot, State::released);
  free_slot(*slot);
}

void DirectStore::free_slot(DirectSlot& slot) {
  OFFLOAD_EDGE("a freed slot gives its extent back", file_.release(slot.extent));
  slot.extent = {};
  slot.target_owner = nullptr;
  --stats_.live_tickets;
}

void DirectStore::quiesce() {
  if (lanes_->in_forked_child() && !OFFLOAD_BROKEN("a forked child waits for no lane")) return;
  {
    std::lock_guard lock(mutex_);
    while (!outgoing_.empty()) cancel_queued(outgoing_.front());
  }
  lanes_->stream_synchronize(out_lane_);
  lanes_->stream_synchronize(in_lane_);
}

size_t DirectStore::trim() {
  require_same_process();
  return file_.trim();
}

StoreStats DirectStore::stats() {
  require_same_process();
  std::lock_guard lock(mutex_);
  StoreStats result = stats_;
  result.spill = file_.stats();
  return result;
}

std::shared_ptr<SwapStore> SwapStore::create_direct(std::shared_ptr<HostDriver> lanes, const StoreOptions& options) {
  if (options.slice_bytes == 0 || options.slice_bytes % 4096 != 0)
    throw std::invalid_argument("slice_bytes must be a positive multiple of 4096");
  return std::make_shared<DirectStore>(std::move(lanes), options);
}

}  // namespace offload
