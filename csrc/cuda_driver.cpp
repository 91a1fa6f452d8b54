// The driver table for GPUs. All CUDA calls are made here, except those that load the library (cuda_library.cpp).

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_api.h"
#include "cuda_library.h"
#include "driver.h"
#include "error.h"
#include "numa.h"
#include "process.h"

namespace offload {
namespace {

using cuda::Api;
using cuda::check;
using cuda::Entry;
using cuda::Result;
using cuda::result_text;

// Host memory is pinned in chunks, because one call for a very large range can fail although several smaller ones
// succeed. CUDA does not guarantee a copy whose host range spans two registrations. So chunks end at addresses that are
// multiples of this size, and copies are divided there too, without looking up the registrations.
constexpr size_t kRegisterChunkBytes = size_t{1} << 30;

size_t bytes_to_chunk_end(const void* host) {
  return kRegisterChunkBytes - reinterpret_cast<uintptr_t>(host) % kRegisterChunkBytes;
}

// Makes the context current during its lifetime, and restores the caller's context afterwards, also after errors.
class ContextScope {
 public:
  ContextScope(const Api& api, cuda::ContextHandle context) : api_(api) {
    check(api, api.cuCtxPushCurrent_v2, api.cuCtxPushCurrent_v2.function(context));
  }
  ~ContextScope() {
    cuda::ContextHandle popped = nullptr;
    api_.cuCtxPopCurrent_v2.function(&popped);
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  const Api& api_;
};

cuda::StreamHandle stream_handle(Stream stream) {
  // The framework's default stream is handle 0, which has another meaning in builds with per-thread default streams.
  if (stream == nullptr) return reinterpret_cast<cuda::StreamHandle>(uintptr_t{cuda::kStreamLegacy});
  return static_cast<cuda::StreamHandle>(stream);
}

cuda::EventHandle event_handle(Event event) { return static_cast<cuda::EventHandle>(event); }

cuda::DeviceAddress device_address(const void* device) { return reinterpret_cast<uintptr_t>(device); }

// The destructor releases nothing, on purpose: the last owner may be destroyed at process exit, when libcuda has shut
// down already or other threads are still inside it. The system reclaims contexts, streams and pinned pages anyway.
class CudaDriver final : public Driver {
 public:
  CudaDriver(const Api& api, cuda::Device device) : api_(api), device_(device) {}

  const char* name() const noexcept override { return "cuda"; }
  void require_same_process() const override { require_same_process("CUDA"); }
  bool in_forked_child() const noexcept override { return !owner_.is_this(); }

  Stream stream_create() override {
    cuda::StreamHandle stream = nullptr;
    call(api_.cuStreamCreate, &stream, unsigned{cuda::kStreamNonBlocking});
    return stream;
  }

  void stream_destroy(Stream stream) noexcept override {
    if (stream != nullptr) call_noexcept(api_.cuStreamDestroy_v2, stream_handle(stream));
  }

  void stream_wait(Stream stream, Event event) override {
    call(api_.cuStreamWaitEvent, stream_handle(stream), event_handle(event), 0U);
  }

  void stream_synchronize(Stream stream) override { call(api_.cuStreamSynchronize, stream_handle(stream)); }

  void require_not_capturing(Stream stream) override {
    require_same_process("cuStreamIsCapturing");
    if (api_.cuStreamIsCapturing.function == nullptr) return;
    cuda::CaptureState state = cuda::kCaptureNone;
    call(api_.cuStreamIsCapturing, stream_handle(stream), &state);
    if (state == cuda::kCaptureNone) return;
    throw DriverError(api_.cuStreamIsCapturing.name, cuda::kCaptureUnsupported,
                      "the stream is being captured into a CUDA graph, which would replay stale addresses; "
                      "capture without offload, or train without graphs");
  }

  Event event_create() override {
    cuda::EventHandle event = nullptr;
    // Blocking: worker threads wait on events and must not spin on the cores that training uses.
    call(api_.cuEventCreate, &event, unsigned{cuda::kEventBlockingSync});
    return event;
  }

  void event_destroy(Event event) noexcept override {
    if (event != nullptr) call_noexcept(api_.cuEventDestroy_v2, event_handle(event));
  }

  void event_record(Event event, Stream stream) override {
    call(api_.cuEventRecord, event_handle(event), stream_handle(stream));
  }

  bool event_done(Event event) override {
    const Result result = attempt(api_.cuEventQuery, event_handle(event));
    if (result == cuda::kNotReady) return false;
    check(api_, api_.cuEventQuery, result);
    return true;
  }

  void event_synchronize(Event event) override { call(api_.cuEventSynchronize, event_handle(event)); }

  double event_elapsed_ms(Event from, Event to) override {
    require_same_process(api_.cuEventElapsedTime.name);
    if (api_.cuEventElapsedTime.function == nullptr) {
      throw DriverError(api_.cuEventElapsedTime.name, cuda::kSymbolNotFound, "this driver cannot time events");
    }
    float milliseconds = 0;
    call(api_.cuEventElapsedTime, &milliseconds, event_handle(from), event_handle(to));
    return static_cast<double>(milliseconds);
  }

  void copy_out(void* host, const void* device, size_t bytes, Stream stream) override {
    require_same_process(api_.cuMemcpyDtoHAsync_v2.name);
    for (size_t done = 0, step = 0; done < bytes; done += step) {
      std::byte* const target = static_cast<std::byte*>(host) + done;
      step = std::min(bytes - done, bytes_to_chunk_end(target));
      call(api_.cuMemcpyDtoHAsync_v2, target, device_address(device) + done, step, stream_handle(stream));
    }
  }

  void copy_in(void* device, const void* host, size_t bytes, Stream stream) override {
    require_same_process(api_.cuMemcpyHtoDAsync_v2.name);
    for (size_t done = 0, step = 0; done < bytes; done += step) {
      const std::byte* const source = static_cast<const std::byte*>(host) + done;
      step = std::min(bytes - done, bytes_to_chunk_end(source));
      call(api_.cuMemcpyHtoDAsync_v2, device_address(device) + done, source, step, stream_handle(stream));
    }
  }

  void copy_out_batch(const Copy* copies, size_t count, Stream stream) override {
    if (try_batch(copies, count, stream, [](const Copy& copy) { return bytes_to_chunk_end(copy.to); })) return;
    for (size_t each = 0; each < count; ++each)
      copy_out(copies[each].to, copies[each].from, copies[each].bytes, stream);
  }

  void copy_in_batch(const Copy* copies, size_t count, Stream stream) override {
    if (try_batch(copies, count, stream, [](const Copy& copy) { return bytes_to_chunk_end(copy.from); })) return;
    for (size_t each = 0; each < count; ++each) copy_in(copies[each].to, copies[each].from, copies[each].bytes, stream);
  }

  void host_register(void* address, size_t bytes) override {
    require_same_process(api_.cuMemHostRegister_v2.name);
    std::byte* const base = static_cast<std::byte*>(address);
    {
      const std::lock_guard lock(mutex_);
      if (!registered_bytes_.emplace(base, bytes).second) {
        throw DriverError(api_.cuMemHostRegister_v2.name, cuda::kAlreadyRegistered,
                          "this address is registered already; host_unregister it first");
      }
    }
    size_t done = 0;
    try {
      for (size_t step = 0; done < bytes; done += step) {
        step = std::min(bytes - done, bytes_to_chunk_end(base + done));
        register_chunk(base + done, step, done, bytes);
      }
    } catch (...) {
      unregister_chunks(base, done);
      const std::lock_guard lock(mutex_);
      registered_bytes_.erase(base);
      throw;
    }
  }

  bool host_unregister(void* address) noexcept override {
    if (in_forked_child()) return false;  // before the lock, as in require_same_process
    std::byte* const base = static_cast<std::byte*>(address);
    size_t bytes = 0;
    {
      const std::lock_guard lock(mutex_);
      const auto found = registered_bytes_.find(base);
      if (found == registered_bytes_.end()) return true;
      bytes = found->second;
      registered_bytes_.erase(found);
    }
    return unregister_chunks(base, bytes);
  }

  DeviceMemory device_memory() override {
    DeviceMemory memory;
    call(api_.cuMemGetInfo_v2, &memory.free_bytes, &memory.total_bytes);
    return memory;
  }

  int numa_node() noexcept override {
    char bus_id[32] = {};
    const auto ask = api_.cuDeviceGetPCIBusId.function;
    if (in_forked_child() || ask == nullptr) return -1;
    if (ask(bus_id, static_cast<int>(sizeof bus_id), device_) != cuda::kSuccess) return -1;
    return numa_node_of_pci(bus_id);
  }

 private:
  // Checked before any lock is taken: a lock that another thread held at the fork is never released in the child.
  void require_same_process(const char* call_name) const {
    if (in_forked_child()) throw DriverError(call_name, cuda::kNotInitialized, cuda::kForkRemedy);
  }

  // The primary context, retained at the first call that needs it: a retained context takes device memory.
  cuda::ContextHandle context() {
    cuda::ContextHandle context = context_.load(std::memory_order_acquire);
    if (context != nullptr) return context;
    const std::lock_guard lock(mutex_);
    context = context_.load(std::memory_order_relaxed);
    if (context == nullptr) {
      check(api_, api_.cuDevicePrimaryCtxRetain, api_.cuDevicePrimaryCtxRetain.function(&context, device_));
      context_.store(context, std::memory_order_release);
    }
    return context;
  }

  // Returns false, with nothing queued, if the driver does not have this call, or not for this device or stream.
  template <typename HostBytes>
  bool try_batch(const Copy* copies, size_t count, Stream stream, HostBytes bytes_to_end) {
    require_same_process(api_.cuMemcpyBatchAsync.name);
    // The call does not accept the legacy default stream.
    if (api_.cuMemcpyBatchAsync.function == nullptr || batch_unsupported_ || stream == nullptr) return false;
    std::vector<cuda::DeviceAddress> targets, sources;
    std::vector<size_t> sizes;
    for (const Copy* copy = copies; copy < copies + count; ++copy) {
      for (size_t done = 0, step = 0; done < copy->bytes; done += step) {
        const Copy rest{static_cast<std::byte*>(copy->to) + done, static_cast<const std::byte*>(copy->from) + done, 0};
        step = std::min(copy->bytes - done, bytes_to_end(rest));
        targets.push_back(device_address(rest.to));
        sources.push_back(device_address(rest.from));
        sizes.push_back(step);
      }
    }
    if (sizes.empty()) return true;
    cuda::CopyAttributes attributes{cuda::kSourceInStreamOrder, {}, {}, 0};
    size_t first = 0, failed = 0;
    const Result result = attempt(api_.cuMemcpyBatchAsync, targets.data(), sources.data(), sizes.data(), sizes.size(),
                                  &attributes, &first, size_t{1}, &failed, stream_handle(stream));
    if (result == cuda::kNotSupported) {
      batch_unsupported_ = true;
      return false;
    }
    check(api_, api_.cuMemcpyBatchAsync, result);
    return true;
  }

  template <typename Signature, typename... Arguments>
  Result attempt(const Entry<Signature>& entry, Arguments... arguments) {
    require_same_process(entry.name);
    const ContextScope scope(api_, context());
    return entry.function(arguments...);
  }

  template <typename Signature, typename... Arguments>
  void call(const Entry<Signature>& entry, Arguments... arguments) {
    check(api_, entry, attempt(entry, arguments...));
  }

  // Destroys objects. An object that can no longer be released (lost context, forked child) is leaked.
  template <typename Signature, typename... Arguments>
  bool call_noexcept(const Entry<Signature>& entry, Arguments... arguments) noexcept {
    try {
      return attempt(entry, arguments...) == cuda::kSuccess;
    } catch (...) {
      return false;
    }
  }

  void register_chunk(std::byte* chunk, size_t chunk_bytes, size_t done_bytes, size_t total_bytes) {
    const Result result = attempt(api_.cuMemHostRegister_v2, chunk, chunk_bytes, unsigned{cuda::kRegisterPortable});
    if (result == cuda::kSuccess) return;
    throw DriverError(api_.cuMemHostRegister_v2.name, result,
                      result_text(api_, result) + ": asked to pin " + std::to_string(total_bytes) +
                          " bytes, failed after " + std::to_string(done_bytes) + "; lower host_limit");
  }

  bool unregister_chunks(std::byte* base, size_t bytes) noexcept {
    bool all = true;
    for (size_t done = 0; done < bytes; done += bytes_to_chunk_end(base + done)) {
      if (!call_noexcept(api_.cuMemHostUnregister, base + done)) all = false;
    }
    return all;
  }

  const Api api_;
  const cuda::Device device_;
  const Process owner_;
  std::atomic<cuda::ContextHandle> context_{nullptr};
  std::atomic<bool> batch_unsupported_{false};
  std::mutex mutex_;                                     // guards retaining the context, and the map below
  std::map<const std::byte*, size_t> registered_bytes_;  // by base address
};

}  // namespace

std::shared_ptr<Driver> make_cuda_driver(int device, const char* library) {
  const Api api = cuda::load_api(library);
  const int count = cuda::initialized_device_count(api);
  if (device < 0 || device >= count) {
    throw DriverError(api.cuDeviceGet.name, cuda::kInvalidDevice,
                      "asked for device " + std::to_string(device) + ", " + std::to_string(count) +
                          " present; check the model's device and CUDA_VISIBLE_DEVICES");
  }
  cuda::Device handle = 0;
  check(api, api.cuDeviceGet, api.cuDeviceGet.function(&handle, device));
  return std::make_shared<CudaDriver>(api, handle);
}

}  // namespace offload
