// What tests do to the machine: faults to inject, limits, delays; and what it saw.
#pragma once

#include "cuda_api.h"
#include "runtime.h"

#pragma GCC visibility push(default)
extern "C" {

// The nth call from now on (1 is the next) of the entry point `name` fails with `code` and has no effect.
void sim_fail_at(const char* name, int nth, int code);
// How often `name` was called, injected failures included.
int sim_calls(const char* name);
// Returns once one of two has been called more often than that.
void sim_await_calls(const char* name, int more_than, const char* other, int other_more_than);

// Number of times the caller broke a rule, and what it did the first time ("" if never).
int sim_violations();
const char* sim_first_violation();
void sim_forget_violations();

// While held, no stream starts its next operation: what is queued stays queued.
void sim_hold_streams(int held);
// From now on `stream` counts as being captured into a graph, or no longer does.
void sim_set_capturing(offload::cuda::StreamHandle stream, int capturing);
// From now on the calling thread is the legacy stream, as it is the framework's where the device is RAM.
void sim_caller_is_legacy(int is_so);
void sim_forget_faults();
// Number of devices that cuDeviceGetCount reports (0 to 2; 2 at first).
void sim_set_devices(int count);

// The calling thread's current context; contexts retained, ranges registered, streams and events alive.
offload::cuda::ContextHandle sim_current_context();
int sim_retained_contexts();
int sim_registrations();
int sim_live_handles();
// Returns once no more than so many streams and events are alive.
void sim_await_live_handles(int most);

// How long work on streams begins late, by so much at most; every stream has its own luck, drawn from the seed.
void sim_schedule(unsigned seed, unsigned delay_us_max);
// Forgets every access to memory; from now on each that no event orders with another's is a violation, or not.
void sim_watch_order(int watches);
// Copies the violation of that number (0 is the first) to `text`; 0 where there are fewer.
int sim_violation(int number, char* text, size_t text_bytes);

// From now on the machine tells virtual time: see clock.h. It goes on from where it stopped.
void sim_clock_start(const sim::Figures* figures);
void sim_clock_stop();
// The host's time, in seconds; and the calling thread sleeps for so many.
double sim_clock_now();
void sim_clock_sleep(double seconds);
// With `count_max` 0: takes what units have done, or will have, since it was taken last, and tells its count. Then fills
// the columns.
size_t sim_clock_work(double* begins, double* ends, int* units, size_t count_max);

// What devices have, and how much host memory can be pinned, whoever does it.
void sim_limit_memory(int device, size_t bytes_max);
void sim_limit_pinned(size_t bytes_max);
size_t sim_pinned_bytes();
// Work that failed on a stream fails every call that follows, until now.
void sim_forget_failure();
}
#pragma GCC visibility pop
