// Virtual time: when queued work would begin and end on a device of given figures, whatever this machine takes for it.
//
// Decided when work is queued: a stream is a time, an event the time of its stream, a wait the later of two. A device
// has three units that do one thing at a time: kernels, copies out and copies in; who comes later takes the first gap
// that is large enough. The host has one time for all its threads. It goes on by what frameworks' threads take of a
// processor, and by waiting: a thread that waits for an event sleeps until every other one waits or is idle and no
// other wakes earlier. Threads that call the driver alone, such as an engine's lanes, take no time themselves, and
// frameworks' threads let them come to rest before they go on.
//
// Not safe for threads: the machine's lock is held by whoever calls, but for HostTime.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime.h"

namespace sim {

// Does one thing at a time.
class Unit {
 public:
  // Takes the first gap of `seconds` from `ready` on; returns its beginning. Nothing is asked for before `now` any more.
  double reserve(double ready, double seconds, double now);

 private:
  std::map<double, double> busy_;  // from, to
};

struct Work {
  UnitKind unit;
  double begin, end;
};

struct HostThread;

class Clock {
 public:
  using Lock = std::unique_lock<std::mutex>;

  void start(const Figures& figures);
  void stop() { is_on_ = false; }
  bool is_on() const { return is_on_.load(std::memory_order_relaxed); }
  double now() const { return now_; }
  const Figures& figures() const { return figures_; }

  // The calling thread's own time since it left the machine; lanes come to rest first.
  void count_host(Lock& lock, bool is_frameworks);
  // The host queues work that takes `seconds` of a unit, from `ready` on. Returns its end.
  double queue(int device, UnitKind unit, double ready, double seconds, Lock& lock);
  void sleep_until(double when, Lock& lock);
  std::vector<Work> take_work() { return std::exchange(work_, {}); }

 private:
  void go_on_to(double when, Lock& lock);
  void await_lanes(Lock& lock);
  bool is_at_rest(HostThread& thread) const;
  HostThread* first_sleeper() const;

  std::atomic<bool> is_on_{false};
  double now_ = 0;
  double call_seconds_ = 0;  // that a call counts as without anything in it
  Figures figures_{};
  Unit units_[kDevices][kUnits];
  std::vector<Work> work_;
  std::vector<std::shared_ptr<HostThread>> threads_;
};

// While one of these is alive the calling thread is inside the machine: what it takes of the processor is not the
// host's time.
class HostTime {
 public:
  HostTime() { sim_host_enter(); }
  ~HostTime() { sim_host_leave(); }
  HostTime(const HostTime&) = delete;
  HostTime& operator=(const HostTime&) = delete;
};

}  // namespace sim
