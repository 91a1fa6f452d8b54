// The direct tier: blocks of plain RAM ↔ the spill file, with no buffer in between.
#include <algorithm>
#include <deque>
#include <stdexcept>
#include <vector>

#include "error.h"
#include "mutants.h"
#include "swap_store.h"

namespace offload {
namespace {

struct DirectSlot final : Slot {
  size_t head_bytes = 0;     // before the first aligned address
  size_t middle_bytes = 0;   // on disk
  std::vector<char> ragged;  // head, then tail
  Extent extent;
  uint32_t crc_out = 0;
  uint32_t crc_in = 0;
  size_t middle_done = 0;  // of the copy-in under way
  bool busy = false;       // a lane is transferring
  bool urgent = false;     // somebody waits for it
  double in_began_seconds = 0;
};

class DirectStore final : public SwapStore {
 public:
  DirectStore(std::shared_ptr<HostDriver> lanes, const StoreOptions& options)
      : SwapStore(lanes, lanes),
        slice_bytes_(options.slice_bytes),
        file_(options.spill_directory),
        out_lane_(lanes->stream_create()),
        in_lane_(lanes->stream_create()) {}

  ~DirectStore() override {
    lanes_->stream_destroy(out_lane_);
    lanes_->stream_destroy(in_lane_);
  }

  SlotRef begin_out(const void* source, size_t bytes, Stream, uint64_t need) override;
  bool out_done(Slot& slot) override { return slot.state != State::queued && slot.state != State::copying_out; }
  bool cancel(Slot& slot) override;
  void begin_in(const SlotRef& slot, Stream) override;
  void finish_in(const SlotRef& slot, Stream) override;
  void settle(const SlotRef& slot) override;
  void release(const SlotRef& slot) override;
  void quiesce() override;
  size_t trim() override;
  StoreStats stats() override;
  size_t alignment_bytes() const override { return file_.alignment_bytes(); }
  SpillFile* spill_file() override { return &file_; }

 private:
  using Ref = std::shared_ptr<DirectSlot>;

  using Refs = std::vector<Ref>;

  void write_out();
  Refs next_outgoing();
  void write_large(DirectSlot& slot);
  void write_small(const Refs& slots);
  void end_out(DirectSlot& slot, const Extent& extent, uint32_t crc, std::exception_ptr failure, double begin_seconds);
  void withdraw(const Ref& slot);
  void read();
  Refs next_incoming();
  void read_slice(DirectSlot& slot);
  void read_small(const Refs& slots);
  void end_slice(DirectSlot& slot, size_t bytes, std::exception_ptr failure);
  void end_in(DirectSlot& slot, State state);
  bool is_small(const DirectSlot& slot) const { return slot.middle_bytes < std::min(kSmallBytes, slice_bytes_); }
  static char* target_middle(const DirectSlot& slot) { return static_cast<char*>(slot.target) + slot.head_bytes; }
  void free_slot(DirectSlot& slot);
  static void save_ragged(DirectSlot& slot);
  static void restore_ragged(const DirectSlot& slot);

  const size_t slice_bytes_;
  SpillFile file_;
  const Stream out_lane_;
  const Stream in_lane_;
  std::deque<Ref> outgoing_;  // copy-outs not begun
  std::deque<Ref> incoming_;  // copy-ins not finished
};

void DirectStore::save_ragged(DirectSlot& slot) {
  const char* source = static_cast<const char*>(slot.source);
  const size_t tail_at = slot.head_bytes + slot.middle_bytes;
  slot.ragged.assign(source, source + slot.head_bytes);
  slot.ragged.insert(slot.ragged.end(), source + tail_at, source + slot.bytes);
}

void DirectStore::restore_ragged(const DirectSlot& slot) {
  char* target = static_cast<char*>(slot.target);
  const auto head_end = slot.ragged.begin() + static_cast<std::ptrdiff_t>(slot.head_bytes);
  std::copy(slot.ragged.begin(), head_end, target);
  std::copy(head_end, slot.ragged.end(), target + slot.head_bytes + slot.middle_bytes);
}

SlotRef DirectStore::begin_out(const void* source, size_t bytes, Stream, uint64_t need) {
  auto slot = std::make_shared<DirectSlot>();
  slot->id = ++last_id_;
  slot->bytes = bytes;
  slot->need = need;
  slot->source = source;
  const size_t alignment = file_.alignment_bytes();
  slot->head_bytes = std::min(bytes, (alignment - reinterpret_cast<uintptr_t>(source) % alignment) % alignment);
  slot->middle_bytes = (bytes - slot->head_bytes) / alignment * alignment;
  {
    std::lock_guard lock(mutex_);
    ++stats_.live_tickets;
    if (slot->middle_bytes == 0) {
      const double begin = now_seconds();
      save_ragged(*slot);
      log_.add(CopyKind::out, slot->id, bytes, begin);
      advance(*slot, State::out);
      return slot;
    }
    outgoing_.push_back(slot);
    slot->out_event = events_->take();
    lanes_->event_arm(slot->out_event.get());
  }
  lanes_->call(out_lane_, [store = std::static_pointer_cast<DirectStore>(shared_from_this())] { store->write_out(); });
  return slot;
}

// Writes the block at the front; where it is small, with the small ones behind it.
void DirectStore::write_out() {
  Refs run;
  {
    std::lock_guard lock(mutex_);
    run = next_outgoing();
    if (run.empty()) return;
    for (const Ref& slot : run) advance(*slot, State::copying_out);
    ++stats_.out_transfers;
  }
  if (is_small(*run.front())) {
    write_small(run);
  } else {
    write_large(*run.front());
  }
  for (const Ref& slot : run) lanes_->event_fire(slot->out_event.get());
}

// The longest run of small blocks at the front, within a slice; or the large one that is there.
DirectStore::Refs DirectStore::next_outgoing() {
  Refs run;
  size_t run_bytes = 0;
  while (!outgoing_.empty()) {
    const Ref& next = outgoing_.front();
    run_bytes += next->middle_bytes;
    if (!run.empty() && (!is_small(*run.front()) || !is_small(*next) || run_bytes > slice_bytes_)) break;
    run.push_back(next);
    outgoing_.pop_front();
  }
  return run;
}

void DirectStore::write_large(DirectSlot& slot) {
  const double begin_seconds = now_seconds();
  Extent extent;
  uint32_t crc = 0;
  std::exception_ptr failure;
  try {
    save_ragged(slot);
    extent = file_.allocate(slot.middle_bytes);
    crc = file_.write(extent, 0, static_cast<const char*>(slot.source) + slot.head_bytes, slot.middle_bytes, 0);
  } catch (...) {
    failure = std::current_exception();
  }
  std::lock_guard lock(mutex_);
  stats_.out_seconds += now_seconds() - begin_seconds;
  end_out(slot, extent, crc, failure, begin_seconds);
}

// Submitted together; where there is no room for all, each finds out by itself.
void DirectStore::write_small(const Refs& slots) {
  const double begin_seconds = now_seconds();
  std::vector<uint64_t> bytes;
  std::vector<Extent> extents;
  try {
    for (const Ref& slot : slots) {
      save_ragged(*slot);
      bytes.push_back(slot->middle_bytes);
    }
    extents = file_.allocate_adjacent(bytes);
  } catch (...) {
    if (slots.size() > 1) {
      for (const Ref& slot : slots) write_small({slot});
      return;
    }
    std::lock_guard lock(mutex_);
    return end_out(*slots.front(), {}, 0, std::current_exception(), begin_seconds);
  }
  std::vector<Piece> pieces;
  for (size_t each = 0; each < slots.size(); ++each) {
    auto* source = static_cast<char*>(const_cast<void*>(slots[each]->source));  // written from, never to
    pieces.push_back({extents[each], source + slots[each]->head_bytes, slots[each]->middle_bytes, 0, nullptr});
  }
  file_.write_together(pieces);
  std::lock_guard lock(mutex_);
  stats_.out_seconds += now_seconds() - begin_seconds;
  for (size_t each = 0; each < slots.size(); ++each)
    end_out(*slots[each], pieces[each].extent, pieces[each].crc, pieces[each].failure, begin_seconds);
}

// Caller holds the lock.
void DirectStore::end_out(DirectSlot& slot, const Extent& extent, uint32_t crc, std::exception_ptr failure,
                          double begin_seconds) {
  if (failure != nullptr) {
    file_.release(extent);
    slot.failure = failure;
    ++stats_.failed;
    advance(slot, State::failed);
  } else {
    slot.extent = extent;
    slot.crc_out = crc;
    ++stats_.out_copies;
    stats_.out_bytes += slot.bytes;
    stats_.spilled_bytes += slot.middle_bytes;
    log_.add(CopyKind::out, slot.id, slot.bytes, begin_seconds);
    advance(slot, State::on_disk);
  }
  if (slot.released) free_slot(slot);
}

bool DirectStore::cancel(Slot& slot) {
  std::lock_guard lock(mutex_);
  if (slot.state != State::queued) return OFFLOAD_BROKEN("cancel refuses a copy that has begun");
  withdraw(*std::find_if(outgoing_.begin(), outgoing_.end(), [&](const Ref& each) { return each.get() == &slot; }));
  return true;
}

// Caller holds the lock. The copy-out will not happen.
void DirectStore::withdraw(const Ref& slot) {
  const Ref withdrawn = slot;  // the queue's own reference goes
  outgoing_.erase(std::find(outgoing_.begin(), outgoing_.end(), withdrawn));
  advance(*withdrawn, State::cancelled);
  ++stats_.cancelled;
  lanes_->event_fire(withdrawn->out_event.get());
}

void DirectStore::begin_in(const SlotRef& base, Stream) {
  auto slot = std::static_pointer_cast<DirectSlot>(base);
  const size_t alignment = file_.alignment_bytes();
  if ((reinterpret_cast<uintptr_t>(slot->target) - reinterpret_cast<uintptr_t>(slot->source)) % alignment != 0)
    throw std::invalid_argument("the target's address must be congruent to the source's modulo alignment_bytes");
  if (slot->middle_bytes == 0) {
    std::lock_guard lock(mutex_);
    advance(*slot, State::copying_in);
    const double begin = now_seconds();
    restore_ragged(*slot);
    log_.add(CopyKind::in, slot->id, slot->bytes, begin);
    slot->target_owner = nullptr;
    advance(*slot, State::ready);
    return;
  }
  // Not before its own copy-out; on this tier the caller still has the source then and seldom asks.
  if (!out_done(*slot)) device_->event_synchronize(slot->out_event.get());
  size_t slices;
  {
    std::lock_guard lock(mutex_);
    if (slot->state == State::failed || slot->state == State::cancelled)
      throw std::logic_error("nothing was swapped out: the copy-out did not succeed");
    advance(*slot, State::copying_in);
    slot->in_event = events_->take();
    lanes_->event_arm(slot->in_event.get());
    slot->middle_done = 0;
    slot->crc_in = 0;
    slot->urgent = false;
    incoming_.push_back(slot);
    slices = (slot->middle_bytes + slice_bytes_ - 1) / slice_bytes_;
  }
  // Each call reads one slice of whatever is most urgent when its turn comes, so an urgent block overtakes.
  auto store = std::static_pointer_cast<DirectStore>(shared_from_this());
  for (; slices > 0; --slices) lanes_->call(in_lane_, [store] { store->read(); });
}

// Reads a slice of the most urgent block; where that is small, it and the small ones behind it that are as urgent.
void DirectStore::read() {
  Refs run;
  {
    std::lock_guard lock(mutex_);
    run = next_incoming();
    if (run.empty()) return;
    for (const Ref& slot : run) slot->busy = true;
    ++stats_.in_transfers;
  }
  if (is_small(*run.front())) {
    read_small(run);
  } else {
    read_slice(*run.front());
  }
}

DirectStore::Refs DirectStore::next_incoming() {
  if (incoming_.empty()) return {};
  auto first = std::find_if(incoming_.begin(), incoming_.end(), [](const Ref& each) { return each->urgent; });
  if (first == incoming_.end()) first = incoming_.begin();
  Refs run{*first};
  size_t run_bytes = run.front()->middle_bytes;
  for (auto each = first + 1; is_small(*run.front()) && each != incoming_.end(); ++each) {
    run_bytes += (*each)->middle_bytes;
    if (!is_small(**each) || (*each)->urgent != run.front()->urgent || run_bytes > slice_bytes_) break;
    run.push_back(*each);
  }
  return run;
}

void DirectStore::read_slice(DirectSlot& slot) {
  const double begin_seconds = now_seconds();
  const size_t at = slot.middle_done;
  const size_t bytes = std::min(slice_bytes_, slot.middle_bytes - at);
  if (at == 0) slot.in_began_seconds = begin_seconds;
  std::exception_ptr failure;
  try {
    slot.crc_in = file_.read(slot.extent, at, target_middle(slot) + at, bytes, slot.crc_in);
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
  for (const Ref& slot : slots) {
    slot->in_began_seconds = begin_seconds;
    pieces.push_back({slot->extent, target_middle(*slot), slot->middle_bytes, 0, nullptr});
  }
  file_.read_together(pieces);
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
  if (failure != nullptr) {
    slot.failure = failure;
    end_in(slot, State::on_disk);
  } else if (slot.released) {
    end_in(slot, State::ready);
  } else if (slot.middle_done == slot.middle_bytes) {
    restore_ragged(slot);
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
  if (slot.released) free_slot(slot);
}

void DirectStore::finish_in(const SlotRef& slot, Stream) {
  settle(slot);
  std::lock_guard lock(mutex_);
  require_brought_back(*slot);
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

void DirectStore::release(const SlotRef& base) {
  auto slot = std::static_pointer_cast<DirectSlot>(base);
  std::lock_guard lock(mutex_);
  slot->released = true;
  switch (slot->state) {
    case State::queued:
      withdraw(slot);
      free_slot(*slot);
      break;
    case State::copying_out:
      break;  // end_out frees it
    case State::copying_in:
      if (!slot->busy) end_in(*slot, State::ready);
      break;
    default:
      free_slot(*slot);
  }
}

void DirectStore::free_slot(DirectSlot& slot) {
  file_.release(slot.extent);
  slot.extent = {};
  slot.target_owner = nullptr;
  --stats_.live_tickets;
}

void DirectStore::quiesce() {
  if (lanes_->in_forked_child()) return;
  {
    std::lock_guard lock(mutex_);
    while (!outgoing_.empty()) withdraw(outgoing_.front());
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

}  // namespace

std::shared_ptr<SwapStore> SwapStore::create_direct(std::shared_ptr<HostDriver> lanes, const StoreOptions& options) {
  if (options.slice_bytes == 0 || options.slice_bytes % 4096 != 0)
    throw std::invalid_argument("slice_bytes must be a positive multiple of 4096");
  return std::make_shared<DirectStore>(std::move(lanes), options);
}

}  // namespace offload
