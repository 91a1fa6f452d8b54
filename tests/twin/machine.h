// The machine: contexts, streams that are threads, events, registrations, injected faults, and who touches what when.
//
// cuda.cpp gives it the driver's interface, runtime.cpp what a framework calls, controls.cpp what tests do to it. All of
// it is hidden in the library, so that two copies share nothing. One lock guards everything; work runs without it.
#pragma once

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "clock.h"
#include "cuda_api.h"
#include "memory.h"
#include "order.h"

namespace offload::cuda {

using Lock = std::unique_lock<std::mutex>;
using Operation = std::function<void(Lock&)>;

struct ContextTag {
  int retained = 0;
};

struct StreamTag {
  ContextHandle context = nullptr;
  sim::Actor actor;
  uint64_t host_learnt = 0;  // State's, when this stream learnt from it last
  std::deque<Operation> queue;
  std::condition_variable wake;
  bool busy = false;
  bool destroyed = false;
  bool capturing = false;
  bool is_frameworks = false;  // not counted as the engine's
  std::minstd_rand random;
  unsigned late_of_16 = 0;  // how many of 16 pieces of work begin late: drawn with the seed, so that streams differ
  double ready = 0;         // when all that was queued has ended, by the machine's clock
  bool is_idle() const { return queue.empty() && !busy; }
};

// Who waits for a record holds it: recording the event again changes nothing for them.
struct Record {
  sim::Knowledge knows;
  double at = 0;  // by the machine's clock
  bool completed = false;
  std::chrono::steady_clock::time_point completed_at;
};

struct EventTag {
  ContextHandle context = nullptr;
  std::shared_ptr<Record> last;  // null: never recorded
};

}  // namespace offload::cuda

namespace sim {

using namespace offload::cuda;

constexpr Result kInvalidValue = static_cast<Result>(1);
constexpr Result kInvalidContext = static_cast<Result>(201);
constexpr Result kInvalidHandle = static_cast<Result>(400);
constexpr Result kNotRegistered = static_cast<Result>(713);
constexpr Result kLaunchFailed = static_cast<Result>(719);
constexpr Result kOutOfMemory = static_cast<Result>(2);
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
  std::condition_variable changed;  // something has ended
  pid_t initialized_by = 0;
  int devices = kDevices;
  bool held = false;
  bool caller_is_legacy = false;
  bool has_own_memory = false;  // else its memory is whatever RAM the caller says
  size_t device_bytes_max[kDevices] = {kDeviceBytes, kDeviceBytes};
  size_t device_bytes_used[kDevices] = {};
  size_t pinned_bytes_max = SIZE_MAX;
  size_t pinned_bytes = 0;
  unsigned seed = 0, streams_started = 0, delay_us_max = 0;
  Actor host;
  uint64_t host_learnt = 1;  // how often `host` has learnt something, for who learns from it
  Order order;
  Clock clock;
  std::string failure;  // of work on a stream: sticky, told at every call that follows
  ContextTag contexts[kDevices];
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
  explicit Call(const char* call_name, Needs needs = kContext);
  Result violate(const std::string& what, Result result);

  const HostTime time{};
  const char* const name;
  Lock lock;
  Result refused = kSuccess;
};

// What a framework's calls begin with.
class Visit {
 public:
  Visit() : lock(state.mutex) { state.clock.count_host(lock, true); }

 private:
  const HostTime time_{};

 public:
  Lock lock;
};

// -- streams.cpp: the caller holds the lock, throughout ----------------------------------------------------------------

std::shared_ptr<StreamTag> start_stream(ContextHandle context);
// Its turns of bad luck begin anew.
void draw(StreamTag& stream);
std::shared_ptr<StreamTag> legacy_stream(ContextHandle context);
// The live stream or event behind a handle, or null after a violation.
std::shared_ptr<StreamTag> find_stream(Call& call, StreamHandle handle);
std::shared_ptr<EventTag> find_event(Call& call, EventHandle handle);

void enqueue(StreamTag& stream, Operation operation);
// What is enqueued next takes so long, by the machine's clock.
void spend(StreamTag& stream, UnitKind unit, double seconds, Lock& lock);
void spend_copy(StreamTag& stream, UnitKind unit, size_t bytes, bool is_first, Lock& lock);
// `stream` will read or write these bytes with what it is given next.
void touch(StreamTag& stream, const void* address, size_t bytes, bool is_write, const char* what);
void record(EventTag& event, StreamTag& stream);
void wait_for(EventTag& event, StreamTag& stream, Lock& lock);
// The host has seen these things happen.
void host_learns(const Knowledge& knows);
// Where it has ended by the machine's clock, waits until it has.
bool is_done(const EventTag& event, Lock& lock);
bool is_done(StreamTag& stream, Lock& lock);
void synchronize(EventTag& event, Lock& lock);
void synchronize(StreamTag& stream, Lock& lock);
double elapsed_ms(const EventTag& from, const EventTag& to);

// The registration that contains the whole range, or null.
Registration* find_registration(const void* host, size_t bytes);

}  // namespace sim
