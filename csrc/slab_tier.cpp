// The slab tier: device ↔ pinned slab over the device's own copy streams, slab ↔ spill file over host lanes.
#include <algorithm>
#include <array>
#include <deque>
#include <limits>
#include <set>
#include <stdexcept>

#include "error.h"
#include "swap_store.h"

namespace offload {
namespace {

constexpr size_t kSlicesInFlight = 2;  // enough to keep a copy engine busy, few enough for an urgent block to overtake

struct SlabSlot final : Slot {
  Block block;  // while in RAM
  EventRef out_begin;
  EventRef in_begin;
  EventRef target_free;  // the compute stream's present point when the target was handed over
  EventRef filled;       // lane event: every slice of a copy-in from disk has been issued
  Extent extent;
  uint32_t crc_out = 0;
  uint32_t crc_in = 0;
  size_t issued_bytes = 0;  // of the copy-in under way
  bool spill_queued = false;
  bool spill_failed = false;
  bool busy = false;  // a lane reads or writes for it
  bool urgent = false;
  bool consumed = true;  // no copy-in pending: swap_in has been called since the last prefetch
  bool timed = false;
  double fill_began_seconds = 0;
};
using Ref = std::shared_ptr<SlabSlot>;

struct ColdestFirst {  // needed last first; age breaks ties so that the order is total
  bool operator()(const Ref& a, const Ref& b) const {
    return a->need != b->need ? a->need > b->need : a.get() < b.get();
  }
};

class SlabStore final : public SwapStore {
 public:
  SlabStore(std::shared_ptr<Driver> device, std::shared_ptr<HostDriver> lanes, const StoreOptions& options);
  ~SlabStore() override;

  SlotRef begin_out(const void* source, size_t bytes, Stream compute, uint64_t need) override;
  bool out_done(Slot& slot) override;
  bool cancel(Slot&) override { return false; }
  void begin_in(const SlotRef& slot, Stream compute) override;
  void finish_in(const SlotRef& slot, Stream compute) override;
  void release(const SlotRef& slot) override;
  void quiesce() override;
  size_t trim() override;
  StoreStats stats() override;
  size_t alignment_bytes() const override { return 1; }
  SpillFile* spill_file() override { return file_.get(); }

 private:
  struct Bounce {  // a slice on its way from disk to the device
    Block block;
    EventRef fence;
  };

  Block obtain_block(std::unique_lock<std::mutex>& lock, size_t bytes);
  EventRef spill_coldest(size_t bytes);
  void spill(const Ref& slot);
  void make_spillable(const Ref& slot);
  bool write_extent(SlabSlot& slot, std::unique_lock<std::mutex>& lock);
  EventRef last_copy(const SlabSlot& slot);
  void issue_slice(SlabSlot& slot, const char* from, size_t bytes);
  void issue_from_slab(const Ref& slot, size_t bytes);
  void pump();
  void fill();
  void await_bounces();
  void fill_slice(const Ref& slot, std::unique_lock<std::mutex>& lock);
  void count_out(SlabSlot& slot);
  void count_in(SlabSlot& slot);
  void free_slot(SlabSlot& slot);
  std::shared_ptr<SlabStore> self() { return std::static_pointer_cast<SlabStore>(shared_from_this()); }
  static Ref most_urgent(const std::deque<Ref>& queue);
  static void remove(std::deque<Ref>& queue, const SlabSlot& slot);

  const size_t slice_bytes_;
  std::unique_ptr<SpillFile> file_;  // before the pool: blocks may still be read by lanes that hold the store
  SlabPool pool_;
  const Stream out_stream_;
  const Stream in_stream_;
  const Stream pump_lane_;                // feeds the copy-in stream slice by slice
  const Stream spill_lane_;               // slab → file
  const Stream fill_lane_;                // file → bounce → copy-in stream
  std::set<Ref, ColdestFirst> resident_;  // in a slab, with no copy-in or spill pending
  std::deque<Ref> from_slab_;
  std::deque<Ref> from_disk_;
  std::deque<EventRef> slices_in_flight_;
  std::array<Bounce, kSlicesInFlight> bounce_;  // taken up front: bringing back from disk must never wait for room
  size_t bounce_bytes_ = 0;
  size_t next_bounce_ = 0;
};

SlabStore::SlabStore(std::shared_ptr<Driver> device, std::shared_ptr<HostDriver> lanes, const StoreOptions& options)
    : SwapStore(device, lanes),
      slice_bytes_(options.slice_bytes),
      file_(options.spill_directory.empty() ? nullptr : std::make_unique<SpillFile>(options.spill_directory)),
      pool_(device, options.host_bytes_max, options.slab_bytes),
      out_stream_(device->stream_create()),
      in_stream_(device->stream_create()),
      pump_lane_(lanes->stream_create()),
      spill_lane_(lanes->stream_create()),
      fill_lane_(lanes->stream_create()) {
  if (!file_) return;
  bounce_bytes_ = std::clamp(options.host_bytes_max / 8 / kPageBytes * kPageBytes, kPageBytes, slice_bytes_);
  for (Bounce& bounce : bounce_) {
    auto block = pool_.try_allocate(bounce_bytes_);
    if (!block) throw PoolExhausted(bounce_bytes_, pool_.free_bytes(), pool_.max_bytes());
    bounce.block = *block;
  }
}

SlabStore::~SlabStore() {
  // No ticket is left, but its last copies may be: the slabs go only after them. A driver that cannot say so has lost
  // its context, and its copies with it.
  try {
    for (const Stream stream : {out_stream_, in_stream_}) device_->stream_synchronize(stream);
  } catch (const DriverError&) {
  }
  for (const Stream lane : {pump_lane_, spill_lane_, fill_lane_}) lanes_->stream_destroy(lane);
  for (const Stream stream : {out_stream_, in_stream_}) device_->stream_destroy(stream);
}

SlotRef SlabStore::begin_out(const void* source, size_t bytes, Stream compute, uint64_t need) {
  device_->require_not_capturing(compute);
  auto slot = std::make_shared<SlabSlot>();
  slot->id = ++last_id_;
  slot->bytes = bytes;
  slot->need = need;
  slot->source = source;
  const EventRef produced = events_->record(compute);
  std::unique_lock lock(mutex_);
  slot->block = obtain_block(lock, bytes);
  try {
    device_->stream_wait(out_stream_, produced.get());
    slot->out_begin = events_->record(out_stream_);
    for (size_t at = 0; at < bytes; at += slice_bytes_)
      device_->copy_out(slot->block.data + at, static_cast<const char*>(source) + at,
                        std::min(slice_bytes_, bytes - at), out_stream_);
    slot->out_event = events_->record(out_stream_);
  } catch (...) {
    lock.unlock();
    device_->stream_synchronize(out_stream_);  // some slices may be on their way; if this throws, the block is leaked
    lock.lock();
    pool_.release(slot->block, nullptr);
    throw;
  }
  log_.add(CopyKind::out, slot->id, bytes, slot->out_begin, slot->out_event);
  advance(*slot, State::copying_out);
  make_spillable(slot);
  ++stats_.live_tickets;
  return slot;
}

// Waits for fenced blocks, then for spills, coldest first; gives up where nothing is left to wait for.
Block SlabStore::obtain_block(std::unique_lock<std::mutex>& lock, size_t bytes) {
  for (;;) {
    if (auto block = pool_.try_allocate(bytes)) return *block;
    const bool possible = bytes <= pool_.max_bytes();
    if (const EventRef fence = pool_.oldest_fence(); possible && fence != nullptr) {
      lock.unlock();
      device_->event_synchronize(fence.get());
      lock.lock();
    } else if (const EventRef spilled = possible && file_ ? spill_coldest(bytes) : nullptr; spilled != nullptr) {
      lock.unlock();
      lanes_->event_synchronize(spilled.get());
      lock.lock();
    } else {
      throw PoolExhausted(bytes, pool_.free_bytes(), pool_.max_bytes());
    }
  }
}

// Queues the coldest residents for the disk until `bytes` are on their way. Null where none can go.
EventRef SlabStore::spill_coldest(size_t bytes) {
  size_t leaving_bytes = 0;
  for (auto entry = resident_.begin(); entry != resident_.end() && leaving_bytes < bytes;) {
    const Ref slot = *entry;
    entry = resident_.erase(entry);
    if (slot->spill_failed) continue;
    slot->spill_queued = true;
    leaving_bytes += slot->bytes;
    if (lanes_ == device_) {
      lanes_->stream_wait(spill_lane_, slot->out_event.get());
    } else {
      lanes_->call(spill_lane_, [device = device_, done = slot->out_event] { device->event_synchronize(done.get()); });
    }
    lanes_->call(spill_lane_, [store = self(), slot] { store->spill(slot); });
  }
  return leaving_bytes > 0 ? lane_events_->record(spill_lane_) : nullptr;
}

void SlabStore::spill(const Ref& slot) {
  std::unique_lock lock(mutex_);
  slot->spill_queued = false;
  if (slot->released) return free_slot(*slot);
  if (slot->state == State::copying_out) {
    count_out(*slot);
    advance(*slot, State::out);
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
  if (slot->block && slot->consumed && !slot->busy && !slot->spill_queued) resident_.insert(slot);
}

// Writes the block out with the lock released meanwhile. False where that failed: the block stays in RAM for good.
bool SlabStore::write_extent(SlabSlot& slot, std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  const double begin = now_seconds();
  Extent extent;
  uint32_t crc = 0;
  bool written = true;
  try {
    // Whole sectors: a block is rounded up to 4 KiB, so the bytes behind the last one exist.
    extent = file_->allocate((slot.bytes + kPageBytes - 1) / kPageBytes * kPageBytes);
    crc = file_->write(extent, 0, slot.block.data, extent.bytes, 0);
  } catch (const SpillError&) {
    file_->release(extent);
    extent = {};
    written = false;
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

// The event after which no copy touches the slot's block any more.
EventRef SlabStore::last_copy(const SlabSlot& slot) {
  if (slot.issued_bytes == 0) return slot.out_event;
  return slot.issued_bytes == slot.bytes ? slot.in_event : events_->record(in_stream_);
}

bool SlabStore::out_done(Slot& base) {
  std::lock_guard lock(mutex_);
  auto& slot = static_cast<SlabSlot&>(base);
  if (!device_->event_done(slot.out_event.get())) return false;
  if (slot.state == State::copying_out) {
    count_out(slot);
    advance(slot, State::out);
  }
  return true;
}

void SlabStore::begin_in(const SlotRef& base, Stream compute) {
  auto slot = std::static_pointer_cast<SlabSlot>(base);
  const EventRef target_free = events_->record(compute);
  std::lock_guard lock(mutex_);
  slot->target_free = target_free;
  slot->issued_bytes = 0;
  slot->urgent = false;
  slot->consumed = false;
  slot->in_event = events_->take();
  const bool in_slab = static_cast<bool>(slot->block);
  const size_t part_bytes = in_slab ? slice_bytes_ : bounce_bytes_;
  const size_t slices = std::max<size_t>((slot->bytes + part_bytes - 1) / part_bytes, 1);
  if (in_slab) {
    resident_.erase(slot);
    advance(*slot, State::copying_in);
    from_slab_.push_back(slot);
  } else {
    advance(*slot, State::filling);
    slot->crc_in = 0;
    slot->filled = lane_events_->take();
    lanes_->event_arm(slot->filled.get());
    from_disk_.push_back(slot);
  }
  for (size_t slice = 0; slice < slices; ++slice) {
    if (in_slab) {
      lanes_->call(pump_lane_, [store = self()] { store->pump(); });
    } else {
      lanes_->call(fill_lane_, [store = self()] { store->fill(); });
    }
  }
}

void SlabStore::issue_slice(SlabSlot& slot, const char* from, size_t bytes) {
  if (slot.issued_bytes == 0) {
    device_->stream_wait(in_stream_, slot.target_free.get());
    device_->stream_wait(in_stream_, slot.out_event.get());
    slot.in_begin = events_->record(in_stream_);
  }
  if (bytes > 0) device_->copy_in(static_cast<char*>(slot.target) + slot.issued_bytes, from, bytes, in_stream_);
  slot.issued_bytes += bytes;
  if (slot.issued_bytes == slot.bytes) {
    device_->event_record(slot.in_event.get(), in_stream_);
    slot.timed = false;
    log_.add(CopyKind::in, slot.id, slot.bytes, slot.in_begin, slot.in_event);
    ++stats_.in_copies;
    stats_.in_bytes += slot.bytes;
    advance(slot, State::ready);
  }
}

void SlabStore::issue_from_slab(const Ref& slot, size_t bytes) {
  try {
    issue_slice(*slot, slot->block.data + slot->issued_bytes, bytes);
  } catch (const DriverError&) {
    slot->failure = std::current_exception();
    advance(*slot, State::out);
  }
  if (slot->state == State::copying_in) return;
  remove(from_slab_, *slot);
}

// Issues one slice of the most urgent block, once no more than kSlicesInFlight are on their way.
void SlabStore::pump() {
  std::unique_lock lock(mutex_);
  while (slices_in_flight_.size() >= kSlicesInFlight) {
    const EventRef oldest = slices_in_flight_.front();
    slices_in_flight_.pop_front();
    lock.unlock();
    device_->event_synchronize(oldest.get());
    lock.lock();
  }
  const Ref slot = most_urgent(from_slab_);
  if (slot == nullptr) return;
  issue_from_slab(slot, std::min(slice_bytes_, slot->bytes - slot->issued_bytes));
  slices_in_flight_.push_back(events_->record(in_stream_));
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
    await_bounces();
    lock.lock();
    slot->failure = failure;
    advance(*slot, State::on_disk);
  }
  slot->busy = false;
  if (slot->state == State::filling && !slot->released) return;
  remove(from_disk_, *slot);
  lanes_->event_fire(slot->filled.get());
  if (slot->released) free_slot(*slot);
}

// Slices issued before a failure still write to the target: nobody may hear of the failure, and free it, before them.
void SlabStore::await_bounces() {
  try {
    for (const Bounce& bounce : bounce_)
      if (bounce.fence != nullptr) device_->event_synchronize(bounce.fence.get());
  } catch (const DriverError&) {
    // The context is lost, and its copies with it.
  }
}

void SlabStore::fill_slice(const Ref& slot, std::unique_lock<std::mutex>& lock) {
  Bounce& bounce = bounce_[next_bounce_];
  next_bounce_ = (next_bounce_ + 1) % bounce_.size();
  const size_t at = slot->issued_bytes;
  const size_t bytes = std::min(bounce_bytes_, slot->bytes - at);
  const EventRef fence = bounce.fence;
  lock.unlock();
  if (fence != nullptr) device_->event_synchronize(fence.get());
  if (at == 0) slot->fill_began_seconds = now_seconds();
  const size_t sectors_bytes = std::min<size_t>(bounce_bytes_, slot->extent.bytes - at);
  slot->crc_in = file_->read(slot->extent, at, bounce.block.data, sectors_bytes, slot->crc_in);
  if (at + bytes == slot->bytes) file_->verify(slot->extent, slot->crc_out, slot->crc_in);
  lock.lock();
  if (at + bytes == slot->bytes) log_.add(CopyKind::fill, slot->id, slot->bytes, slot->fill_began_seconds);
  if (slot->released) return;
  issue_slice(*slot, bounce.block.data, bytes);
  bounce.fence = events_->record(in_stream_);
}

void SlabStore::finish_in(const SlotRef& base, Stream compute) {
  auto slot = std::static_pointer_cast<SlabSlot>(base);
  std::unique_lock lock(mutex_);
  slot->urgent = true;
  if (slot->state == State::filling) {
    const EventRef filled = slot->filled;
    lock.unlock();
    lanes_->event_synchronize(filled.get());
    lock.lock();
  }
  if (slot->state == State::copying_in) issue_from_slab(slot, slot->bytes - slot->issued_bytes);
  slot->consumed = true;
  make_spillable(slot);
  require_brought_back(*slot);
  const EventRef in_event = slot->in_event;
  lock.unlock();
  if (in_event != nullptr) device_->stream_wait(compute, in_event.get());
}

void SlabStore::release(const SlotRef& base) {
  auto slot = std::static_pointer_cast<SlabSlot>(base);
  std::lock_guard lock(mutex_);
  slot->released = true;
  resident_.erase(slot);
  remove(from_slab_, *slot);
  if (slot->busy || slot->spill_queued) return;  // the lane frees it
  if (slot->state == State::filling) {
    remove(from_disk_, *slot);
    lanes_->event_fire(slot->filled.get());
  }
  free_slot(*slot);
}

// Caller holds the lock. The slot's last copy may still be under way on a device stream: its event fences the block.
void SlabStore::free_slot(SlabSlot& slot) {
  count_out(slot);
  count_in(slot);
  if (slot.block) {
    pool_.release(slot.block, last_copy(slot));
    slot.block = {};
  }
  if (file_) file_->release(slot.extent);
  slot.extent = {};
  slot.target_owner = nullptr;
  --stats_.live_tickets;
}

void SlabStore::count_out(SlabSlot& slot) {
  if (slot.out_begin == nullptr || !device_->event_done(slot.out_event.get())) return;
  stats_.out_seconds += 1e-3 * device_->event_elapsed_ms(slot.out_begin.get(), slot.out_event.get());
  ++stats_.out_copies;
  stats_.out_bytes += slot.bytes;
  slot.out_begin = nullptr;
}

void SlabStore::count_in(SlabSlot& slot) {
  if (slot.in_begin == nullptr || slot.timed || slot.issued_bytes < slot.bytes) return;
  if (!device_->event_done(slot.in_event.get())) return;
  stats_.in_seconds += 1e-3 * device_->event_elapsed_ms(slot.in_begin.get(), slot.in_event.get());
  slot.timed = true;
}

Ref SlabStore::most_urgent(const std::deque<Ref>& queue) {
  if (queue.empty()) return nullptr;
  auto urgent = std::find_if(queue.begin(), queue.end(), [](const Ref& each) { return each->urgent; });
  return urgent == queue.end() ? queue.front() : *urgent;
}

void SlabStore::remove(std::deque<Ref>& queue, const SlabSlot& slot) {
  queue.erase(std::remove_if(queue.begin(), queue.end(), [&](const Ref& each) { return each.get() == &slot; }),
              queue.end());
}

void SlabStore::quiesce() {
  if (lanes_->in_forked_child()) return;
  for (const Stream lane : {pump_lane_, spill_lane_, fill_lane_}) lanes_->stream_synchronize(lane);
  for (const Stream stream : {out_stream_, in_stream_}) device_->stream_synchronize(stream);
}

size_t SlabStore::trim() {
  std::lock_guard lock(mutex_);
  return pool_.trim();
}

StoreStats SlabStore::stats() {
  std::lock_guard lock(mutex_);
  StoreStats result = stats_;
  result.pool = pool_.stats();
  if (file_) result.spill = file_->stats();
  return result;
}

}  // namespace

std::shared_ptr<SwapStore> SwapStore::create_slab(std::shared_ptr<Driver> device, std::shared_ptr<HostDriver> lanes,
                                                  const StoreOptions& options) {
  if (options.slice_bytes == 0 || options.slice_bytes % kPageBytes != 0)
    throw std::invalid_argument("slice_bytes must be a positive multiple of 4096");
  return std::make_shared<SlabStore>(std::move(device), std::move(lanes), options);
}

}  // namespace offload
