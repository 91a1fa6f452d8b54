// What the test double of libcuda exports beside CUDA's own names: faults to inject, and what it saw.
#pragma once

#include "cuda_api.h"

#pragma GCC visibility push(default)
extern "C" {

// The nth call from now on (1 is the next) of the entry point `name` fails with `code` and has no effect.
void fake_fail_at(const char* name, int nth, int code);
// How often `name` was called, injected failures included.
int fake_calls(const char* name);

// Number of times the caller broke a rule, and what it did the first time ("" if never).
int fake_violations();
const char* fake_first_violation();
void fake_forget_violations();

// While held, no stream starts its next operation: what is queued stays queued.
void fake_hold_streams(int held);
// From now on `stream` counts as being captured into a graph, or no longer does.
void fake_set_capturing(offload::cuda::StreamHandle stream, int capturing);
// Number of devices that cuDeviceGetCount reports (0 to 2; 2 at first).
void fake_set_devices(int count);

// The calling thread's current context; contexts retained, ranges registered, streams and events alive.
offload::cuda::ContextHandle fake_current_context();
int fake_retained_contexts();
int fake_registrations();
int fake_live_handles();
}
#pragma GCC visibility pop
