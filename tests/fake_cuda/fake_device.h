// The machine behind the test double: contexts, streams that are threads, events, registrations, injected faults.
// Included by fake_cuda.cpp alone, and hidden in the library, so that two copies of it share nothing.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_api.h"

namespace offload::cuda {

using Lock = std::unique_lock<std::mutex>;
using Operation = std::function<void(Lock&)>;

struct ContextTag {
  int retained = 0;
};

struct StreamTag {
  ContextHandle context = nullptr;
  std::deque<Operation> queue;
  bool busy = false;
  bool destroyed = false;
  bool capturing = false;
};

// Who waits for a record holds it: recording the event again changes nothing for them.
struct Record {
  bool completed = false;
  std::chrono::steady_clock::time_point completed_at;
};

struct EventTag {
  ContextHandle context = nullptr;
  std::shared_ptr<Record> last;  // null: never recorded
};

}  // namespace offload::cuda

namespace fake {

using namespace offload::cuda;

constexpr Result kInvalidValue = static_cast<Result>(1);
constexpr Result kInvalidContext = static_cast<Result>(201);
constexpr Result kInvalidHandle = static_cast<Result>(400);
constexpr Result kNotRegistered = static_cast<Result>(713);
constexpr size_t kPageBytes = 4096;
constexpr size_t kChunkBytes = size_t{1} << 30;

struct Registration {
  size_t bytes = 0;
  int copies_pending = 0;
};

struct Fault {
  int calls_left = 0;
  Result code = kSuccess;
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  pid_t initialized_by = 0;
  int devices = 2;
  bool held = false;
  bool caller_is_legacy = false;
  ContextTag contexts[2];
  std::map<std::string, int> calls;
  std::map<std::string, Fault> faults;
  std::vector<std::string> violations;
  std::map<StreamHandle, std::shared_ptr<StreamTag>> streams;
  std::map<ContextHandle, std::shared_ptr<StreamTag>> legacy_streams;
  std::map<EventHandle, std::shared_ptr<EventTag>> events;
  std::map<uintptr_t, Registration> registrations;
};

// Never destroyed, as stream threads outlive main.
inline State& state = *new State;

// Needs no destructor: what a thread destroys as it ends may still call the driver.
struct ContextStack {
  ContextHandle handles[16];
  size_t depth;
};
inline thread_local ContextStack stack;

struct ThreadEnd {
  ~ThreadEnd() {
    if (stack.depth == 0) return;
    const Lock lock(state.mutex);
    state.violations.emplace_back("a thread ended with a context left on its stack");
  }
};

inline ContextHandle current_context() { return stack.depth == 0 ? nullptr : stack.handles[stack.depth - 1]; }

inline bool in_forked_child() { return state.initialized_by != 0 && state.initialized_by != getpid(); }

// What every entry point begins with: counts the call, injects the fault, checks process and context.
class Call {
 public:
  enum Needs { kNothing, kInit, kContext };

  explicit Call(const char* call_name, Needs needs = kContext) : name(call_name), lock(state.mutex, std::defer_lock) {
    const bool forked = in_forked_child();
    if (!forked) lock.lock();  // in a child another thread's hold would never end
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
    }
  }

  Result violate(const std::string& what, Result result) {
    state.violations.push_back(std::string(name) + " " + what);
    return result;
  }

  const char* const name;
  Lock lock;
  Result refused = kSuccess;
};

inline void run_stream(std::shared_ptr<StreamTag> stream) {
  Lock lock(state.mutex);
  while (true) {
    state.changed.wait(
        lock, [&] { return (!stream->queue.empty() && !state.held) || (stream->queue.empty() && stream->destroyed); });
    if (stream->queue.empty()) return;
    const Operation operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->busy = true;
    operation(lock);
    stream->busy = false;
    state.changed.notify_all();
  }
}

inline std::shared_ptr<StreamTag> start_stream() {
  auto stream = std::make_shared<StreamTag>();
  stream->context = current_context();
  std::thread(run_stream, stream).detach();
  return stream;
}

// The live stream behind a handle, or null after a violation.
inline std::shared_ptr<StreamTag> find_stream(Call& call, StreamHandle handle) {
  if (handle == reinterpret_cast<StreamHandle>(uintptr_t{kStreamLegacy})) {
    auto& stream = state.legacy_streams[current_context()];
    if (stream == nullptr) stream = start_stream();
    return stream;
  }
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

inline std::shared_ptr<EventTag> find_event(Call& call, EventHandle handle) {
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

// On a machine without a GPU the framework computes on the calling thread: the legacy stream then waits there, at once.
inline bool is_caller(StreamHandle handle) {
  return state.caller_is_legacy && handle == reinterpret_cast<StreamHandle>(uintptr_t{kStreamLegacy});
}

// The registration that contains the whole range, or null.
inline Registration* find_registration(const void* host, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(host);
  const auto next = state.registrations.upper_bound(address);
  if (next == state.registrations.begin()) return nullptr;
  auto& [base, registration] = *std::prev(next);
  return address + bytes <= base + registration.bytes ? &registration : nullptr;
}

inline Result queue_copy(Call& call, void* target, const void* source, const void* host, size_t bytes,
                         StreamHandle handle) {
  const auto stream = find_stream(call, handle);
  if (stream == nullptr) return kInvalidHandle;
  if (find_registration(host, bytes) == nullptr) {
    return call.violate("with host memory that is not inside one registration", kInvalidValue);
  }
  ++find_registration(host, bytes)->copies_pending;
  stream->queue.emplace_back([=](Lock& lock) {
    lock.unlock();
    std::memcpy(target, source, bytes);
    lock.lock();
    if (auto* registration = find_registration(host, bytes)) --registration->copies_pending;
  });
  state.changed.notify_all();
  return kSuccess;
}

}  // namespace fake
