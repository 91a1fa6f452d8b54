// The driver of driver.h for the host: a stream is a worker thread, an event is a condition, the device is RAM.
//
// Its streams are also the engine's *lanes*, on every device: they run work of the host (file I/O, issuing copies on a
// GPU's copy stream). So all asynchronous work of the data plane uses one type of queue. The compute stream (nullptr)
// is the calling thread.
//
// A driver has one of three schedules. Training uses `threads`. The other two are for tests that use this driver as the
// device; they are part of it so that tests run the same code, including its queues. `delays` sleeps for a seeded
// random time before operations. `stepped` has no threads: a thread that waits runs the next runnable operation, chosen
// with the seed, so that every failure can be reproduced.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "driver.h"
#include "process.h"

namespace offload {

enum class LaneOrder { threads, delays, stepped };

class HostDriver final : public Driver, public std::enable_shared_from_this<HostDriver> {
 public:
  // Lanes run at `niceness` relative to the process (0…19), so that copies do not take processor time from training.
  // `bandwidth` limits each lane, in bytes per second, to simulate a slow link; 0: no limit.
  static std::shared_ptr<HostDriver> create(LaneOrder order = LaneOrder::threads, uint64_t seed = 0, int niceness = 0,
                                            double bandwidth = 0);

  const char* name() const noexcept override { return "host"; }
  void require_same_process() const override;
  bool in_forked_child() const noexcept override;

  Stream stream_create() override;
  void stream_destroy(Stream stream) noexcept override;
  void stream_wait(Stream stream, Event event) override;
  void stream_synchronize(Stream stream) override;
  void require_not_capturing(Stream) override {}

  Event event_create() override;
  void event_destroy(Event event) noexcept override;
  void event_record(Event event, Stream stream) override;
  bool event_done(Event event) override;
  void event_synchronize(Event event) override;
  double event_elapsed_ms(Event from, Event to) override;

  void copy_out(void* host, const void* device, size_t bytes, Stream stream) override;
  void copy_in(void* device, const void* host, size_t bytes, Stream stream) override;
  void copy_out_batch(const Copy* copies, size_t count, Stream stream) override;
  void copy_in_batch(const Copy* copies, size_t count, Stream stream) override;
  void host_register(void*, size_t) override {}
  bool host_unregister(void*) noexcept override { return true; }
  DeviceMemory device_memory() override;

  // Queues host work on a lane. `work` must throw nothing but DriverError, which the lane ignores: callers get that
  // error from their own calls.
  void call(Stream lane, std::function<void()> work);
  // Sleeps, on a lane, until a copy of `bytes` that began at `begin_seconds` would have ended at `bandwidth`.
  void pace(double begin_seconds, size_t bytes) const;
  // For an event that code completes itself: the event is pending from event_arm to event_fire.
  void event_arm(Event event);
  void event_fire(Event event);
  // With `stepped`: runs a few operations, as the lanes of other schedules might have done by now. Otherwise does
  // nothing. Callers hold no lock.
  void run_some();

 private:
  // One record of an event. Waiters hold the record, so that recording the event again does not affect them.
  struct Point {
    bool done = false;
    double done_seconds = 0;
  };
  using PointRef = std::shared_ptr<Point>;
  struct HostEvent {
    PointRef recorded;  // the last record; null if there is none
  };
  struct Operation {
    PointRef wait_for;
    std::function<void()> work;
  };
  struct HostStream {
    std::deque<Operation> queue;
    std::condition_variable wake;  // only the stream's worker waits for it
    bool running = false;
    bool closing = false;
  };
  using StreamRef = std::shared_ptr<HostStream>;

  HostDriver(LaneOrder order, uint64_t seed, int niceness, double bandwidth);
  static bool runnable(const HostStream& stream);
  static void worker(std::shared_ptr<HostDriver> driver, StreamRef stream);
  void enqueue(Stream stream, Operation operation);
  PointRef recorded(Event event);
  PointRef record_again(Event event);
  void complete(const PointRef& point);
  void run_head(std::unique_lock<std::mutex>& lock, HostStream& stream);
  bool step(std::unique_lock<std::mutex>& lock);
  template <typename Predicate>
  void wait_until(std::unique_lock<std::mutex>& lock, Predicate done);
  unsigned delay_us();

  const LaneOrder order_;
  const int niceness_;
  const double bandwidth_;
  const Process owner_;
  std::mutex mutex_;
  std::condition_variable changed_;  // for callers that wait for an event, or until a stream is drained
  std::mt19937_64 random_;
  std::vector<StreamRef> streams_;
};

}  // namespace offload
