// The host provider of driver.h: a stream is a worker thread, an event a condition, the device is RAM.
//
// It is also the engine's supply of *lanes*: streams that run host work (file I/O, feeding a GPU's copy stream), so
// that everything asynchronous in the data plane passes through one queue type whatever the device is. The compute
// stream (nullptr) is the calling thread.
//
// Three schedules. `threads` is production. The other two make this driver the device of the tests, which is why they
// are part of it: the code under test is the code that runs, down to its queues. `delays` sleeps a seeded random time
// before operations. `stepped` has no threads: a thread that waits runs the next runnable operation, chosen by the
// seed, so that every failure replays.
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
  // Lanes run at `niceness` relative to the process (0…19), so that copies do not steal the training's cores.
  // `bandwidth` in bytes per second, unless 0, is the most that each lane copies: a slow link, for measurements.
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

  // Queues host work on a lane. `work` must not throw.
  void call(Stream lane, std::function<void()> work);
  // For work on a lane: sleeps until a copy of `bytes` that began at `begin_seconds` would have ended at `bandwidth`.
  void pace(double begin_seconds, size_t bytes) const;
  // An event that work fires by hand: pending from arm to fire.
  void event_arm(Event event);
  void event_fire(Event event);
  // Under `stepped`: runs a few operations, as lanes might have by now. Otherwise does nothing. Callers hold no lock.
  void run_some();

 private:
  // One record of an event. Waiters hold the record, so that recording the event again does not affect them.
  struct Point {
    bool done = false;
    double done_seconds = 0;
  };
  using PointRef = std::shared_ptr<Point>;
  struct HostEvent {
    PointRef recorded;  // null: never
  };
  struct Operation {
    PointRef wait_for;
    std::function<void()> work;
  };
  struct HostStream {
    std::deque<Operation> queue;
    std::condition_variable wake;  // its worker alone sleeps here
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
  std::condition_variable changed_;  // callers that wait for an event or for a stream to drain
  std::mt19937_64 random_;
  std::vector<StreamRef> streams_;
};

}  // namespace offload
