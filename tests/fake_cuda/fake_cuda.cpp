// A test double of libcuda: the entry points that cuda_driver.cpp uses, on plain RAM with one thread per stream.
//
// It is strict where the real library is lenient or undefined, and counts a violation (and returns an error) when the
// caller has no context current, uses a stream or event of another context or a destroyed one, passes stream 0 instead
// of the legacy stream, creates a blocking stream or a spinning event, copies from or to host memory that is not inside
// one registration, registers more than 1 GiB at once, unregisters memory that a copy still uses, ends a thread with a
// context left on it, or calls in from a forked child. Names without their version suffix do not exist here.
#include "fake_cuda.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <memory>

#include "fake_device.h"

using namespace fake;

#define FAKE_ENTRY(...)   \
  Call call(__VA_ARGS__); \
  if (call.refused != kSuccess) return call.refused

#pragma GCC visibility push(default)
extern "C" {

Result cuInit(unsigned flags) {
  FAKE_ENTRY("cuInit", Call::kNothing);
  if (flags != 0) return kInvalidValue;
  if (state.devices == 0) return static_cast<Result>(100);
  state.initialized_by = getpid();
  return kSuccess;
}

Result cuDeviceGetCount(int* count) {
  FAKE_ENTRY("cuDeviceGetCount", Call::kInit);
  *count = state.devices;
  return kSuccess;
}

Result cuDeviceGet(Device* device, int ordinal) {
  FAKE_ENTRY("cuDeviceGet", Call::kInit);
  if (ordinal < 0 || ordinal >= state.devices) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

Result cuDevicePrimaryCtxRetain(ContextHandle* context, Device device) {
  FAKE_ENTRY("cuDevicePrimaryCtxRetain", Call::kInit);
  if (device < 0 || device >= state.devices) return kInvalidDevice;
  *context = &state.contexts[device];
  ++(*context)->retained;
  return kSuccess;
}

Result cuCtxPushCurrent_v2(ContextHandle context) {
  FAKE_ENTRY("cuCtxPushCurrent_v2", Call::kInit);
  if (context == nullptr || context->retained == 0) return call.violate("of a context not retained", kInvalidContext);
  thread_local ThreadEnd checks;
  static_cast<void>(&checks);
  if (stack.depth == std::size(stack.handles)) return call.violate("too deep", kInvalidContext);
  stack.handles[stack.depth++] = context;
  return kSuccess;
}

Result cuCtxPopCurrent_v2(ContextHandle* context) {
  FAKE_ENTRY("cuCtxPopCurrent_v2");
  *context = current_context();
  --stack.depth;
  return kSuccess;
}

Result cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  FAKE_ENTRY("cuMemGetInfo_v2");
  *free_bytes = size_t{6} << 30;
  *total_bytes = size_t{8} << 30;
  return kSuccess;
}

Result cuMemHostRegister_v2(void* host, size_t bytes, unsigned flags) {
  FAKE_ENTRY("cuMemHostRegister_v2");
  const auto address = reinterpret_cast<uintptr_t>(host);
  if (bytes == 0 || address % kPageBytes != 0) return call.violate("with an empty or unaligned range", kInvalidValue);
  if (bytes > kChunkBytes) return call.violate("with more than 1 GiB at once", kInvalidValue);
  if (flags != kRegisterPortable) return call.violate("with other flags than portable", kInvalidValue);
  const auto next = state.registrations.lower_bound(address);
  if (next != state.registrations.end() && next->first < address + bytes) return kAlreadyRegistered;
  if (next != state.registrations.begin()) {
    const auto& [base, registration] = *std::prev(next);
    if (base + registration.bytes > address) return kAlreadyRegistered;
  }
  state.registrations[address].bytes = bytes;
  return kSuccess;
}

Result cuMemHostUnregister(void* host) {
  FAKE_ENTRY("cuMemHostUnregister");
  const auto found = state.registrations.find(reinterpret_cast<uintptr_t>(host));
  if (found == state.registrations.end()) return call.violate("of memory that is not registered", kNotRegistered);
  if (found->second.copies_pending > 0) return call.violate("of memory that a copy still uses", kInvalidValue);
  state.registrations.erase(found);
  return kSuccess;
}

Result cuMemcpyHtoDAsync_v2(DeviceAddress device, const void* host, size_t bytes, StreamHandle stream) {
  FAKE_ENTRY("cuMemcpyHtoDAsync_v2");
  return queue_copy(call, reinterpret_cast<void*>(device), host, host, bytes, stream);
}

Result cuMemcpyDtoHAsync_v2(void* host, DeviceAddress device, size_t bytes, StreamHandle stream) {
  FAKE_ENTRY("cuMemcpyDtoHAsync_v2");
  return queue_copy(call, host, reinterpret_cast<const void*>(device), host, bytes, stream);
}

Result cuMemcpyBatchAsync(DeviceAddress* targets, DeviceAddress* sources, size_t* bytes, size_t count,
                          CopyAttributes* attributes, size_t* first_of_attributes, size_t attributes_count,
                          size_t* failed, StreamHandle stream) {
  FAKE_ENTRY("cuMemcpyBatchAsync");
  if (stream == reinterpret_cast<StreamHandle>(uintptr_t{kStreamLegacy}))
    return call.violate("with the legacy stream", kInvalidHandle);
  if (count == 0 || attributes_count != 1 || *first_of_attributes != 0 ||
      attributes->source_access_order != kSourceInStreamOrder)
    return call.violate("with an empty batch or other attributes", kInvalidValue);
  for (size_t each = 0; each < count; ++each) {
    *failed = each;
    void* const target = reinterpret_cast<void*>(targets[each]);
    const void* const source = reinterpret_cast<const void*>(sources[each]);
    const bool outward = find_registration(target, bytes[each]) != nullptr;
    const Result result = queue_copy(call, target, source, outward ? target : source, bytes[each], stream);
    if (result != kSuccess) return result;
  }
  return kSuccess;
}

Result cuDeviceGetPCIBusId(char* text, int text_bytes, Device device) {
  FAKE_ENTRY("cuDeviceGetPCIBusId", Call::kInit);
  constexpr char kBusId[] = "0000:C1:00.0";
  if (device < 0 || device >= state.devices || text_bytes < static_cast<int>(sizeof kBusId)) return kInvalidValue;
  std::copy(std::begin(kBusId), std::end(kBusId), text);
  return kSuccess;
}

Result cuStreamCreate(StreamHandle* stream, unsigned flags) {
  FAKE_ENTRY("cuStreamCreate");
  if (flags != kStreamNonBlocking) return call.violate("of a stream that blocks on the default stream", kInvalidValue);
  const auto created = start_stream();
  state.streams[created.get()] = created;
  *stream = created.get();
  return kSuccess;
}

Result cuStreamDestroy_v2(StreamHandle stream) {
  FAKE_ENTRY("cuStreamDestroy_v2");
  const auto found = find_stream(call, stream);
  if (found == nullptr) return kInvalidHandle;
  if (state.streams.erase(stream) == 0) return call.violate("of the legacy stream", kInvalidHandle);
  found->destroyed = true;
  state.changed.notify_all();
  return kSuccess;
}

Result cuStreamWaitEvent(StreamHandle stream, EventHandle event, unsigned flags) {
  FAKE_ENTRY("cuStreamWaitEvent");
  const auto waiter = find_stream(call, stream);
  const auto awaited = find_event(call, event);
  if (waiter == nullptr || awaited == nullptr || flags != 0) return kInvalidHandle;
  const auto record = awaited->last;
  if (record == nullptr) return kSuccess;
  if (is_caller(stream)) {
    state.changed.wait(call.lock, [&] { return record->completed; });
    return kSuccess;
  }
  waiter->queue.emplace_back([record](Lock& lock) { state.changed.wait(lock, [&] { return record->completed; }); });
  state.changed.notify_all();
  return kSuccess;
}

Result cuStreamSynchronize(StreamHandle stream) {
  FAKE_ENTRY("cuStreamSynchronize");
  const auto found = find_stream(call, stream);
  if (found == nullptr) return kInvalidHandle;
  state.changed.wait(call.lock, [&] { return found->queue.empty() && !found->busy; });
  return kSuccess;
}

Result cuStreamIsCapturing(StreamHandle stream, CaptureState* capture) {
  FAKE_ENTRY("cuStreamIsCapturing");
  const auto found = find_stream(call, stream);
  if (found == nullptr) return kInvalidHandle;
  *capture = found->capturing ? kCaptureActive : kCaptureNone;
  return kSuccess;
}

Result cuEventCreate(EventHandle* event, unsigned flags) {
  FAKE_ENTRY("cuEventCreate");
  if (flags != kEventBlockingSync) return call.violate("of an event that spins or cannot be timed", kInvalidValue);
  const auto created = std::make_shared<EventTag>();
  created->context = current_context();
  state.events[created.get()] = created;
  *event = created.get();
  return kSuccess;
}

Result cuEventDestroy_v2(EventHandle event) {
  FAKE_ENTRY("cuEventDestroy_v2");
  if (find_event(call, event) == nullptr) return kInvalidHandle;
  state.events.erase(event);
  return kSuccess;
}

Result cuEventRecord(EventHandle event, StreamHandle stream) {
  FAKE_ENTRY("cuEventRecord");
  const auto recorded = find_event(call, event);
  const auto recorder = find_stream(call, stream);
  if (recorded == nullptr || recorder == nullptr) return kInvalidHandle;
  const auto record = recorded->last = std::make_shared<Record>();
  const auto complete = [record](Lock&) {
    record->completed = true;
    record->completed_at = std::chrono::steady_clock::now();
  };
  if (is_caller(stream)) {
    complete(call.lock);
  } else {
    recorder->queue.emplace_back(complete);
  }
  state.changed.notify_all();
  return kSuccess;
}

Result cuEventQuery(EventHandle event) {
  FAKE_ENTRY("cuEventQuery");
  const auto found = find_event(call, event);
  if (found == nullptr) return kInvalidHandle;
  return found->last == nullptr || found->last->completed ? kSuccess : kNotReady;
}

Result cuEventSynchronize(EventHandle event) {
  FAKE_ENTRY("cuEventSynchronize");
  const auto found = find_event(call, event);
  if (found == nullptr) return kInvalidHandle;
  if (const auto record = found->last) state.changed.wait(call.lock, [&] { return record->completed; });
  return kSuccess;
}

Result cuEventElapsedTime(float* milliseconds, EventHandle from, EventHandle to) {
  FAKE_ENTRY("cuEventElapsedTime");
  const auto begin = find_event(call, from);
  const auto end = find_event(call, to);
  if (begin == nullptr || end == nullptr) return kInvalidHandle;
  if (begin->last == nullptr || end->last == nullptr) return call.violate("of an event never recorded", kInvalidHandle);
  if (!begin->last->completed || !end->last->completed) return kNotReady;
  const auto between = end->last->completed_at - begin->last->completed_at;
  *milliseconds = std::chrono::duration<float, std::milli>(between).count();
  return kSuccess;
}

Result cuGetErrorName(Result result, const char** text) {
  if (result != static_cast<Result>(2)) return kInvalidValue;
  *text = "CUDA_ERROR_OUT_OF_MEMORY";
  return kSuccess;
}

Result cuGetErrorString(Result result, const char** text) {
  if (result != static_cast<Result>(2)) return kInvalidValue;
  *text = "out of memory";
  return kSuccess;
}

void fake_fail_at(const char* name, int nth, int code) {
  const Lock lock(state.mutex);
  state.faults[name] = Fault{nth, static_cast<Result>(code)};
}

int fake_calls(const char* name) {
  const Lock lock(state.mutex);
  return state.calls[name];
}

int fake_violations() {
  Lock lock(state.mutex, std::defer_lock);
  if (!in_forked_child()) lock.lock();
  return static_cast<int>(state.violations.size());
}

const char* fake_first_violation() { return state.violations.empty() ? "" : state.violations.front().c_str(); }

void fake_forget_violations() {
  const Lock lock(state.mutex);
  state.violations.clear();
}

void fake_hold_streams(int held) {
  const Lock lock(state.mutex);
  state.held = held != 0;
  state.changed.notify_all();
}

void fake_set_capturing(StreamHandle stream, int capturing) {
  const Lock lock(state.mutex);
  stream->capturing = capturing != 0;
}

void fake_caller_is_legacy(int is_so) {
  const Lock lock(state.mutex);
  state.caller_is_legacy = is_so != 0;
}

void fake_forget_faults() {
  const Lock lock(state.mutex);
  state.faults.clear();
}

void fake_set_devices(int count) {
  const Lock lock(state.mutex);
  state.devices = count;
}

ContextHandle fake_current_context() { return current_context(); }

int fake_retained_contexts() {
  const Lock lock(state.mutex);
  return state.contexts[0].retained + state.contexts[1].retained;
}

int fake_registrations() {
  const Lock lock(state.mutex);
  return static_cast<int>(state.registrations.size());
}

int fake_live_handles() {
  const Lock lock(state.mutex);
  return static_cast<int>(state.streams.size() + state.events.size());
}
}
#pragma GCC visibility pop
