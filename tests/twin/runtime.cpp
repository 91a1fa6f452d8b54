#include "runtime.h"

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
  const Lock lock(state.mutex);
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
  const Lock lock(state.mutex);
  if (state.device_bytes_used[device] + bytes > state.device_bytes_max[device]) return false;
  state.device_bytes_used[device] += bytes;
  return true;
}

void sim_give_back(int device, void* address, size_t bytes) {
  const Lock lock(state.mutex);
  state.device_bytes_used[device] -= bytes;
  memory_of(device).drop(address, bytes);
}

void sim_memory_info(int device, size_t* free_bytes, size_t* total_bytes) {
  const Lock lock(state.mutex);
  *total_bytes = state.device_bytes_max[device];
  *free_bytes = *total_bytes - std::min(state.device_bytes_used[device], *total_bytes);
}

void* sim_pin(size_t bytes) {
  const Lock lock(state.mutex);
  if (bytes > state.pinned_bytes_max - std::min(state.pinned_bytes, state.pinned_bytes_max)) return nullptr;
  state.pinned_bytes += bytes;
  return std::aligned_alloc(kPageBytes, (bytes + kPageBytes - 1) / kPageBytes * kPageBytes);
}

void sim_unpin(void* address, size_t bytes) {
  const Lock lock(state.mutex);
  state.pinned_bytes -= bytes;
  state.order.forget(address, bytes);
  std::free(address);
}

StreamHandle sim_default_stream(int device) {
  const Lock lock(state.mutex);
  return legacy_stream(&state.contexts[device]).get();
}

StreamHandle sim_stream_create(int device) {
  const Lock lock(state.mutex);
  const auto created = start_stream(&state.contexts[device]);
  created->is_frameworks = true;
  state.streams[created.get()] = created;
  return created.get();
}

void sim_launch(StreamHandle stream, void (*work)(void*), void* argument) {
  const Lock lock(state.mutex);
  enqueue(known(stream), [=](Lock& held) {
    held.unlock();
    work(argument);
    held.lock();
  });
}

void sim_touch(StreamHandle stream, const void* address, size_t bytes, int is_write, const char* what) {
  const Lock lock(state.mutex);
  touch(known(stream), address, bytes, is_write != 0, what);
}

void sim_touch_host(const void* address, size_t bytes, int is_write, const char* what) {
  const Lock lock(state.mutex);
  state.order.access(state.host, address, bytes, is_write != 0, what, state.violations);
  ++state.host_learnt;
}

int sim_stream_query(StreamHandle stream) {
  const Lock lock(state.mutex);
  if (!known(stream).is_idle()) return 0;
  host_learns(stream->actor.knows);
  return 1;
}

int sim_stream_capturing(StreamHandle stream) {
  const Lock lock(state.mutex);
  return known(stream).capturing ? 1 : 0;
}

void sim_stream_synchronize(StreamHandle stream) {
  Lock lock(state.mutex);
  synchronize(known(stream), lock);
}

void sim_synchronize(int device) {
  Lock lock(state.mutex);
  std::vector<EventTag> events;
  const auto add = [&](StreamTag& stream) {
    if (belongs_to(stream, device)) record(events.emplace_back(), stream);
  };
  for (const auto& [handle, stream] : state.streams) add(*stream);
  for (const auto& [context, stream] : state.legacy_streams) add(*stream);
  for (EventTag& event : events) synchronize(event, lock);
}

EventHandle sim_event_create() { return new EventTag; }

void sim_event_destroy(EventHandle event) {
  const Lock lock(state.mutex);
  delete event;
}

void sim_event_record(EventHandle event, StreamHandle stream) {
  const Lock lock(state.mutex);
  record(*event, known(stream));
}

void sim_event_wait(EventHandle event, StreamHandle stream) {
  Lock lock(state.mutex);
  wait_for(*event, known(stream), lock);
}

int sim_event_query(EventHandle event) {
  const Lock lock(state.mutex);
  return is_done(*event) ? 1 : 0;
}

void sim_event_synchronize(EventHandle event) {
  Lock lock(state.mutex);
  synchronize(*event, lock);
}

double sim_event_elapsed_ms(EventHandle from, EventHandle to) {
  const Lock lock(state.mutex);
  if (!from->last || !to->last || !from->last->completed || !to->last->completed) return -1;
  return elapsed_ms(*from, *to);
}

void sim_fail(const char* what) {
  const Lock lock(state.mutex);
  if (state.failure.empty()) state.failure = what;
}

const char* sim_failure() {
  static thread_local std::string told;
  const Lock lock(state.mutex);
  told = state.failure;
  return told.empty() ? nullptr : told.c_str();
}
