// Reuses a driver's events: creating an event is a driver call, and a step needs several events per swapped tensor.
//
// All waits for the same point of a stream share one EventRef. Destroying its last copy returns the event to the pool.
// Thread safe.
#pragma once

#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "driver.h"
#include "mutants.h"

namespace offload {

using EventRef = std::shared_ptr<void>;  // .get() is the driver's Event

class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  explicit EventPool(std::shared_ptr<Driver> driver) : driver_(std::move(driver)) {}
  ~EventPool() {
    for (Event event : idle_) driver_->event_destroy(event);
  }

  EventRef take() {
    Event event = nullptr;
    {
      std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        event = idle_.back();
        idle_.pop_back();
      }
    }
    if (event == nullptr) event = driver_->event_create();
    if (OFFLOAD_BROKEN("event is recycled after its last waiter")) {
      give_back(event);
      return {event, [](Event) {}};
    }
    return {event, [pool = shared_from_this()](Event used) { pool->give_back(used); }};
  }

  Driver& driver() const { return *driver_; }

  // Returns an event that completes when the work now queued on `stream` has ended.
  EventRef record(Stream stream) {
    EventRef event = take();
    driver_->event_record(event.get(), stream);
    return event;
  }

 private:
  void give_back(Event event) {
    std::unique_lock lock(mutex_, std::defer_lock);
    OFFLOAD_EDGE("event pool is locked", lock.lock());
    try {
      idle_.push_back(event);
    } catch (const std::bad_alloc&) {
      driver_->event_destroy(event);
    }
  }

  const std::shared_ptr<Driver> driver_;
  std::mutex mutex_;
  std::vector<Event> idle_;
};

}  // namespace offload
