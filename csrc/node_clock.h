// Measures when the nodes of a step start, and how long hooks take in each node.
//
// schedule_cursor.cpp and executor.py report nodes and hooks to it. It uses no Python. Not thread safe: callers hold
// the GIL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

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
  std::vector<double> starts;        // for each node: when it could begin to compute
  std::vector<double> node_seconds;  // for each node: its duration without the time of hooks
  std::map<int64_t, double> waits;   // for each pack index: the time for which its unpack waited
  double stall_seconds = 0;          // total time of hooks
};

// Computes the times of a step. `step_seconds`: the end of the step. A node that did not begin has a duration of 0.
StepTimes measure(const NodeTimes& nodes, const std::vector<Pause>& pauses, double step_seconds, size_t node_count);

// Records when nodes begin and how long hooks take, with the clock of Python's time.perf_counter.
class NodeClock {
 public:
  NodeClock();
  // Records the begin of a hook that may swap, prefetch, wait or recompute.
  void begin();
  // Records the start of a node at the begin of the current hook.
  void arrive(int64_t node) { begins(node, begin_); }
  // Records the start of a node now, in a hook that does nothing else.
  void pass_by(int64_t node) { begins(node, now()); }
  // Records the end of the hook that began last. `pack_index`: pack of the tensor for which backward waited; -1: none.
  void end(int64_t pack_index);
  // Returns the nodes that began and their start times, in order.
  NodeTimes nodes() const;
  const std::vector<Pause>& pauses() const { return pauses_; }
  // Returns the CPU time of all hooks, estimated from those that were measured.
  double hook_seconds() const { return hook_seconds_; }

  bool is_listening = false;  // a callback at the end of backward is registered

 private:
  static double now();
  void begins(int64_t node, double at);

  std::vector<double> begins_;  // start time of each node; negative: it has not begun
  std::vector<Pause> pauses_;
  double begin_ = 0;
  double busy_ = -1;  // CPU time of the thread at `begin`; negative: not read
  int64_t node_ = 0;
  int64_t hooks_ = 0;
  double hook_seconds_ = 0;
};

}  // namespace offload
