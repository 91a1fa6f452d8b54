#include "controls.h"

#include <algorithm>

#include "machine.h"

using namespace sim;

namespace {

int live_handles() {
  const auto is_engines = [](const auto& each) { return !each.second->is_frameworks; };
  return static_cast<int>(std::count_if(state.streams.begin(), state.streams.end(), is_engines)) +
         static_cast<int>(state.events.size());
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void sim_fail_at(const char* name, int nth, int code) {
  const Lock lock(state.mutex);
  state.faults[name] = Fault{nth, static_cast<Result>(code)};
}

int sim_calls(const char* name) {
  const Lock lock(state.mutex);
  return state.calls[name];
}

void sim_await_calls(const char* name, int more_than, const char* other, int other_more_than) {
  Lock lock(state.mutex);
  state.changed.wait(lock, [&] { return state.calls[name] > more_than || state.calls[other] > other_more_than; });
}

int sim_violations() {
  Lock lock(state.mutex, std::defer_lock);
  if (!in_forked_child()) lock.lock();
  return static_cast<int>(state.violations.size());
}

const char* sim_first_violation() { return state.violations.empty() ? "" : state.violations.front().c_str(); }

void sim_forget_violations() {
  const Lock lock(state.mutex);
  state.violations.clear();
}

void sim_hold_streams(int held) {
  const Lock lock(state.mutex);
  state.held = held != 0;
  for (const auto& [handle, stream] : state.streams) stream->wake.notify_one();
  for (const auto& [context, stream] : state.legacy_streams) stream->wake.notify_one();
}

void sim_set_capturing(StreamHandle stream, int capturing) {
  const Lock lock(state.mutex);
  stream->capturing = capturing != 0;
}

void sim_caller_is_legacy(int is_so) {
  const Lock lock(state.mutex);
  state.caller_is_legacy = is_so != 0;
}

void sim_forget_faults() {
  const Lock lock(state.mutex);
  state.faults.clear();
}

void sim_set_devices(int count) {
  const Lock lock(state.mutex);
  state.devices = count;
}

ContextHandle sim_current_context() { return current_context(); }

int sim_retained_contexts() {
  const Lock lock(state.mutex);
  return state.contexts[0].retained + state.contexts[1].retained;
}

int sim_registrations() {
  const Lock lock(state.mutex);
  return static_cast<int>(state.registrations.size());
}

int sim_live_handles() {
  const Lock lock(state.mutex);
  return live_handles();
}

void sim_await_live_handles(int most) {
  Lock lock(state.mutex);
  state.changed.wait(lock, [&] { return live_handles() <= most; });
}

void sim_schedule(unsigned seed, unsigned delay_us_max) {
  const Lock lock(state.mutex);
  state.seed = seed;
  state.delay_us_max = delay_us_max;
  for (const auto& [handle, stream] : state.streams) draw(*stream);
  for (const auto& [context, stream] : state.legacy_streams) draw(*stream);
}

void sim_watch_order(int watches) {
  const Lock lock(state.mutex);
  state.order.watch(watches != 0);
}

int sim_violation(int number, char* text, size_t text_bytes) {
  const Lock lock(state.mutex);
  const auto at = static_cast<size_t>(number);
  if (at >= state.violations.size()) return 0;
  const size_t copied = state.violations[at].copy(text, text_bytes - 1);
  text[copied] = 0;
  return 1;
}

void sim_limit_memory(int device, size_t bytes_max) {
  const Lock lock(state.mutex);
  state.device_bytes_max[device] = bytes_max;
}

void sim_limit_pinned(size_t bytes_max) {
  const Lock lock(state.mutex);
  state.pinned_bytes_max = bytes_max;
}

size_t sim_pinned_bytes() {
  const Lock lock(state.mutex);
  return state.pinned_bytes;
}

void sim_forget_failure() {
  const Lock lock(state.mutex);
  state.failure.clear();
}
}
#pragma GCC visibility pop
