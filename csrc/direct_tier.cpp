// The direct tier: blocks of plain RAM ↔ the spill file, with no buffer in between.
#include <algorithm>
#include <deque>
#include <stdexcept>
#include <vector>

#include "error.h"
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
  void release(const SlotRef& slot) override;
  void quiesce() override;
  StoreStats stats() override;
  size_t alignment_bytes() const override { return file_.alignment_bytes(); }
  SpillFile* spill_file() override { return &file_; }

 private:
  using Ref = std::shared_ptr<DirectSlot>;

  void write_out(const Ref& slot);
  void copy_out(DirectSlot& slot);
  void read_slice();
  void end_in(DirectSlot& slot, State state);
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
  lanes_->call(out_lane_,
               [store = std::static_pointer_cast<DirectStore>(shared_from_this()), slot] { store->write_out(slot); });
  return slot;
}

void DirectStore::write_out(const Ref& slot) {
  bool cancelled;
  {
    std::lock_guard lock(mutex_);
    outgoing_.erase(std::find(outgoing_.begin(), outgoing_.end(), slot));
    cancelled = slot->state != State::queued;
    if (!cancelled) advance(*slot, State::copying_out);
  }
  if (!cancelled) copy_out(*slot);
  lanes_->event_fire(slot->out_event.get());
}

void DirectStore::copy_out(DirectSlot& slot) {
  const double begin = now_seconds();
  Extent extent;
  std::exception_ptr failure;
  try {
    save_ragged(slot);
    extent = file_.allocate(slot.middle_bytes);
    const char* middle = static_cast<const char*>(slot.source) + slot.head_bytes;
    slot.crc_out = file_.write(extent, 0, middle, slot.middle_bytes, 0);
  } catch (...) {
    failure = std::current_exception();
    file_.release(extent);
  }
  std::lock_guard lock(mutex_);
  stats_.out_seconds += now_seconds() - begin;
  if (failure != nullptr) {
    slot.failure = failure;
    ++stats_.failed;
    advance(slot, State::failed);
  } else {
    slot.extent = extent;
    ++stats_.out_copies;
    stats_.out_bytes += slot.bytes;
    stats_.spilled_bytes += slot.middle_bytes;
    log_.add(CopyKind::out, slot.id, slot.bytes, begin);
    advance(slot, State::on_disk);
  }
  if (slot.released) free_slot(slot);
}

bool DirectStore::cancel(Slot& slot) {
  std::lock_guard lock(mutex_);
  if (slot.state != State::queued) return false;
  advance(slot, State::cancelled);
  ++stats_.cancelled;
  return true;
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
  for (; slices > 0; --slices) lanes_->call(in_lane_, [store] { store->read_slice(); });
}

void DirectStore::read_slice() {
  Ref slot;
  {
    std::lock_guard lock(mutex_);
    if (incoming_.empty()) return;
    auto next = std::find_if(incoming_.begin(), incoming_.end(), [](const Ref& each) { return each->urgent; });
    slot = next == incoming_.end() ? incoming_.front() : *next;
    slot->busy = true;
  }
  const double begin = now_seconds();
  const size_t at = slot->middle_done;
  const size_t bytes = std::min(slice_bytes_, slot->middle_bytes - at);
  if (at == 0) slot->in_began_seconds = begin;
  std::exception_ptr failure;
  try {
    char* middle = static_cast<char*>(slot->target) + slot->head_bytes;
    slot->crc_in = file_.read(slot->extent, at, middle + at, bytes, slot->crc_in);
    if (at + bytes == slot->middle_bytes) file_.verify(slot->extent, slot->crc_out, slot->crc_in);
  } catch (...) {
    failure = std::current_exception();
  }
  std::lock_guard lock(mutex_);
  stats_.in_seconds += now_seconds() - begin;
  slot->busy = false;
  slot->middle_done += bytes;
  if (failure != nullptr) {
    slot->failure = failure;
    end_in(*slot, State::on_disk);
  } else if (slot->released) {
    end_in(*slot, State::ready);
  } else if (slot->middle_done == slot->middle_bytes) {
    restore_ragged(*slot);
    ++stats_.in_copies;
    stats_.in_bytes += slot->bytes;
    log_.add(CopyKind::in, slot->id, slot->bytes, slot->in_began_seconds);
    end_in(*slot, State::ready);
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
  EventRef in_event;
  {
    std::lock_guard lock(mutex_);
    static_cast<DirectSlot&>(*slot).urgent = true;
    in_event = slot->in_event;
  }
  if (in_event != nullptr) device_->event_synchronize(in_event.get());
  std::lock_guard lock(mutex_);
  require_brought_back(*slot);
}

void DirectStore::release(const SlotRef& base) {
  auto slot = std::static_pointer_cast<DirectSlot>(base);
  std::lock_guard lock(mutex_);
  slot->released = true;
  switch (slot->state) {
    case State::queued:
      advance(*slot, State::cancelled);
      ++stats_.cancelled;
      free_slot(*slot);
      break;
    case State::copying_out:
      break;  // write_out frees it
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
    for (const Ref& slot : outgoing_) {
      if (slot->state != State::queued) continue;
      advance(*slot, State::cancelled);
      ++stats_.cancelled;
    }
  }
  lanes_->stream_synchronize(out_lane_);
  lanes_->stream_synchronize(in_lane_);
}

StoreStats DirectStore::stats() {
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
