#include "slab_tier.h"

#include <algorithm>
#include <new>
#include <optional>
#include <stdexcept>
#include <utility>

#include "error.h"
#include "mutants.h"

namespace offload {

SlabStore::SlabStore(std::shared_ptr<Driver> device, std::shared_ptr<HostDriver> lanes, const StoreOptions& options)
    : SwapStore(device, lanes),
      slice_bytes_(options.slice_bytes),
      file_(options.spill_directory.empty() ? nullptr : std::make_unique<SpillFile>(options.spill_directory)),
      pool_(device, options.host_bytes_max, options.slab_bytes),
      bounce_bytes_(std::clamp(options.host_bytes_max / 8 / kPageBytes * kPageBytes, kPageBytes, slice_bytes_)),
      bounce_(take_bounce()),
      out_stream_(*device),
      in_stream_(*device),
      feed_lane_(*lanes),
      pump_lane_(*lanes),
      spill_lane_(*lanes),
      fill_lane_(*lanes) {}

std::array<SlabStore::Bounce, SlabStore::kInFlight> SlabStore::take_bounce() {
  std::array<Bounce, kInFlight> taken;
  if (!file_) return taken;
  for (Bounce& bounce : taken) {
    const auto block = pool_.try_allocate(bounce_bytes_);
    if (!block) throw PoolExhausted(bounce_bytes_, pool_.free_bytes(), pool_.max_bytes());
    bounce.block = *block;
  }
  return taken;
}

SlabStore::~SlabStore() {
  // No ticket is left, but its last copies may be: the slabs go only after them. A driver that cannot say so has lost
  // its context, and its copies with it.
  try {
    for (const OwnedStream* stream : {&out_stream_, &in_stream_}) device_->stream_synchronize(*stream);
  } catch (const DriverError&) {
  }
}

SlotRef SlabStore::begin_out(const void* source, size_t bytes, Stream compute, uint64_t need) {
  device_->require_not_capturing(compute);
  auto slot = std::make_shared<SlabSlot>();
  slot->id = ++last_id_;
  slot->bytes = bytes;
  slot->need = need;
  slot->source = source;
  slot->compute = compute;
  std::unique_lock lock(mutex_);
  slot->block = obtain_block(lock, bytes);
  if (outgoing_bytes_ + bytes > slice_bytes_) issue_outgoing();
  try {
    slot->produced = events_->record(compute);  // under the lock: the queue's order is the stream's
    if (is_small(*slot) && !feed_queued_) {
      lanes_->call(feed_lane_, [store = self()] { store->feed(); });
      feed_queued_ = true;
    }
    outgoing_.push_back(slot);
  } catch (...) {
    pool_.release(slot->block, nullptr);
    throw;
  }
  ++stats_.live_tickets;
  outgoing_bytes_ += bytes;
  if (is_small(*slot)) return slot;
  issue_outgoing();
  if (slot->state == State::failed) {
    --stats_.live_tickets;
    std::rethrow_exception(slot->failure);
  }
  return slot;
}

// Waits for fenced blocks, then for spills, coldest first; gives up where nothing is left to wait for.
Block SlabStore::obtain_block(std::unique_lock<std::mutex>& lock, size_t bytes) {
  std::exception_ptr failure;  // of a spill that should have made room
  for (;;) {
    std::optional<PinningFailed> refused;
    try {
      if (auto block = pool_.try_allocate(bytes)) return *block;
    } catch (const PinningFailed& error) {
      refused.emplace(error);  // what is pinned already may come free
    }
    if (failure) std::rethrow_exception(failure);
    issue_outgoing();  // what waits in there can be neither awaited nor spilled
    const bool possible = bytes <= (refused ? pool_.largest_slab_bytes() : pool_.max_bytes());
    if (const EventRef fence = pool_.oldest_fence(); possible && fence != nullptr) {
      lock.unlock();
      device_->event_synchronize(fence.get());
      lock.lock();
    } else if (const EventRef spilled = possible && file_ ? spill_coldest(bytes) : nullptr; spilled != nullptr) {
      OFFLOAD_EDGE("room is awaited without the lock", lock.unlock());
      lanes_->event_synchronize(spilled.get());
      if (!lock.owns_lock()) lock.lock();
      failure = std::exchange(spill_failure_, nullptr);
    } else if (refused) {
      throw PinningFailed(*refused);
    } else {
      throw PoolExhausted(bytes, pool_.free_bytes(), pool_.max_bytes());
    }
  }
}

void SlabStore::feed() {
  std::unique_lock lock(mutex_);
  feed_queued_ = false;
  await_oldest(fed_in_flight_, lock);
  if (outgoing_.empty()) return;
  issue_outgoing();
  note_in_flight(fed_in_flight_, out_stream_);
}

// Caller holds the lock, here and in everything that issues.
void SlabStore::issue_outgoing() {
  while (!outgoing_.empty()) {
    const Ref first = outgoing_.front();
    const Refs run = next_outgoing();
    const size_t count = std::max<size_t>(run.size(), 1);
    for (size_t left = count; left > 0; --left) {
      outgoing_bytes_ -= outgoing_.front()->bytes;
      outgoing_.pop_front();
    }
    issue_out(run.empty() ? &first : run.data(), count);
  }
}

// The longest run of small blocks at the front, within a slice and what memory there is to name them in. Empty where
// the first is large.
SlabStore::Refs SlabStore::next_outgoing() {
  Refs run;
  size_t run_bytes = 0;
  for (const Ref& slot : outgoing_) {
    run_bytes += slot->bytes;
    if (!is_small(*slot) || run_bytes > slice_bytes_) break;
    try {
      run.push_back(slot);
    } catch (const std::bad_alloc&) {
      break;
    }
  }
  return run;
}

// One transfer. Where that fails each of its blocks is tried alone, so that each one's failure is its own.
void SlabStore::issue_out(const Ref* slots, size_t count) {
  try {
    copy_out(slots, count);
  } catch (...) {
    const std::exception_ptr failure = std::current_exception();
    const bool settled = settle(out_stream_);  // some of it may be on its way
    if (count > 1) {
      for (size_t each = 0; each < count; ++each) issue_out(slots + each, 1);
    } else {
      SlabSlot& slot = **slots;
      slot.failure = failure;
      if (!settled) slot.block = {};  // nobody can say what still writes there: it is leaked
      fail_out(slot);
    }
    return;
  }
  for (const Ref* slot = slots; slot != slots + count; ++slot) {
    advance(**slot, State::copying_out);
    log_.add(CopyKind::out, (*slot)->id, (*slot)->bytes, (*slot)->out->begin, (*slot)->out->end);
    make_spillable(*slot);
  }
}

void SlabStore::copy_out(const Ref* slots, size_t count) {
  for (size_t each = 0; each < count; ++each) {  // the last record of a stream covers the earlier ones
    const bool covered = each + 1 < count && slots[each + 1]->compute == slots[each]->compute;
    if (!covered)
      OFFLOAD_EDGE("copy-out waits for compute", device_->stream_wait(out_stream_, slots[each]->produced.get()));
  }
  auto transfer = std::make_shared<Transfer>();
  transfer->begin = events_->record(out_stream_);
  std::vector<Copy> copies;
  for (size_t each = 0; each < count; ++each) {
    const SlabSlot& slot = *slots[each];
    for (size_t at = 0; at < slot.bytes; at += slice_bytes_)
      copies.push_back(
          {slot.block.data + at, static_cast<const char*>(slot.source) + at, std::min(slice_bytes_, slot.bytes - at)});
  }
  if (count > 1) {
    device_->copy_out_batch(copies.data(), copies.size(), out_stream_);
  } else {
    for (const Copy& copy : copies) device_->copy_out(copy.to, copy.from, copy.bytes, out_stream_);
  }
  transfer->end = events_->record(out_stream_);
  stats_.out_transfers += count > 1 ? 1 : copies.size();
  for (size_t each = 0; each < count; ++each) {
    slots[each]->produced = nullptr;
    slots[each]->out = transfer;
    slots[each]->out_event = transfer->end;
  }
}

void SlabStore::fail_out(SlabSlot& slot) {
  if (slot.block) pool_.release(slot.block, nullptr);
  slot.block = {};
  slot.produced = nullptr;
  ++stats_.failed;
  advance(slot, State::failed);
}

bool SlabStore::out_done(Slot& base) {
  std::lock_guard lock(mutex_);
  auto& slot = static_cast<SlabSlot&>(base);
  if (slot.state == State::queued) return false;
  // On its way back, maybe, before it has left.
  if (slot.out_event != nullptr && !device_->event_done(slot.out_event.get())) return false;
  if (slot.state == State::copying_out) {
    count_out(slot);
    advance(slot, State::out);
  }
  return true;
}

void SlabStore::issue_out(Slot& slot) {
  std::lock_guard lock(mutex_);
  if (slot.state == State::queued) issue_outgoing();
}

bool SlabStore::cancel(Slot& slot) {
  std::lock_guard lock(mutex_);
  if (slot.state != State::queued) return OFFLOAD_BROKEN("cancel refuses a copy that has begun");
  withdraw(static_cast<SlabSlot&>(slot));
  return true;
}

void SlabStore::withdraw(SlabSlot& slot) {
  remove(outgoing_, slot);
  outgoing_bytes_ -= slot.bytes;
  pool_.release(slot.block, nullptr);
  slot.block = {};
  slot.produced = nullptr;
  ++stats_.cancelled;
  advance(slot, State::cancelled);
}

// The event after which no copy touches the slot's block any more.
EventRef SlabStore::last_copy(const SlabSlot& slot) {
  if (slot.issued_bytes > 0 && slot.issued_bytes < slot.bytes) return events_->record(in_stream_);
  return slot.in_event != nullptr ? slot.in_event : slot.out_event;  // an earlier copy-in may still read the block
}

void SlabStore::release(const SlotRef& base) {
  auto slot = std::static_pointer_cast<SlabSlot>(base);
  std::lock_guard lock(mutex_);
  slot->released = true;
  if (slot->state == State::queued) withdraw(*slot);
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
  try {
    count_out(slot);
    count_in(slot);
  } catch (const DriverError&) {
    // A figure less; the slot must go all the same.
  }
  if (slot.block) {
    try {
      pool_.release(slot.block, last_copy(slot));
    } catch (...) {
      if (settle(in_stream_)) pool_.release(slot.block, nullptr);  // else nobody can say what still reads it: leaked
    }
    slot.block = {};
  }
  if (file_ && !OFFLOAD_BROKEN("a freed slot gives its extent back"))
    OFFLOAD_EDGE("extent outlives its fill", file_->release(slot.extent));
  slot.extent = {};
  slot.target_owner = nullptr;
  --stats_.live_tickets;
}

void SlabStore::count_out(SlabSlot& slot) {
  if (slot.out == nullptr || slot.out_counted || !device_->event_done(slot.out_event.get())) return;
  stats_.out_seconds += seconds_once(*slot.out);
  ++stats_.out_copies;
  stats_.out_bytes += slot.bytes;
  slot.out_counted = true;
}

void SlabStore::count_in(SlabSlot& slot) {
  if (slot.in == nullptr || slot.in->timed || slot.issued_bytes < slot.bytes) return;
  if (device_->event_done(slot.in_event.get())) stats_.in_seconds += seconds_once(*slot.in);
}

// How long a transfer took, told to the first of its blocks that asks; 0 where the device does not tell.
double SlabStore::seconds_once(Transfer& transfer) {
  if (transfer.timed) return 0;
  transfer.timed = true;
  try {
    return 1e-3 * device_->event_elapsed_ms(transfer.begin.get(), transfer.end.get());
  } catch (const DriverError&) {
    return 0;
  }
}

bool SlabStore::settle(Stream stream) {
  try {
    device_->stream_synchronize(stream);
  } catch (const DriverError&) {
    return false;
  }
  return true;
}

// await_oldest waits for what has been issued on `stream` by now. Where that cannot be noted what follows goes early,
// and tells what is wrong itself.
void SlabStore::note_in_flight(std::deque<EventRef>& in_flight, Stream stream) {
  try {
    in_flight.push_back(events_->record(stream));
  } catch (const DriverError&) {
  } catch (const std::bad_alloc&) {
  }
}

// Returns once less than kInFlight are on their way.
void SlabStore::await_oldest(std::deque<EventRef>& in_flight, std::unique_lock<std::mutex>& lock) {
  while (in_flight.size() >= kInFlight) {
    const EventRef oldest = in_flight.front();
    in_flight.pop_front();
    lock.unlock();
    try {
      device_->event_synchronize(oldest.get());
    } catch (const DriverError&) {
      // Nobody else would issue what comes next: it goes early, and tells what is wrong with the device itself.
    }
    lock.lock();
  }
}

SlabStore::Ref SlabStore::most_urgent(const std::deque<Ref>& queue) {
  if (queue.empty()) return nullptr;
  auto urgent = std::find_if(queue.begin(), queue.end(), [](const Ref& each) { return each->urgent; });
  return urgent == queue.end() ? queue.front() : *urgent;
}

void SlabStore::remove(std::deque<Ref>& queue, const SlabSlot& slot) {
  queue.erase(std::remove_if(queue.begin(), queue.end(), [&](const Ref& each) { return each.get() == &slot; }),
              queue.end());
}

void SlabStore::quiesce() {
  if (lanes_->in_forked_child() && !OFFLOAD_BROKEN("a forked child waits for no lane")) return;
  {
    std::lock_guard lock(mutex_);
    while (!outgoing_.empty()) {
      const Ref slot = outgoing_.front();
      withdraw(*slot);
    }
  }
  for (const OwnedStream* lane : {&feed_lane_, &pump_lane_, &spill_lane_, &fill_lane_})
    lanes_->stream_synchronize(*lane);
  for (const OwnedStream* stream : {&out_stream_, &in_stream_}) device_->stream_synchronize(*stream);
}

size_t SlabStore::trim() {
  require_same_process();
  std::lock_guard lock(mutex_);
  return pool_.trim() + (file_ ? file_->trim() : 0);
}

StoreStats SlabStore::stats() {
  require_same_process();
  std::lock_guard lock(mutex_);
  StoreStats result = stats_;
  result.pool = pool_.stats();
  if (file_) result.spill = file_->stats();
  return result;
}

std::shared_ptr<SwapStore> SwapStore::create_slab(std::shared_ptr<Driver> device, std::shared_ptr<HostDriver> lanes,
                                                  const StoreOptions& options) {
  if (options.slice_bytes == 0 || options.slice_bytes % kPageBytes != 0)
    throw std::invalid_argument("slice_bytes must be a positive multiple of 4096");
  return std::make_shared<SlabStore>(std::move(device), std::move(lanes), options);
}

}  // namespace offload
