// The machine as a framework sees it: what CUDA's runtime is to the driver interface beside it. No context need be
// current here, and a stream's handle is never null.
#pragma once

#include <cstddef>

#include "cuda_api.h"

namespace sim {
constexpr int kDevices = 2;

// What of a device does one thing at a time.
enum UnitKind : int { kKernels, kCopiesOut, kCopiesIn, kUnits };

// What a device does in a second, what each kernel and each copy takes besides, and the host to queue one; how much of
// the host's own time counts.
struct Figures {
  double flops_per_second, bytes_per_second, kernel_seconds;
  double out_bytes_per_second, in_bytes_per_second, copy_seconds;
  double launch_seconds, host_factor;
};
}  // namespace sim

#pragma GCC visibility push(default)
extern "C" {

// Device memory, all of it: who asks for it sees to who has which part. Addresses that no CPU can touch, and the same
// bytes for work on streams. From now on nothing else counts as a device's memory.
char* sim_memory(int device, size_t* bytes);
char* sim_view(int device, const void* address);
int sim_device_of(const void* address);  // -1: none
// A part is taken into use or given back; false where the device has less.
bool sim_reserve(int device, size_t bytes);
void sim_give_back(int device, void* address, size_t bytes);
void sim_memory_info(int device, size_t* free_bytes, size_t* total_bytes);
// Host memory to pin, under the limit that registrations have; null where there is no more.
void* sim_pin(size_t bytes);
void sim_unpin(void* address, size_t bytes);

offload::cuda::StreamHandle sim_default_stream(int device);
offload::cuda::StreamHandle sim_stream_create(int device);
void sim_launch(offload::cuda::StreamHandle stream, void (*work)(void*), void* argument);
// By the machine's clock, the next work on `stream` is a kernel or a copy over the link, and this is what it has to do.
void sim_spend(offload::cuda::StreamHandle stream, double flops, double bytes);
void sim_spend_seconds(offload::cuda::StreamHandle stream, double seconds);
void sim_spend_copy(offload::cuda::StreamHandle stream, int outward, size_t bytes);
int sim_clock_is_on();
// What the calling thread takes of the processor between these is not the host's time: it stands for a device's library.
void sim_host_enter();
void sim_host_leave();
// What the next work on `stream` will read or write; `what` stays valid. Checked against all that came before.
void sim_touch(offload::cuda::StreamHandle stream, const void* address, size_t bytes, int is_write, const char* what);
// The host, or a file behind it, reads or writes these bytes now: what streams did to them must be known to have ended.
void sim_touch_host(const void* address, size_t bytes, int is_write, const char* what);
int sim_stream_query(offload::cuda::StreamHandle stream);
int sim_stream_capturing(offload::cuda::StreamHandle stream);
void sim_stream_synchronize(offload::cuda::StreamHandle stream);
void sim_synchronize(int device);

offload::cuda::EventHandle sim_event_create();
void sim_event_destroy(offload::cuda::EventHandle event);
void sim_event_record(offload::cuda::EventHandle event, offload::cuda::StreamHandle stream);
void sim_event_wait(offload::cuda::EventHandle event, offload::cuda::StreamHandle stream);
int sim_event_query(offload::cuda::EventHandle event);
void sim_event_synchronize(offload::cuda::EventHandle event);
double sim_event_elapsed_ms(offload::cuda::EventHandle from, offload::cuda::EventHandle to);  // -1: not yet

// Work on a stream has failed: the first is told at every synchronization that follows, and fails the driver's calls.
void sim_fail(const char* what);
const char* sim_failure();  // null: none
}
#pragma GCC visibility pop
