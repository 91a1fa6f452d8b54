#include "node_clock.h"

#include <algorithm>
#include <ctime>

namespace offload {
namespace {

// Reading the thread's CPU time takes a system call. So it is read in the first hooks of a step, then in one of eight.
constexpr int64_t kHooksTimed = 16;
constexpr int64_t kTimedEvery = 8;
constexpr size_t kReserved = 512;  // nodes and hooks for which there is memory from the beginning

double seconds(clockid_t clock) {
  timespec at{};
  clock_gettime(clock, &at);
  return static_cast<double>(at.tv_sec) + 1e-9 * static_cast<double>(at.tv_nsec);
}

}  // namespace

StepTimes measure(const NodeTimes& nodes, const std::vector<Pause>& pauses, double step_seconds, size_t node_count) {
  const auto is_node = [node_count](int64_t node) { return node >= 0 && static_cast<size_t>(node) < node_count; };
  std::vector<double> arrivals(node_count + 1, -1.0);
  for (const auto& [node, at] : nodes)
    if (is_node(node)) arrivals[static_cast<size_t>(node)] = at;
  arrivals[node_count] = step_seconds;
  std::vector<double> paused(node_count, 0.0), first_pause(node_count, 0.0);
  StepTimes times;
  for (const Pause& pause : pauses) {
    const double seconds = pause.end - pause.begin;
    if (pause.pack_index >= 0) times.waits[pause.pack_index] += seconds;
    if (!is_node(pause.node)) continue;
    const auto node = static_cast<size_t>(pause.node);
    if (pause.begin <= arrivals[node]) first_pause[node] = seconds;
    paused[node] += seconds;
    times.stall_seconds += seconds;
  }
  times.starts.resize(node_count);
  times.node_seconds.resize(node_count);
  for (size_t node = node_count; node-- > 0;) {
    if (arrivals[node] < 0) arrivals[node] = arrivals[node + 1];
    times.node_seconds[node] = std::max(0.0, arrivals[node + 1] - arrivals[node] - paused[node]);
    times.starts[node] = arrivals[node] + first_pause[node];
  }
  return times;
}

NodeClock::NodeClock() {
  begins_.reserve(kReserved);
  pauses_.reserve(kReserved);
  begins(0, now());
}

double NodeClock::now() { return seconds(CLOCK_MONOTONIC); }

void NodeClock::begins(int64_t node, double at) {
  node_ = node;
  const auto position = static_cast<size_t>(std::max<int64_t>(node, 0));
  if (position >= begins_.size()) begins_.resize(position + 1, -1.0);
  if (begins_[position] < 0) begins_[position] = at;
}

void NodeClock::begin() {
  begin_ = now();
  const bool is_timed = hooks_ < kHooksTimed || hooks_ % kTimedEvery == 0;
  busy_ = is_timed ? seconds(CLOCK_THREAD_CPUTIME_ID) : -1.0;
}

void NodeClock::end(int64_t pack_index) {
  pauses_.push_back({node_, pack_index, begin_, now()});
  if (busy_ >= 0) {
    const double share = hooks_ < kHooksTimed ? 1.0 : static_cast<double>(kTimedEvery);
    hook_seconds_ += share * (seconds(CLOCK_THREAD_CPUTIME_ID) - busy_);
  }
  ++hooks_;
}

NodeTimes NodeClock::nodes() const {
  NodeTimes result;
  result.reserve(begins_.size());
  for (size_t node = 0; node < begins_.size(); ++node)
    if (begins_[node] >= 0) result.emplace_back(static_cast<int64_t>(node), begins_[node]);
  return result;
}

}  // namespace offload
