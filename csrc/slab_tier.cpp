#include "slab_tier.h"

#include <new>
#include <optional>
#include <stdexcept>
#include <utility>

#include "error.h"
#include "mutants.h"

namespace offload {

SlabStore::SlabStore(std::shared_ptr<Driver> device, std::shared_ptr<HostDriver> lanes, const StoreOptions& options)
    : SwapStore(device, lanes),
      parts_(*this, mutex_, stats_, log_, device, lanes, events_, lane_events_, options),
      spiller_(parts_),
      copy_out_queue_(parts_, spiller_),
      copy_in_queue_(parts_) {}

SlabStore::~SlabStore() {
  // Copies of released tickets may still be under way; wait for them before the slabs are freed. If the driver fails
  // here, its context is lost and the copies have ended.
  for (const OwnedStream* stream : {&parts_.out_stream, &parts_.in_stream}) {
    try {
      device_->stream_synchronize(*stream);
    } catch (const std::exception&) {  // the driver's failure, or no memory for its message
    }
  }
}

SlotRef SlabStore::queue_copy_out(const void* source, size_t bytes, Stream compute, uint64_t need) {
  device_->require_not_capturing(compute);
  auto slot = std::make_shared<SlabSlot>();
  slot->id = ++last_id_;
  slot->bytes = bytes;
  slot->need = need;
  slot->source = source;
  slot->compute = compute;
  std::unique_lock lock(mutex_);
  slot->block = obtain_block(lock, bytes);
  try {
    copy_out_queue_.push(slot);
  } catch (...) {
    parts_.pool.release(slot->block, nullptr);
    throw;
  }
  if (slot->state == State::failed) std::rethrow_exception(slot->failure);
  ++stats_.live_tickets;
  return slot;
}

// Allocates a block. While there is no room, waits for the last copies of freed blocks or, if there are none, spills
// the blocks that are needed last and waits for that. Throws if neither is possible.
Block SlabStore::obtain_block(std::unique_lock<std::mutex>& lock, size_t bytes) {
  std::exception_ptr failure;  // the error of a spill
  for (;;) {
    std::optional<PinningFailed> refused;
    try {
      if (auto block = parts_.pool.try_allocate(bytes)) return *block;
    } catch (const PinningFailed& error) {
      refused.emplace(error);  // thrown below unless a block that is already pinned becomes free
    }
    if (failure) std::rethrow_exception(failure);
    copy_out_queue_.issue();  // only issued copy-outs have an event to wait for and can be spilled
    const bool possible = bytes <= (refused ? parts_.pool.largest_slab_bytes() : parts_.pool.max_bytes());
    if (const EventRef fence = parts_.pool.oldest_fence(); possible && fence != nullptr) {
      lock.unlock();
      device_->event_synchronize(fence.get());
      lock.lock();
    } else if (const EventRef spilled = possible && parts_.file ? spiller_.make_room(bytes) : nullptr;
               spilled != nullptr) {
      OFFLOAD_EDGE("room is awaited without the lock", lock.unlock());
      lanes_->event_synchronize(spilled.get());
      if (!lock.owns_lock()) lock.lock();
      failure = spiller_.take_failure();
    } else if (refused) {
      throw PinningFailed(*refused);
    } else {
      throw PoolExhausted(bytes, parts_.pool.free_bytes(), parts_.pool.max_bytes());
    }
  }
}

bool SlabStore::out_done(Slot& base) {
  std::lock_guard lock(mutex_);
  auto& slot = static_cast<SlabSlot&>(base);
  if (slot.state == State::queued) return false;
  // The state may be past copying_out: a copy-in may be queued before the copy-out has ended.
  if (slot.out_event != nullptr && !device_->event_done(slot.out_event.get())) return false;
  if (slot.state == State::copying_out) {
    parts_.count_out(slot);
    advance(slot, State::out);
  }
  return true;
}

void SlabStore::issue_out(Slot& slot) {
  std::lock_guard lock(mutex_);
  copy_out_queue_.issue(static_cast<SlabSlot&>(slot));
}

bool SlabStore::cancel(Slot& slot) {
  std::lock_guard lock(mutex_);
  // OFFLOAD_BROKEN is false in normal builds (mutants.h).
  if (slot.state != State::queued) return OFFLOAD_BROKEN("cancel refuses a copy that has begun");
  copy_out_queue_.cancel(static_cast<SlabSlot&>(slot));
  return true;
}

void SlabStore::prefetch(const SlotRef& base, void* target, Stream compute, std::shared_ptr<void> owner) {
  auto slot = std::static_pointer_cast<SlabSlot>(base);
  std::lock_guard lock(mutex_);
  copy_out_queue_.issue(*slot);
  require_prefetchable(*slot);
  copy_in_queue_.push(slot, compute);
  set_target(*slot, target, owner);
  spiller_.remove(slot);
}

void SlabStore::swap_in(const SlotRef& base, Stream compute) {
  auto slot = std::static_pointer_cast<SlabSlot>(base);
  std::unique_lock lock(mutex_);
  copy_in_queue_.issue(slot, lock);
  if (slot->state == State::arriving) advance(*slot, State::ready);
  spiller_.offer(slot);
  require_swapped_in(*slot);
  const EventRef in_event = slot->in_event;
  lock.unlock();
  if (OFFLOAD_BROKEN("a read that failed is reported") && in_event == nullptr)
    return;  // only in a test that disables the check in require_swapped_in; it then finds wrong bytes, not a crash
  OFFLOAD_EDGE("consumer waits for copy-in", device_->stream_wait(compute, in_event.get()));
}

void SlabStore::settle(const SlotRef& base) {
  auto slot = std::static_pointer_cast<SlabSlot>(base);
  std::unique_lock lock(mutex_);
  copy_in_queue_.issue(slot, lock);
  const EventRef in_event = slot->in_event;
  lock.unlock();
  if (in_event != nullptr) device_->event_synchronize(in_event.get());
}

void SlabStore::release(const SlotRef& base) {
  auto slot = std::static_pointer_cast<SlabSlot>(base);
  std::lock_guard lock(mutex_);
  if (slot->state == State::queued) copy_out_queue_.cancel(*slot);
  spiller_.remove(slot);
  const bool is_read = copy_in_queue_.cancel(*slot);
  advance(*slot, State::released);
  if (!is_read && !Spiller::holds(*slot)) parts_.free_slot(*slot);  // otherwise the lane that uses the slot frees it
}

void SlabStore::quiesce() {
  if (lanes_->in_forked_child() && !OFFLOAD_BROKEN("a forked child waits for no lane")) return;
  {
    std::lock_guard lock(mutex_);
    copy_out_queue_.cancel_all();
  }
  copy_out_queue_.drain();
  copy_in_queue_.drain();
  spiller_.drain();
  for (const OwnedStream* stream : {&parts_.out_stream, &parts_.in_stream}) device_->stream_synchronize(*stream);
}

size_t SlabStore::trim() {
  require_same_process();
  std::lock_guard lock(mutex_);
  return parts_.pool.trim(0) + (parts_.file ? parts_.file->trim() : 0);
}

size_t SlabStore::trim_pool(size_t keep_bytes) {
  require_same_process();
  std::lock_guard lock(mutex_);
  return parts_.pool.trim(keep_bytes);
}

void SlabStore::restart_high_water() {
  require_same_process();
  std::lock_guard lock(mutex_);
  parts_.pool.restart_high_water();
}

StoreStats SlabStore::stats() {
  require_same_process();
  std::lock_guard lock(mutex_);
  parts_.count_in();
  StoreStats result = stats_;
  result.pool = parts_.pool.stats();
  if (parts_.file) result.spill = parts_.file->stats();
  return result;
}

std::shared_ptr<SwapStore> SwapStore::create_slab(std::shared_ptr<Driver> device, std::shared_ptr<HostDriver> lanes,
                                                  const StoreOptions& options) {
  if (options.slice_bytes == 0 || options.slice_bytes % kPageBytes != 0)
    throw std::invalid_argument("slice_bytes must be a positive multiple of 4096");
  return std::make_shared<SlabStore>(std::move(device), std::move(lanes), options);
}

}  // namespace offload
