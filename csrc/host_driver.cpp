#include "host_driver.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>

#include "copy_log.h"
#include "error.h"
#include "mutants.h"

namespace offload {
namespace {

// Python handles signals in its main thread: the kernel must not deliver them to a lane.
void become_lane(int niceness) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  pthread_setname_np(pthread_self(), "offload-lane");
  if (niceness > 0) {
    const auto thread_id = static_cast<id_t>(syscall(SYS_gettid));
    setpriority(PRIO_PROCESS, thread_id, getpriority(PRIO_PROCESS, thread_id) + niceness);
  }
}

}  // namespace

std::shared_ptr<HostDriver> HostDriver::create(LaneOrder order, uint64_t seed, int niceness, double bandwidth) {
  return std::shared_ptr<HostDriver>(new HostDriver(order, seed, niceness, bandwidth));
}

HostDriver::HostDriver(LaneOrder order, uint64_t seed, int niceness, double bandwidth)
    : order_(order), niceness_(niceness), bandwidth_(bandwidth), random_(seed) {}

void HostDriver::require_same_process() const {
  if (in_forked_child() && !OFFLOAD_BROKEN("a forked child is refused"))
    throw DriverError("offload", 0,
                      "fork() does not copy the engine's threads: in this process call offload.disable(model), and "
                      "then offload.enable(model) to swap here too (with moved parameters, call offload.disable(model) "
                      "before the fork); or start the process with "
                      "multiprocessing.set_start_method(\"spawn\")");
}

bool HostDriver::in_forked_child() const noexcept { return !owner_.is_this(); }

Stream HostDriver::stream_create() {
  require_same_process();
  auto stream = std::make_shared<HostStream>();
  {
    std::lock_guard lock(mutex_);
    streams_.push_back(stream);
  }
  // Detached: a worker holds references to its driver and its stream, and ends when the stream is closed and drained.
  // So no destructor has to join it.
  if (order_ != LaneOrder::stepped) {
    try {
      std::thread(worker, shared_from_this(), stream).detach();
    } catch (const std::system_error& error) {
      {
        std::lock_guard lock(mutex_);
        streams_.erase(std::find(streams_.begin(), streams_.end(), stream));
      }
      throw DriverError("pthread_create", error.code().value(),
                        "the engine needs one thread for each copy stream, and the system refuses another one: raise "
                        "the limit on threads (ulimit -u; in a container, pids.max) or on the address space (ulimit "
                        "-v), or use fewer threads");
    }
  }
  return stream.get();
}

void HostDriver::stream_destroy(Stream stream) noexcept {
  if (in_forked_child()) return;
  std::lock_guard lock(mutex_);
  auto* host_stream = static_cast<HostStream*>(stream);
  host_stream->closing = true;
  host_stream->wake.notify_one();
  // Without a worker (stepped mode), the list holds the last reference to the stream.
  if (host_stream->queue.empty() && !host_stream->running)
    streams_.erase(std::remove_if(streams_.begin(), streams_.end(),
                                  [&](const StreamRef& each) { return each.get() == host_stream; }),
                   streams_.end());
}

bool HostDriver::runnable(const HostStream& stream) {
  if (stream.running || stream.queue.empty()) return false;
  const Operation& head = stream.queue.front();
  return head.wait_for == nullptr || head.wait_for->done;
}

void HostDriver::run_head(std::unique_lock<std::mutex>& lock, HostStream& stream) {
  Operation head = std::move(stream.queue.front());
  stream.queue.pop_front();
  if (head.work) {
    stream.running = true;
    const unsigned sleep_us = delay_us();
    lock.unlock();
    if (sleep_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(sleep_us));
    try {
      head.work();
    } catch (const DriverError&) {
      // The device's context is lost: callers get the error from their own calls; the lane continues.
    }
    head.work = nullptr;  // without the lock: destroying the captured objects may call this driver
    lock.lock();
    stream.running = false;
  }
  changed_.notify_all();
}

void HostDriver::worker(std::shared_ptr<HostDriver> driver, StreamRef stream) {
  become_lane(driver->niceness_);
  std::unique_lock lock(driver->mutex_);
  for (;;) {
    stream->wake.wait(lock, [&] { return runnable(*stream) || (stream->closing && stream->queue.empty()); });
    if (stream->queue.empty()) break;
    driver->run_head(lock, *stream);
  }
  auto& streams = driver->streams_;
  streams.erase(std::remove(streams.begin(), streams.end(), stream), streams.end());
}

unsigned HostDriver::delay_us() {
  if (order_ != LaneOrder::delays) return 0;
  const uint64_t draw = random_();
  if (draw % 4 != 0) return 0;
  return static_cast<unsigned>((draw >> 8) % ((draw >> 4) % 8 == 0 ? 3000 : 200));
}

bool HostDriver::step(std::unique_lock<std::mutex>& lock) {
  std::vector<StreamRef> ready;
  for (const StreamRef& stream : streams_)
    if (runnable(*stream)) ready.push_back(stream);
  if (ready.empty()) return false;
  run_head(lock, *ready[random_() % ready.size()]);
  return true;
}

void HostDriver::run_some() {
  if (order_ != LaneOrder::stepped) return;
  std::unique_lock lock(mutex_);
  for (uint64_t left = random_() % 4; left > 0 && step(lock); --left) {
  }
}

template <typename Predicate>
void HostDriver::wait_until(std::unique_lock<std::mutex>& lock, Predicate done) {
  if (order_ != LaneOrder::stepped) {
    changed_.wait(lock, done);
    return;
  }
  while (!done()) {
    if (step(lock)) continue;
    const bool others = std::any_of(streams_.begin(), streams_.end(), [](const StreamRef& s) { return s->running; });
    if (!others)
      throw DriverError("host stream", 0,
                        "deadlock: the awaited event is not done, and no stream can run an operation");
    changed_.wait_for(lock, std::chrono::milliseconds(10));
  }
}

void HostDriver::enqueue(Stream stream, Operation operation) {
  require_same_process();
  std::lock_guard lock(mutex_);
  auto* host_stream = static_cast<HostStream*>(stream);
  host_stream->queue.push_back(std::move(operation));
  host_stream->wake.notify_one();
}

void HostDriver::call(Stream lane, std::function<void()> work) { enqueue(lane, {nullptr, std::move(work)}); }

HostDriver::PointRef HostDriver::recorded(Event event) {
  std::lock_guard lock(mutex_);
  return static_cast<HostEvent*>(event)->recorded;
}

HostDriver::PointRef HostDriver::record_again(Event event) {
  std::lock_guard lock(mutex_);
  return static_cast<HostEvent*>(event)->recorded = std::make_shared<Point>();
}

void HostDriver::stream_wait(Stream stream, Event event) {
  if (stream == nullptr) {
    event_synchronize(event);
    return;
  }
  enqueue(stream, {recorded(event), nullptr});
}

void HostDriver::stream_synchronize(Stream stream) {
  if (stream == nullptr) return;
  require_same_process();
  std::unique_lock lock(mutex_);
  auto* host_stream = static_cast<HostStream*>(stream);
  wait_until(lock, [&] { return host_stream->queue.empty() && !host_stream->running; });
}

Event HostDriver::event_create() { return new HostEvent; }

void HostDriver::event_destroy(Event event) noexcept { delete static_cast<HostEvent*>(event); }

void HostDriver::complete(const PointRef& point) {
  std::lock_guard lock(mutex_);
  point->done = true;
  point->done_seconds = now_seconds();
  for (const StreamRef& stream : streams_)
    if (!stream->queue.empty() && stream->queue.front().wait_for == point) stream->wake.notify_one();
  changed_.notify_all();
}

void HostDriver::event_arm(Event event) { record_again(event); }

void HostDriver::event_fire(Event event) { complete(recorded(event)); }

void HostDriver::event_record(Event event, Stream stream) {
  const PointRef point = record_again(event);
  if (stream == nullptr) {
    complete(point);
  } else {
    enqueue(stream, {nullptr, [this, point] { complete(point); }});
  }
}

bool HostDriver::event_done(Event event) {
  const PointRef point = recorded(event);
  if (point == nullptr) return true;
  std::lock_guard lock(mutex_);
  return point->done;
}

void HostDriver::event_synchronize(Event event) {
  require_same_process();
  const PointRef point = recorded(event);
  if (point == nullptr) return;
  std::unique_lock lock(mutex_);
  wait_until(lock, [&] { return point->done; });
}

double HostDriver::event_elapsed_ms(Event from, Event to) {
  std::lock_guard lock(mutex_);
  const PointRef& begin = static_cast<HostEvent*>(from)->recorded;
  const PointRef& end = static_cast<HostEvent*>(to)->recorded;
  return begin == nullptr || end == nullptr ? 0 : 1e3 * (end->done_seconds - begin->done_seconds);
}

void HostDriver::pace(double begin_seconds, size_t bytes) const {
  if (bandwidth_ <= 0) return;
  const double left = begin_seconds + static_cast<double>(bytes) / bandwidth_ - now_seconds();
  if (left > 0) std::this_thread::sleep_for(std::chrono::duration<double>(left));
}

void HostDriver::copy_out(void* host, const void* device, size_t bytes, Stream stream) {
  const Copy copy{host, device, bytes};
  copy_out_batch(&copy, 1, stream);
}

void HostDriver::copy_in(void* device, const void* host, size_t bytes, Stream stream) {
  copy_out(device, host, bytes, stream);
}

void HostDriver::copy_out_batch(const Copy* copies, size_t count, Stream stream) {
  call(stream, [this, batch = std::vector<Copy>(copies, copies + count)] {
    for (const Copy& copy : batch) {
      const double begin_seconds = now_seconds();
      std::memcpy(copy.to, copy.from, copy.bytes);
      pace(begin_seconds, copy.bytes);
    }
  });
}

void HostDriver::copy_in_batch(const Copy* copies, size_t count, Stream stream) {
  copy_out_batch(copies, count, stream);
}

DeviceMemory HostDriver::device_memory() {
  struct sysinfo info{};
  sysinfo(&info);
  return {info.freeram * info.mem_unit, info.totalram * info.mem_unit};
}

}  // namespace offload
