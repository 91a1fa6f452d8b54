// CUDA's driver interface as far as cuda_driver.cpp uses it, declared by hand so that the build needs no toolkit.
//
// Everything here is a list: one line per entry point and per constant. cuda_driver.cpp expands the lists into a table
// of function pointers; tests/test_cuda_signatures.py expands the same lists next to the vendor's cuda.h and compares
// them type by type and value by value, so a wrong line does not survive the tests. The names are those that libcuda
// exports: version suffixes are part of them.
#pragma once

#include <cstddef>

namespace offload::cuda {

using Device = int;
using DeviceAddress = unsigned long long;  // an integer in the vendor's header too
using ContextHandle = struct ContextTag*;
using StreamHandle = struct StreamTag*;
using EventHandle = struct EventTag*;

// X(name here, name in cuda.h, value)
#define OFFLOAD_CUDA_RESULTS(X)                                         \
  X(kSuccess, CUDA_SUCCESS, 0)                                          \
  X(kNotInitialized, CUDA_ERROR_NOT_INITIALIZED, 3)                     \
  X(kInvalidDevice, CUDA_ERROR_INVALID_DEVICE, 101)                     \
  X(kFileNotFound, CUDA_ERROR_FILE_NOT_FOUND, 301)                      \
  X(kSymbolNotFound, CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND, 302)    \
  X(kNotReady, CUDA_ERROR_NOT_READY, 600)                               \
  X(kAlreadyRegistered, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712) \
  X(kCaptureUnsupported, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900)

#define OFFLOAD_CUDA_CAPTURE_STATES(X)              \
  X(kCaptureNone, CU_STREAM_CAPTURE_STATUS_NONE, 0) \
  X(kCaptureActive, CU_STREAM_CAPTURE_STATUS_ACTIVE, 1)

#define OFFLOAD_CUDA_FLAGS(X)                      \
  X(kStreamNonBlocking, CU_STREAM_NON_BLOCKING, 1) \
  X(kStreamLegacy, CU_STREAM_LEGACY, 1)            \
  X(kEventBlockingSync, CU_EVENT_BLOCKING_SYNC, 1) \
  X(kRegisterPortable, CU_MEMHOSTREGISTER_PORTABLE, 1)

#define OFFLOAD_CUDA_ENUMERATOR(name, vendor_name, value) name = value,
enum Result : int { OFFLOAD_CUDA_RESULTS(OFFLOAD_CUDA_ENUMERATOR) };
enum CaptureState : int { OFFLOAD_CUDA_CAPTURE_STATES(OFFLOAD_CUDA_ENUMERATOR) };
enum Flag : unsigned { OFFLOAD_CUDA_FLAGS(OFFLOAD_CUDA_ENUMERATOR) };
#undef OFFLOAD_CUDA_ENUMERATOR

// X(exported name, parameters); every entry point returns Result. Without one of these there is no engine on the GPU.
#define OFFLOAD_CUDA_REQUIRED(X)                                                                       \
  X(cuInit, (unsigned flags))                                                                          \
  X(cuDeviceGetCount, (int* count))                                                                    \
  X(cuDeviceGet, (Device * device, int ordinal))                                                       \
  X(cuDevicePrimaryCtxRetain, (ContextHandle * context, Device device))                                \
  X(cuCtxPushCurrent_v2, (ContextHandle context))                                                      \
  X(cuCtxPopCurrent_v2, (ContextHandle * context))                                                     \
  X(cuMemGetInfo_v2, (size_t* free_bytes, size_t* total_bytes))                                        \
  X(cuMemHostRegister_v2, (void* host, size_t bytes, unsigned flags))                                  \
  X(cuMemHostUnregister, (void* host))                                                                 \
  X(cuMemcpyHtoDAsync_v2, (DeviceAddress device, const void* host, size_t bytes, StreamHandle stream)) \
  X(cuMemcpyDtoHAsync_v2, (void* host, DeviceAddress device, size_t bytes, StreamHandle stream))       \
  X(cuStreamCreate, (StreamHandle * stream, unsigned flags))                                           \
  X(cuStreamDestroy_v2, (StreamHandle stream))                                                         \
  X(cuStreamWaitEvent, (StreamHandle stream, EventHandle event, unsigned flags))                       \
  X(cuStreamSynchronize, (StreamHandle stream))                                                        \
  X(cuEventCreate, (EventHandle * event, unsigned flags))                                              \
  X(cuEventDestroy_v2, (EventHandle event))                                                            \
  X(cuEventRecord, (EventHandle event, StreamHandle stream))                                           \
  X(cuEventQuery, (EventHandle event))                                                                 \
  X(cuEventSynchronize, (EventHandle event))

// Without one of these its feature alone is missing: timings, the capture check, names in error texts.
#define OFFLOAD_CUDA_OPTIONAL(X)                                                 \
  X(cuEventElapsedTime, (float* milliseconds, EventHandle from, EventHandle to)) \
  X(cuStreamIsCapturing, (StreamHandle stream, CaptureState * state))            \
  X(cuGetErrorName, (Result result, const char** text))                          \
  X(cuGetErrorString, (Result result, const char** text))

template <typename Signature>
struct Entry {
  const char* name;
  Signature* function = nullptr;
};

struct Api {
#define OFFLOAD_CUDA_ENTRY(symbol, parameters) Entry<Result parameters> symbol{#symbol};
  OFFLOAD_CUDA_REQUIRED(OFFLOAD_CUDA_ENTRY)
  OFFLOAD_CUDA_OPTIONAL(OFFLOAD_CUDA_ENTRY)
#undef OFFLOAD_CUDA_ENTRY
};

}  // namespace offload::cuda
