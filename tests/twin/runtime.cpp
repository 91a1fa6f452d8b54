#include "runtime.h"

#include <algorithm>
#include <cstdlib>

#include "machine.h"

using namespace sim;

namespace {

StreamTag& known(StreamHandle handle) {
  if (state.streams.count(handle) == 0 && legacy_stream(handle->context).get() != handle) abort();
  return *handle;
}

bool belongs_to(const StreamTag& stream, int device) { return stream.context == &state.contexts[device]; }

}  // namespace

char* sim_memory(int device, size_t* bytes) {
  const Visit visit;
  state.has_own_memory = true;
  *bytes = kDeviceBytes;
  return memory_of(device).window;
}

char* sim_view(int device, const void* address) { return memory_of(device).view_of(address); }

int sim_device_of(const void* address) {
  for (int device = 0; device < kDevices; ++device)
    if (memory_of(device).has(address, 1)) return device;
  return -1;
}

bool sim_reserve(int device, size_t bytes) {
  const Visit visit;
  if (state.device_bytes_used[device] + bytes > state.device_bytes_max[device]) return false;
  state.device_bytes_used[device] += bytes;
  return true;
}

void sim_give_back(int device, void* address, size_t bytes) {
  const Visit visit;
  state.device_bytes_used[device] -= bytes;
  memory_of(device).drop(address, bytes);
}

void sim_memory_info(int device, size_t* free_bytes, size_t* total_bytes) {
  const Visit visit;
  *total_bytes = state.device_bytes_max[device];
  *free_bytes = *total_bytes - std::min(state.device_bytes_used[device], *total_bytes);
}

void* sim_pin(size_t bytes) {
  const Visit visit;
  if (bytes > state.pinned_bytes_max - std::min(state.pinned_bytes, state.pinned_bytes_max)) return nullptr;
  state.pinned_bytes += bytes;
  return std::aligned_alloc(kPageBytes, (bytes + kPageBytes - 1) / kPageBytes * kPageBytes);
}

void sim_unpin(void* address, size_t bytes) {
  const Visit visit;
  state.pinned_bytes -= bytes;
  state.order.forget(address, bytes);
  std::free(address);
}

StreamHandle sim_default_stream(int device) {
  const Visit visit;
  return legacy_stream(&state.contexts[device]).get();
}

StreamHandle sim_stream_create(int device) {
  const Visit visit;
  const auto created = start_stream(&state.contexts[device]);
  created->is_frameworks = true;
  state.streams[created.get()] = created;
  return created.get();
}

void sim_launch(StreamHandle stream, void (*work)(void*), void* argument) {
  const Visit visit;
  enqueue(known(stream), [=](Lock& held) {
    held.unlock();
    work(argument);
    held.lock();
  });
}

void sim_spend(StreamHandle stream, double flops, double bytes) {
  Visit visit;
  const Figures& figures = state.clock.figures();
  const double seconds = std::max(flops / figures.flops_per_second, bytes / figures.bytes_per_second);
  spend(known(stream), kKernels, figures.kernel_seconds + seconds, visit.lock);
}

void sim_spend_seconds(StreamHandle stream, double seconds) {
  Visit visit;
  spend(known(stream), kKernels, seconds, visit.lock);
}

void sim_spend_copy(StreamHandle stream, int outward, size_t bytes) {
  Visit visit;
  spend_copy(known(stream), outward != 0 ? kCopiesOut : kCopiesIn, bytes, true, visit.lock);
}

void sim_touch(StreamHandle stream, const void* address, size_t bytes, int is_write, const char* what) {
  const Visit visit;
  touch(known(stream), address, bytes, is_write != 0, what);
}

void sim_touch_host(const void* address, size_t bytes, int is_write, const char* what) {
  const Visit visit;
  state.order.access(state.host, address, bytes, is_write != 0, what, state.violations);
  ++state.host_learnt;
}

int sim_stream_query(StreamHandle stream) {
  Visit visit;
  return is_done(known(stream), visit.lock) ? 1 : 0;
}

int sim_stream_capturing(StreamHandle stream) {
  const Visit visit;
  return known(stream).capturing ? 1 : 0;
}

void sim_stream_synchronize(StreamHandle stream) {
  Visit visit;
  synchronize(known(stream), visit.lock);
}

void sim_synchronize(int device) {
  Visit visit;
  std::vector<EventTag> events;
  const auto add = [&](StreamTag& stream) {
    if (belongs_to(stream, device)) record(events.emplace_back(), stream);
  };
  for (const auto& [handle, stream] : state.streams) add(*stream);
  for (const auto& [context, stream] : state.legacy_streams) add(*stream);
  for (EventTag& event : events) synchronize(event, visit.lock);
}

EventHandle sim_event_create() { return new EventTag; }

void sim_event_destroy(EventHandle event) {
  const Visit visit;
  delete event;
}

void sim_event_record(EventHandle event, StreamHandle stream) {
  const Visit visit;
  record(*event, known(stream));
}

void sim_event_wait(EventHandle event, StreamHandle stream) {
  Visit visit;
  wait_for(*event, known(stream), visit.lock);
}

int sim_event_query(EventHandle event) {
  Visit visit;
  return is_done(*event, visit.lock) ? 1 : 0;
}

void sim_event_synchronize(EventHandle event) {
  Visit visit;
  synchronize(*event, visit.lock);
}

double sim_event_elapsed_ms(EventHandle from, EventHandle to) {
  const Visit visit;
  if (!from->last || !to->last || !from->last->completed || !to->last->completed) return -1;
  if (state.clock.is_on() && std::max(from->last->at, to->last->at) > state.clock.now()) return -1;
  return elapsed_ms(*from, *to);
}

void sim_fail(const char* what) {
  const Lock lock(state.mutex);
  if (state.failure.empty()) state.failure = what;
}

const char* sim_failure() {
  static thread_local std::string told;
  const Visit visit;
  told = state.failure;
  return told.empty() ? nullptr : told.c_str();
}
