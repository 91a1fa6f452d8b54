// Preloaded into a process: on the engine's lanes, or on one thread that calls it, `operator new` fails a number of
// times from the nth call on.
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

std::atomic<long> asked{0};
std::atomic<long> first{0};  // 0: none fails
std::atomic<long> end{0};

bool is_lane() {
  thread_local const bool named = [] {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    return std::strcmp(name, "offload-lane") == 0;
  }();
  return named;
}

std::atomic<bool> on_lanes{true};
std::atomic<unsigned> late_us{0};  // before a failure: what the caller has begun meanwhile goes on
thread_local bool is_caller = false;

bool must_fail() {
  if (first == 0 || !(on_lanes ? is_lane() : is_caller)) return false;
  const long number = ++asked;
  if (number < first || number >= end) return false;
  if (late_us != 0) usleep(late_us);
  return true;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void fail_late(unsigned microseconds) { late_us = microseconds; }

// Calls on the lanes are counted from now on, or those on this thread; `nth` 0 ends it. Returns how many there were
// since the last time.
__attribute__((visibility("default"))) long fail(bool lanes, long nth, long times) {
  first = 0;
  const long counted = asked.exchange(0);
  on_lanes = lanes;
  is_caller = !lanes;
  end = nth + times;
  first = nth;
  return counted;
}
}

__attribute__((visibility("default"))) void* operator new(std::size_t bytes) {
  void* const data = must_fail() ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

__attribute__((visibility("default"))) void operator delete(void* data) noexcept { std::free(data); }
__attribute__((visibility("default"))) void operator delete(void* data, std::size_t) noexcept { std::free(data); }
