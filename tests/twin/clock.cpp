#include "clock.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <string>
#include <thread>

#include "machine.h"

namespace sim {

namespace {

constexpr double kAwake = std::numeric_limits<double>::infinity();
constexpr auto kPause = std::chrono::microseconds(30);  // between two looks at what other threads do

double processor_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

int open_state() {
  const std::string path = "/proc/self/task/" + std::to_string(syscall(SYS_gettid)) + "/stat";
  return open(path.c_str(), O_RDONLY | O_CLOEXEC);
}

}  // namespace

// Never destroyed while the process runs: whoever looks at it finds that the thread has ended.
struct HostThread {
  const int state_file = open_state();  // of the system
  std::atomic<int> depth{0};            // inside the machine
  bool is_frameworks = false;
  double wakes_at = kAwake;
  double seconds_before = processor_seconds();
  std::condition_variable wake;

  bool is_sleeping() const { return wakes_at != kAwake; }
  // As the system says it: 'S' waits for something; 0 has ended.
  char system_state() const {
    char text[256];
    const ssize_t read = pread(state_file, text, sizeof text - 1, 0);
    if (read <= 0) return 0;
    text[read] = 0;
    const char* const name_end = std::strrchr(text, ')');
    return name_end == nullptr ? 'R' : name_end[2];
  }
};

namespace {

// Registered when the thread is first seen inside the machine while the clock is on.
thread_local std::shared_ptr<HostThread>* mine = nullptr;

HostThread& this_thread() {
  if (mine == nullptr) mine = new std::shared_ptr<HostThread>(std::make_shared<HostThread>());
  return **mine;
}

// What a call without anything in it counts as: reading the time takes some itself. The median of several.
double empty_call_seconds() {
  std::vector<double> found(101);
  this_thread();  // from here on calls are counted, the clock being on or not
  for (double& each : found) {
    const HostTime inside;
    each = processor_seconds() - this_thread().seconds_before;
  }
  std::nth_element(found.begin(), found.begin() + 50, found.end());
  return found[50];
}

}  // namespace

double Unit::reserve(double ready, double seconds, double now) {
  while (!busy_.empty() && busy_.begin()->second <= now) busy_.erase(busy_.begin());
  if (seconds <= 0) return ready;
  auto next = busy_.upper_bound(ready);
  if (next != busy_.begin()) ready = std::max(ready, std::prev(next)->second);
  for (; next != busy_.end() && next->first < ready + seconds; ++next) ready = std::max(ready, next->second);
  busy_.emplace(ready, ready + seconds);
  return ready;
}

void Clock::start(const Figures& figures) {
  figures_ = figures;
  call_seconds_ = empty_call_seconds();
  work_.clear();
  is_on_ = true;
}

void Clock::count_host(Lock& lock, bool is_frameworks) {
  if (!is_on()) return;
  HostThread& thread = this_thread();
  if (std::find(threads_.begin(), threads_.end(), *mine) == threads_.end()) {
    const auto has_ended = [](const std::shared_ptr<HostThread>& each) { return each->system_state() == 0; };
    threads_.erase(std::remove_if(threads_.begin(), threads_.end(), has_ended), threads_.end());
    threads_.push_back(*mine);
    thread.seconds_before = processor_seconds();
  }
  thread.is_frameworks = thread.is_frameworks || is_frameworks;
  if (!thread.is_frameworks) return;
  const double before = thread.seconds_before;
  if (thread.depth <= 1) thread.seconds_before = processor_seconds();
  const double spent = std::max(thread.seconds_before - before - call_seconds_, 0.0);
  await_lanes(lock);
  go_on_to(now_ + figures_.host_factor * spent, lock);
}

double Clock::queue(int device, UnitKind unit, double ready, double seconds, Lock& lock) {
  if (this_thread().is_frameworks) go_on_to(now_ + figures_.launch_seconds, lock);
  const double begin = units_[device][unit].reserve(std::max(ready, now_), seconds, now_);
  work_.push_back({unit, begin, begin + seconds});
  return begin + seconds;
}

// Whether it can do nothing more before the time goes on.
bool Clock::is_at_rest(HostThread& thread) const {
  if (thread.is_sleeping()) return true;
  const char system_state = thread.system_state();  // first: it may enter the machine and wait for the lock we hold
  return system_state == 0 || (system_state == 'S' && thread.depth == 0);
}

HostThread* Clock::first_sleeper() const {
  HostThread* first = nullptr;
  for (const auto& thread : threads_)
    if (thread->is_sleeping() && (first == nullptr || thread->wakes_at < first->wakes_at)) first = thread.get();
  return first;
}

void Clock::await_lanes(Lock& lock) {
  HostThread& thread = this_thread();
  const auto is_busy = [&](const std::shared_ptr<HostThread>& other) {
    return !other->is_frameworks && other.get() != &thread && !is_at_rest(*other);
  };
  while (std::any_of(threads_.begin(), threads_.end(), is_busy)) {
    lock.unlock();
    std::this_thread::sleep_for(kPause);
    lock.lock();
  }
}

void Clock::go_on_to(double when, Lock& lock) {
  for (HostThread* first = first_sleeper(); first != nullptr && first->wakes_at <= when; first = first_sleeper()) {
    now_ = std::max(now_, first->wakes_at);
    first->wakes_at = kAwake;
    first->wake.notify_one();
    await_lanes(lock);
  }
  now_ = std::max(now_, when);
}

void Clock::sleep_until(double when, Lock& lock) {
  if (!is_on() || when <= now_) return;
  HostThread& thread = this_thread();
  thread.wakes_at = when;
  while (thread.is_sleeping()) {
    const auto is_busy = [&](const std::shared_ptr<HostThread>& other) {
      return other.get() != &thread && !is_at_rest(*other);
    };
    if (first_sleeper() == &thread && std::none_of(threads_.begin(), threads_.end(), is_busy)) {
      now_ = std::max(now_, when);
      thread.wakes_at = kAwake;
    } else {
      thread.wake.wait_for(lock, kPause);
    }
  }
}

}  // namespace sim

using namespace sim;

#pragma GCC visibility push(default)
extern "C" {

void sim_clock_start(const Figures* figures) {
  const Lock lock(state.mutex);
  state.clock.start(*figures);
}

void sim_clock_stop() {
  const Lock lock(state.mutex);
  state.clock.stop();
}

int sim_clock_is_on() { return state.clock.is_on() ? 1 : 0; }

double sim_clock_now() {
  const Visit visit;
  return state.clock.now();
}

void sim_clock_sleep(double seconds) {
  Visit visit;
  state.clock.sleep_until(state.clock.now() + seconds, visit.lock);
}

size_t sim_clock_work(double* begins, double* ends, int* units, size_t count_max) {
  static std::vector<Work> kept;
  const Lock lock(state.mutex);
  if (count_max == 0) {
    kept = state.clock.take_work();
    return kept.size();
  }
  const size_t count = std::min(count_max, kept.size());
  for (size_t each = 0; each < count; ++each) {
    begins[each] = kept[each].begin;
    ends[each] = kept[each].end;
    units[each] = kept[each].unit;
  }
  return count;
}

void sim_host_enter() {
  if (state.clock.is_on() || mine != nullptr) ++this_thread().depth;
}

void sim_host_leave() {
  if (mine == nullptr || (*mine)->depth == 0) return;
  if (--(*mine)->depth == 0) (*mine)->seconds_before = processor_seconds();
}
}
#pragma GCC visibility pop
