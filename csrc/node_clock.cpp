#include "node_clock.h"

#include <algorithm>
#include <ctime>

namespace offload {
namespace {

// Reading the thread's CPU time takes a system call. So it is read in the first hooks of a step, then in one of eight.
constexpr int64_t kHooksTimed = 16;
constexpr int64_t kTimedEvery = 8;
constexpr size_t kReserved = 512;  // nodes and hooks for which there is memory from the beginning

double read(clockid_t clock) {
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
  times.step_seconds = step_seconds;
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

template <typename Mark>
void MarkClock<Mark>::start() {
  begins_.reserve(kReserved);
  pauses_.reserve(kReserved);
  begins(0, now());
}

template <typename Mark>
void MarkClock<Mark>::end(int64_t pack_index) {
  if (!repeats()) pauses_.push_back({node_, pack_index, begin_, mark()});
}

template <typename Mark>
bool MarkClock<Mark>::finish() {
  if (end_ && !has_begun_) return false;
  end_ = mark();
  has_begun_ = false;
  return true;
}

template <typename Mark>
void MarkClock<Mark>::begins(int64_t node, const Mark& at) {
  const auto position = static_cast<size_t>(std::max<int64_t>(node, 0));
  if (position >= begins_.size()) begins_.resize(position + 1);
  node_ = begins_[position] ? -1 : node;
  if (repeats()) return;
  begins_[position] = at;
  has_begun_ = true;
}

template <typename Mark>
std::optional<StepTimes> MarkClock<Mark>::measure(size_t node_count) {
  if (!end_ || !is_reached(*end_) || !is_reached(last_) || !has_left_streams()) return std::nullopt;
  const Mark& first = *begins_.front();
  NodeTimes nodes;
  for (size_t node = 0; node < begins_.size(); ++node)
    if (begins_[node]) nodes.emplace_back(static_cast<int64_t>(node), seconds(first, *begins_[node]));
  std::vector<Pause> pauses;
  for (const Hook& hook : pauses_)
    pauses.push_back({hook.node, hook.pack_index, seconds(first, hook.begin), seconds(first, hook.end)});
  return offload::measure(nodes, pauses, seconds(first, *end_), node_count);
}

template class MarkClock<double>;
template class MarkClock<EventRef>;

double HostClock::now() { return read(CLOCK_MONOTONIC); }

void HostClock::begin() {
  MarkClock::begin();
  const bool is_timed = hooks_ < kHooksTimed || hooks_ % kTimedEvery == 0;
  busy_ = is_timed ? read(CLOCK_THREAD_CPUTIME_ID) : -1.0;
}

void HostClock::end(int64_t pack_index) {
  MarkClock::end(pack_index);
  if (busy_ >= 0 && !repeats()) {
    const double share = hooks_ < kHooksTimed ? 1.0 : static_cast<double>(kTimedEvery);
    hook_seconds_ += share * (read(CLOCK_THREAD_CPUTIME_ID) - busy_);
  }
  ++hooks_;
}

}  // namespace offload
