#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "machine.h"

namespace sim {

namespace {

void run_stream(const std::shared_ptr<StreamTag>& stream) {
  Lock lock(state.mutex);
  while (true) {
    stream->wake.wait(
        lock, [&] { return (!stream->queue.empty() && !state.held) || (stream->queue.empty() && stream->destroyed); });
    if (stream->queue.empty()) return;
    const Operation operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->busy = true;
    if (state.delay_us_max > 0 && stream->random() / 7 % 16 < stream->late_of_16) {
      const auto delay = std::chrono::microseconds(stream->random() % state.delay_us_max);
      lock.unlock();
      std::this_thread::sleep_for(delay);
      lock.lock();
    }
    operation(lock);
    stream->busy = false;
    state.changed.notify_all();
  }
}

// On a machine without a GPU the framework computes on the calling thread: the legacy stream then waits there, at once.
bool is_caller(const StreamTag& stream) {
  return state.caller_is_legacy && state.legacy_streams[stream.context].get() == &stream;
}

void complete(Record& record) {
  record.completed = true;
  record.completed_at = std::chrono::steady_clock::now();
}

// What follows on `stream` comes after all that the host knows to have happened.
void learn_from_host(StreamTag& stream) {
  if (stream.host_learnt == state.host_learnt) return;
  stream.actor.knows.learn(state.host.knows);
  stream.host_learnt = state.host_learnt;
}

}  // namespace

Call::Call(const char* call_name, Needs needs) : name(call_name), lock(state.mutex, std::defer_lock) {
  const bool forked = in_forked_child();
  if (!forked) {  // in a child another thread's hold would never end
    lock.lock();
    state.clock.count_host(lock, false);
  }
  ++state.calls[name];
  if (forked) {
    refused = needs == kNothing ? kNotInitialized : violate("in a forked child", kNotInitialized);
    return;
  }
  const auto fault = state.faults.find(name);
  if (fault != state.faults.end() && --fault->second.calls_left == 0) {
    refused = fault->second.code;
    state.faults.erase(fault);
  } else if (needs != kNothing && state.initialized_by == 0) {
    refused = violate("before cuInit", kNotInitialized);
  } else if (needs == kContext && current_context() == nullptr) {
    refused = violate("without a current context", kInvalidContext);
  } else if (needs == kContext && !state.failure.empty()) {
    refused = kLaunchFailed;
  }
}

Result Call::violate(const std::string& what, Result result) {
  state.violations.push_back(std::string(name) + " " + what);
  return result;
}

void draw(StreamTag& stream) {
  stream.random.seed(state.seed * 1000 + static_cast<unsigned>(stream.actor.number));
  constexpr unsigned kChoices[] = {0, 1, 2, 8, 16};
  stream.late_of_16 = kChoices[stream.random() / 7 % std::size(kChoices)];
}

std::shared_ptr<StreamTag> start_stream(ContextHandle context) {
  auto stream = std::make_shared<StreamTag>();
  stream->context = context;
  stream->actor.number = ++state.streams_started;
  stream->actor.name = strdup(("stream " + std::to_string(state.streams_started)).c_str());
  draw(*stream);
  std::thread(run_stream, stream).detach();
  return stream;
}

std::shared_ptr<StreamTag> legacy_stream(ContextHandle context) {
  auto& stream = state.legacy_streams[context];
  if (stream == nullptr) stream = start_stream(context);
  return stream;
}

std::shared_ptr<StreamTag> find_stream(Call& call, StreamHandle handle) {
  if (handle == reinterpret_cast<StreamHandle>(uintptr_t{kStreamLegacy})) return legacy_stream(current_context());
  const auto found = state.streams.find(handle);
  if (found == state.streams.end()) {
    call.violate(handle == nullptr ? "with stream 0" : "with a stream that does not exist", kInvalidHandle);
    return nullptr;
  }
  if (found->second->context != current_context()) {
    call.violate("with another context's stream", kInvalidHandle);
    return nullptr;
  }
  return found->second;
}

std::shared_ptr<EventTag> find_event(Call& call, EventHandle handle) {
  const auto found = state.events.find(handle);
  if (found == state.events.end()) {
    call.violate("with an event that does not exist", kInvalidHandle);
    return nullptr;
  }
  if (found->second->context != current_context()) {
    call.violate("with another context's event", kInvalidHandle);
    return nullptr;
  }
  return found->second;
}

void enqueue(StreamTag& stream, Operation operation) {
  stream.queue.push_back(std::move(operation));
  stream.wake.notify_one();
}

void spend(StreamTag& stream, UnitKind unit, double seconds, Lock& lock) {
  if (!state.clock.is_on()) return;
  const auto device = static_cast<int>(stream.context - state.contexts);
  stream.ready = state.clock.queue(device, unit, stream.ready, seconds, lock);
}

void spend_copy(StreamTag& stream, UnitKind unit, size_t bytes, bool is_first, Lock& lock) {
  const Figures& figures = state.clock.figures();
  const double rate = unit == kCopiesOut ? figures.out_bytes_per_second : figures.in_bytes_per_second;
  spend(stream, unit, (is_first ? figures.copy_seconds : 0) + static_cast<double>(bytes) / rate, lock);
}

void touch(StreamTag& stream, const void* address, size_t bytes, bool is_write, const char* what) {
  if (!state.order.watches()) return;
  learn_from_host(stream);
  state.order.access(stream.actor, address, bytes, is_write, what, state.violations);
}

void record(EventTag& event, StreamTag& stream) {
  const auto record = event.last = std::make_shared<Record>();
  learn_from_host(stream);
  record->knows = stream.actor.knows;
  record->at = stream.ready = std::max(stream.ready, state.clock.now());
  if (is_caller(stream)) {
    complete(*record);
    state.changed.notify_all();
  } else {
    enqueue(stream, [record](Lock&) { complete(*record); });
  }
}

void wait_for(EventTag& event, StreamTag& stream, Lock& lock) {
  const auto record = event.last;
  if (record == nullptr) return;
  if (is_caller(stream)) return synchronize(event, lock);
  stream.actor.knows.learn(record->knows);
  stream.ready = std::max(stream.ready, record->at);
  enqueue(stream, [record](Lock& held) { state.changed.wait(held, [&] { return record->completed; }); });
}

void host_learns(const Knowledge& knows) {
  state.host.knows.learn(knows);
  ++state.host_learnt;
}

bool is_done(const EventTag& event, Lock& lock) {
  const auto record = event.last;
  if (record == nullptr) return true;
  if (state.clock.is_on()) {
    if (record->at > state.clock.now()) return false;
    state.changed.wait(lock, [&] { return record->completed; });
  }
  if (record->completed) host_learns(record->knows);
  return record->completed;
}

bool is_done(StreamTag& stream, Lock& lock) {
  if (state.clock.is_on()) {
    if (stream.ready > state.clock.now()) return false;
    state.changed.wait(lock, [&] { return stream.is_idle(); });
  }
  if (stream.is_idle()) host_learns(stream.actor.knows);
  return stream.is_idle();
}

void synchronize(EventTag& event, Lock& lock) {
  const auto record = event.last;
  if (record == nullptr) return;
  state.changed.wait(lock, [&] { return record->completed; });
  state.clock.sleep_until(record->at, lock);
  host_learns(record->knows);
}

void synchronize(StreamTag& stream, Lock& lock) {
  // Not until it is idle: others may go on queueing.
  EventTag now;
  record(now, stream);
  synchronize(now, lock);
}

double elapsed_ms(const EventTag& from, const EventTag& to) {
  if (state.clock.is_on()) return 1e3 * (to.last->at - from.last->at);
  return std::chrono::duration<double, std::milli>(to.last->completed_at - from.last->completed_at).count();
}

Registration* find_registration(const void* host, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(host);
  const auto next = state.registrations.upper_bound(address);
  if (next == state.registrations.begin()) return nullptr;
  auto& [base, registration] = *std::prev(next);
  return address + bytes <= base + registration.bytes ? &registration : nullptr;
}

}  // namespace sim
