#include "slab_slot.h"

#include <exception>
#include <new>
#include <utility>

#include "error.h"
#include "mutants.h"

namespace offload {

SlabParts::SlabParts(SwapStore& owner, std::mutex& lock, StoreStats& figures, CopyLog& copies,
                     std::shared_ptr<Driver> driver, std::shared_ptr<HostDriver> host_driver,
                     const std::shared_ptr<EventPool>& device_events, const std::shared_ptr<EventPool>& host_events,
                     const StoreOptions& options)
    : store(owner),
      mutex(lock),
      stats(figures),
      log(copies),
      device(std::move(driver)),
      lanes(std::move(host_driver)),
      events(device_events),
      lane_events(host_events),
      slice_bytes(options.slice_bytes),
      file(options.spill_directory.empty() ? nullptr : std::make_unique<SpillFile>(
                                                            options.spill_directory, options.checks_every_byte)),
      pool(device, options.host_bytes_max, options.slab_bytes),
      bounce_bytes(std::clamp(options.host_bytes_max / 8 / kPageBytes * kPageBytes, kPageBytes, slice_bytes)),
      bounces(take_bounces()),
      out_stream(*device),
      in_stream(*device) {}

std::array<Block, 2> SlabParts::take_bounces() {
  std::array<Block, 2> taken;
  if (!file) return taken;
  for (Block& bounce : taken) {
    const auto block = pool.try_allocate(bounce_bytes);
    if (!block) throw PoolExhausted(bounce_bytes, pool.free_bytes(), pool.max_bytes());
    bounce = *block;
  }
  return taken;
}

EventRef SlabParts::last_copy(const SlabSlot& slot) {
  if (slot.issued_bytes > 0 && slot.issued_bytes < slot.bytes) return events->record(in_stream);
  return slot.in_event != nullptr ? slot.in_event : slot.out_event;  // an earlier copy-in may still read the block
}

void SlabParts::free_slot(SlabSlot& slot) {
  try {
    count_out(slot);
  } catch (const std::exception&) {
    // A failed query: the copy is missing from the statistics; the slot is freed nevertheless.
  }
  count_in();
  if (slot.block) {
    try {
      pool.release(slot.block, last_copy(slot));
    } catch (...) {
      if (settle(in_stream)) pool.release(slot.block, nullptr);  // otherwise leaked: a copy may still read the block
    }
    slot.block = {};
  }
  if (file && !OFFLOAD_BROKEN("a freed slot gives its extent back"))
    OFFLOAD_EDGE("extent outlives its fill", file->release(slot.extent));
  slot.extent = {};
  slot.target_owner = nullptr;
  --stats.live_tickets;
}

void SlabParts::count_out(SlabSlot& slot) {
  if (slot.out == nullptr || !device->event_done(slot.out_event.get())) return;
  stats.out_seconds += seconds_once(*slot.out);
  ++stats.out_copies;
  stats.out_bytes += slot.bytes;
  slot.out = nullptr;
}

void SlabParts::note_in(const std::shared_ptr<Transfer>& transfer) noexcept {
  count_in();
  try {
    copies_in_.push_back(transfer);
  } catch (const std::bad_alloc&) {
    // The copy is missing from the statistics.
  }
}

void SlabParts::count_in() noexcept {
  while (!copies_in_.empty() && is_reached(copies_in_.front()->end)) {
    Transfer& transfer = *copies_in_.front();
    stats.in_seconds += seconds_once(transfer);
    stats.in_copies += transfer.copies;
    stats.in_bytes += transfer.bytes;
    copies_in_.pop_front();
  }
}

// The duration of a transfer, counted once for all its blocks; 0 if the device cannot time it.
double SlabParts::seconds_once(Transfer& transfer) {
  const EventRef begin = std::exchange(transfer.begin, nullptr);
  if (begin == nullptr) return 0;
  try {
    return 1e-3 * device->event_elapsed_ms(begin.get(), transfer.end.get());
  } catch (const std::exception&) {
    return 0;
  }
}

bool SlabParts::is_reached(const EventRef& event) {
  try {
    return device->event_done(event.get());
  } catch (const std::exception&) {  // a failed query, or no memory for its message
    return false;
  }
}

bool SlabParts::settle(Stream stream) {
  try {
    device->stream_synchronize(stream);
  } catch (const std::exception&) {  // the device's error, or no memory for its message
    return false;
  }
  return true;
}

void InFlight::note(Stream stream) {
  try {
    events_.push_back(parts_.events->record(stream));
  } catch (const DriverError&) {
  } catch (const std::bad_alloc&) {
  }
}

void InFlight::await_room(std::unique_lock<std::mutex>& lock) {
  while (events_.size() >= kMax) {
    const EventRef oldest = events_.front();
    events_.pop_front();
    lock.unlock();
    try {
      parts_.device->event_synchronize(oldest.get());
    } catch (const std::exception&) {
      // The next transfer is issued early and reports the device's error itself.
    }
    lock.lock();
  }
}

}  // namespace offload
