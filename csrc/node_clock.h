// How long the nodes of a step took, and how long hooks held them up.
//
// Beside the data path: schedule_cursor.cpp and executor.py tell it of nodes and hooks. Knows no Python. Not thread safe:
// callers hold the GIL.
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
  int64_t pack_index;  // whose tensor backward waited for; -1: of a pack
  double begin;
  double end;
};

using NodeTimes = std::vector<std::pair<int64_t, double>>;  // nodes that began, and when; the first one first

// What a step took, in seconds from its beginning.
struct StepTimes {
  std::vector<double> starts;        // by node: when it could begin to compute
  std::vector<double> node_seconds;  // by node, without the time that hooks took
  std::map<int64_t, double> waits;   // by pack index
  double stall_seconds = 0;          // that hooks took in all
};

// `step_seconds`: when the step ended. A node that was not seen took no time.
StepTimes measure(const NodeTimes& nodes, const std::vector<Pause>& pauses, double step_seconds, size_t node_count);

// When nodes begin and how long hooks hold them up, by the clock of Python's time.perf_counter.
class NodeClock {
 public:
  NodeClock();
  // A hook begins that may do something.
  void begin();
  // A node begins, at the beginning of the present hook.
  void arrive(int64_t node) { begins(node, begin_); }
  // A node begins in a hook that does nothing.
  void pass_by(int64_t node) { begins(node, now()); }
  // The hook that began last is about to return. `pack_index`: whose tensor backward waited for; -1: none.
  void end(int64_t pack_index);
  // Nodes that began, with the time of each, the first one first.
  NodeTimes nodes() const;
  const std::vector<Pause>& pauses() const { return pauses_; }
  // What hooks took of the processor.
  double hook_seconds() const { return hook_seconds_; }

  bool is_listening = false;  // for the end of backward

 private:
  static double now();
  void begins(int64_t node, double at);

  std::vector<double> begins_;  // by node; negative: not yet
  std::vector<Pause> pauses_;
  double begin_ = 0;
  double busy_ = -1;  // processor time at `begin`; negative: not read
  int64_t node_ = 0;
  int64_t hooks_ = 0;
  double hook_seconds_ = 0;
};

}  // namespace offload
