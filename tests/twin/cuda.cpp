// The machine as libcuda: the entry points that cuda_driver.cpp uses.
//
// It is strict where the real library is lenient or undefined, and counts a violation (and returns an error) when the
// caller has no context current, uses a stream or event of another context or a destroyed one, passes stream 0 instead
// of the legacy stream, creates a blocking stream or a spinning event, copies from or to host memory that is not inside
// one registration, registers more than 1 GiB at once, unregisters memory that a copy still uses, ends a thread with a
// context left on it, calls in from a forked child, or, once a framework has taken the machine's own memory into use,
// copies from or to a device address that is not in it. Names without their version suffix do not exist here.
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>

#include "machine.h"

using namespace sim;

namespace {

Result queue_copy(Call& call, void* target, const void* source, const void* host, size_t bytes, StreamHandle handle,
                  bool is_first = true) {
  const auto stream = find_stream(call, handle);
  if (stream == nullptr) return kInvalidHandle;
  if (find_registration(host, bytes) == nullptr) {
    return call.violate("with host memory that is not inside one registration", kInvalidValue);
  }
  const bool outward = target == host;
  const char* const what = outward ? "copy-out" : "copy-in";
  touch(*stream, source, bytes, false, what);
  touch(*stream, target, bytes, true, what);
  if (state.has_own_memory) {
    const Memory& memory = memory_of(static_cast<int>(stream->context - state.contexts));
    if (!memory.has(outward ? source : target, bytes)) {
      return call.violate("with an address that is not the device's", kInvalidValue);
    }
    if (outward) {
      source = memory.view_of(source);
    } else {
      target = memory.view_of(target);
    }
  }
  spend_copy(*stream, outward ? kCopiesOut : kCopiesIn, bytes, is_first, call.lock);
  ++find_registration(host, bytes)->copies_pending;
  enqueue(*stream, [=](Lock& lock) {
    lock.unlock();
    std::memcpy(target, source, bytes);
    lock.lock();
    if (auto* registration = find_registration(host, bytes)) --registration->copies_pending;
  });
  return kSuccess;
}

}  // namespace

#define SIM_ENTRY(...)   \
  Call call(__VA_ARGS__); \
  if (call.refused != kSuccess) return call.refused

#pragma GCC visibility push(default)
extern "C" {

Result cuInit(unsigned flags) {
  SIM_ENTRY("cuInit", Call::kNothing);
  if (flags != 0) return kInvalidValue;
  if (state.devices == 0) return static_cast<Result>(100);
  state.initialized_by = getpid();
  return kSuccess;
}

Result cuDeviceGetCount(int* count) {
  SIM_ENTRY("cuDeviceGetCount", Call::kInit);
  *count = state.devices;
  return kSuccess;
}

Result cuDeviceGet(Device* device, int ordinal) {
  SIM_ENTRY("cuDeviceGet", Call::kInit);
  if (ordinal < 0 || ordinal >= state.devices) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

Result cuDevicePrimaryCtxRetain(ContextHandle* context, Device device) {
  SIM_ENTRY("cuDevicePrimaryCtxRetain", Call::kInit);
  if (device < 0 || device >= state.devices) return kInvalidDevice;
  *context = &state.contexts[device];
  ++(*context)->retained;
  return kSuccess;
}

Result cuCtxPushCurrent_v2(ContextHandle context) {
  SIM_ENTRY("cuCtxPushCurrent_v2", Call::kInit);
  if (context == nullptr || context->retained == 0) return call.violate("of a context not retained", kInvalidContext);
  thread_local ThreadEnd checks;
  static_cast<void>(&checks);
  if (stack.depth == std::size(stack.handles)) return call.violate("too deep", kInvalidContext);
  stack.handles[stack.depth++] = context;
  return kSuccess;
}

Result cuCtxPopCurrent_v2(ContextHandle* context) {
  SIM_ENTRY("cuCtxPopCurrent_v2");
  *context = current_context();
  --stack.depth;
  return kSuccess;
}

Result cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  SIM_ENTRY("cuMemGetInfo_v2");
  const auto device = current_context() - state.contexts;
  *total_bytes = state.device_bytes_max[device];
  *free_bytes = *total_bytes - state.device_bytes_used[device];
  return kSuccess;
}

Result cuMemHostRegister_v2(void* host, size_t bytes, unsigned flags) {
  SIM_ENTRY("cuMemHostRegister_v2");
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
  if (bytes > state.pinned_bytes_max - std::min(state.pinned_bytes, state.pinned_bytes_max)) return kOutOfMemory;
  state.pinned_bytes += bytes;
  state.registrations[address].bytes = bytes;
  return kSuccess;
}

Result cuMemHostUnregister(void* host) {
  SIM_ENTRY("cuMemHostUnregister");
  const auto found = state.registrations.find(reinterpret_cast<uintptr_t>(host));
  if (found == state.registrations.end()) return call.violate("of memory that is not registered", kNotRegistered);
  if (found->second.copies_pending > 0) return call.violate("of memory that a copy still uses", kInvalidValue);
  state.pinned_bytes -= found->second.bytes;
  state.order.forget(host, found->second.bytes);
  state.registrations.erase(found);
  return kSuccess;
}

Result cuMemcpyHtoDAsync_v2(DeviceAddress device, const void* host, size_t bytes, StreamHandle stream) {
  SIM_ENTRY("cuMemcpyHtoDAsync_v2");
  return queue_copy(call, reinterpret_cast<void*>(device), host, host, bytes, stream);
}

Result cuMemcpyDtoHAsync_v2(void* host, DeviceAddress device, size_t bytes, StreamHandle stream) {
  SIM_ENTRY("cuMemcpyDtoHAsync_v2");
  return queue_copy(call, host, reinterpret_cast<const void*>(device), host, bytes, stream);
}

Result cuMemcpyBatchAsync(DeviceAddress* targets, DeviceAddress* sources, size_t* bytes, size_t count,
                          CopyAttributes* attributes, size_t* first_of_attributes, size_t attributes_count,
                          size_t* failed, StreamHandle stream) {
  SIM_ENTRY("cuMemcpyBatchAsync");
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
    const Result result =
        queue_copy(call, target, source, outward ? target : source, bytes[each], stream, each == 0);
    if (result != kSuccess) return result;
  }
  return kSuccess;
}

Result cuDeviceGetPCIBusId(char* text, int text_bytes, Device device) {
  SIM_ENTRY("cuDeviceGetPCIBusId", Call::kInit);
  constexpr char kBusId[] = "0000:C1:00.0";
  if (device < 0 || device >= state.devices || text_bytes < static_cast<int>(sizeof kBusId)) return kInvalidValue;
  std::copy(std::begin(kBusId), std::end(kBusId), text);
  return kSuccess;
}

Result cuStreamCreate(StreamHandle* stream, unsigned flags) {
  SIM_ENTRY("cuStreamCreate");
  if (flags != kStreamNonBlocking) return call.violate("of a stream that blocks on the default stream", kInvalidValue);
  const auto created = start_stream(current_context());
  state.streams[created.get()] = created;
  *stream = created.get();
  return kSuccess;
}

Result cuStreamDestroy_v2(StreamHandle stream) {
  SIM_ENTRY("cuStreamDestroy_v2");
  const auto found = find_stream(call, stream);
  if (found == nullptr) return kInvalidHandle;
  if (state.streams.erase(stream) == 0) return call.violate("of the legacy stream", kInvalidHandle);
  found->destroyed = true;
  found->wake.notify_one();
  state.changed.notify_all();
  return kSuccess;
}

Result cuStreamWaitEvent(StreamHandle stream, EventHandle event, unsigned flags) {
  SIM_ENTRY("cuStreamWaitEvent");
  const auto waiter = find_stream(call, stream);
  const auto awaited = find_event(call, event);
  if (waiter == nullptr || awaited == nullptr || flags != 0) return kInvalidHandle;
  wait_for(*awaited, *waiter, call.lock);
  return kSuccess;
}

Result cuStreamSynchronize(StreamHandle stream) {
  SIM_ENTRY("cuStreamSynchronize");
  const auto found = find_stream(call, stream);
  if (found == nullptr) return kInvalidHandle;
  synchronize(*found, call.lock);
  return state.failure.empty() ? kSuccess : kLaunchFailed;
}

Result cuStreamIsCapturing(StreamHandle stream, CaptureState* capture) {
  SIM_ENTRY("cuStreamIsCapturing");
  const auto found = find_stream(call, stream);
  if (found == nullptr) return kInvalidHandle;
  *capture = found->capturing ? kCaptureActive : kCaptureNone;
  return kSuccess;
}

Result cuEventCreate(EventHandle* event, unsigned flags) {
  SIM_ENTRY("cuEventCreate");
  if (flags != kEventBlockingSync) return call.violate("of an event that spins or cannot be timed", kInvalidValue);
  const auto created = std::make_shared<EventTag>();
  created->context = current_context();
  state.events[created.get()] = created;
  *event = created.get();
  return kSuccess;
}

Result cuEventDestroy_v2(EventHandle event) {
  SIM_ENTRY("cuEventDestroy_v2");
  if (find_event(call, event) == nullptr) return kInvalidHandle;
  state.events.erase(event);
  state.changed.notify_all();
  return kSuccess;
}

Result cuEventRecord(EventHandle event, StreamHandle stream) {
  SIM_ENTRY("cuEventRecord");
  const auto recorded = find_event(call, event);
  const auto recorder = find_stream(call, stream);
  if (recorded == nullptr || recorder == nullptr) return kInvalidHandle;
  record(*recorded, *recorder);
  return kSuccess;
}

Result cuEventQuery(EventHandle event) {
  SIM_ENTRY("cuEventQuery");
  const auto found = find_event(call, event);
  if (found == nullptr) return kInvalidHandle;
  return is_done(*found, call.lock) ? kSuccess : kNotReady;
}

Result cuEventSynchronize(EventHandle event) {
  SIM_ENTRY("cuEventSynchronize");
  const auto found = find_event(call, event);
  if (found == nullptr) return kInvalidHandle;
  state.changed.notify_all();  // whoever waits for this call
  synchronize(*found, call.lock);
  return state.failure.empty() ? kSuccess : kLaunchFailed;
}

Result cuEventElapsedTime(float* milliseconds, EventHandle from, EventHandle to) {
  SIM_ENTRY("cuEventElapsedTime");
  const auto begin = find_event(call, from);
  const auto end = find_event(call, to);
  if (begin == nullptr || end == nullptr) return kInvalidHandle;
  if (begin->last == nullptr || end->last == nullptr) return call.violate("of an event never recorded", kInvalidHandle);
  if (!begin->last->completed || !end->last->completed) return kNotReady;
  if (state.clock.is_on() && std::max(begin->last->at, end->last->at) > state.clock.now()) return kNotReady;
  *milliseconds = static_cast<float>(elapsed_ms(*begin, *end));
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
}
#pragma GCC visibility pop
