// Measures when the nodes of a step start, and how long hooks take in each node.
//
// schedule_cursor.cpp, swap_hooks.cpp, executor.py and the profiler report nodes and hooks to it. It uses no Python.
// Not thread safe: callers hold the GIL.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "driver.h"
#include "event_pool.h"

namespace offload {

// The time that one hook took.
struct Pause {
  int64_t node;
  int64_t pack_index;  // pack index of the tensor for which backward waited; -1: the hook was a pack
  double begin;
  double end;
};

using NodeTimes = std::vector<std::pair<int64_t, double>>;  // the nodes that began and their start times, in order

// The times of a step, in seconds; starts are counted from the beginning of the step.
struct StepTimes {
  std::vector<double> starts;        // for each node: its start, or the end of the hook in which it started
  std::vector<double> node_seconds;  // for each node: its duration without the time of hooks
  std::map<int64_t, double> waits;   // for each pack index: the time for which its unpack waited
  double stall_seconds = 0;          // total time of hooks
  double step_seconds = 0;
};

// Computes the times of a step. `step_seconds`: the end of the step. A node that did not begin has a duration of 0.
StepTimes measure(const NodeTimes& nodes, const std::vector<Pause>& pauses, double step_seconds, size_t node_count);

// Records when nodes begin and how long hooks take.
class NodeClock {
 public:
  virtual ~NodeClock() = default;

  // Records the begin of a hook that may swap, prefetch, wait or recompute.
  virtual void begin() = 0;
  // Records the start of a node at the begin of the current hook.
  virtual void arrive(int64_t node) = 0;
  // Records the start of a node now, in a hook that does nothing else.
  virtual void pass_by(int64_t node) = 0;
  // Records the end of the hook that began last. `pack_index`: pack of the tensor for which backward waited; -1: none.
  virtual void end(int64_t pack_index) = 0;
  // Records the end of the step. Returns false, with nothing recorded, if no node has begun since the last call.
  virtual bool finish() = 0;
  // Returns the times of a step of `node_count` nodes; nothing before its end.
  virtual std::optional<StepTimes> measure(size_t node_count) = 0;
  // Returns the CPU time of all hooks, estimated from those that were measured; 0 on a device.
  virtual double hook_seconds() const { return 0; }

  bool is_listening = false;  // a callback at the end of backward is registered
};

// Stores marks, which are points in time.
//
// A step may have several backward passes, and `finish` is called at the end of each. If nodes begin for the first time
// in one, such as of a second loss, the step ends with it. A pass over nodes that have begun before is not measured.
template <typename Mark>
class MarkClock : public NodeClock {
 public:
  void begin() override { begin_ = mark(); }
  void arrive(int64_t node) override { begins(node, begin_); }
  void pass_by(int64_t node) override { begins(node, mark()); }
  void end(int64_t pack_index) override;
  bool finish() override;
  std::optional<StepTimes> measure(size_t node_count) override;

 protected:
  // Starts the first node.
  void start();
  virtual Mark now() = 0;
  virtual bool is_reached(const Mark& mark) = 0;
  virtual double seconds(const Mark& from, const Mark& to) = 0;
  // Whether marks on streams that are no longer used are reached.
  virtual bool has_left_streams() { return true; }
  // Whether the present node has been measured before.
  bool repeats() const { return node_ < 0; }

 private:
  struct Hook {
    int64_t node;
    int64_t pack_index;
    Mark begin, end;
  };

  Mark mark() { return last_ = now(); }
  void begins(int64_t node, const Mark& at);

  std::vector<std::optional<Mark>> begins_;  // by node
  std::vector<Hook> pauses_;
  std::optional<Mark> end_;
  Mark begin_{}, last_{};
  int64_t node_ = 0;        // −1: it began in an earlier backward pass
  bool has_begun_ = false;  // a node has begun since `finish`
};

// Reads the clock of Python's time.perf_counter.
class HostClock final : public MarkClock<double> {
 public:
  HostClock() { start(); }
  void begin() override;
  void end(int64_t pack_index) override;
  double hook_seconds() const override { return hook_seconds_; }

 private:
  double now() override;
  bool is_reached(const double& /*mark*/) override { return true; }
  double seconds(const double& from, const double& to) override { return to - from; }

  double busy_ = -1;  // CPU time of the thread at `begin`; negative: not read
  int64_t hooks_ = 0;
  double hook_seconds_ = 0;
};

// Records events on a compute stream, so it measures when the device reaches a node, a hook's begin and its end.
class DeviceClock final : public MarkClock<EventRef> {
 public:
  DeviceClock(std::shared_ptr<EventPool> events, Stream forward) : stream_(forward), events_(std::move(events)) {
    start();
  }

  // Records on another stream from now on.
  void move_to(Stream stream) {
    if (stream != stream_) left_.push_back(events_->record(stream_));
    stream_ = stream;
  }

 private:
  EventRef now() override { return events_->record(stream_); }
  bool has_left_streams() override {
    return std::all_of(left_.begin(), left_.end(), [this](const EventRef& mark) { return is_reached(mark); });
  }
  bool is_reached(const EventRef& mark) override { return events_->driver().event_done(mark.get()); }
  double seconds(const EventRef& from, const EventRef& to) override {
    return 1e-3 * events_->driver().event_elapsed_ms(from.get(), to.get());
  }

  Stream stream_;
  std::vector<EventRef> left_;  // the last mark on each stream that it has left
  const std::shared_ptr<EventPool> events_;
};

}  // namespace offload
