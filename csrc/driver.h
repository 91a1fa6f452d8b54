// The interface to a device: streams, events, copies and pinned memory. All other code of the data plane (the C++ code
// that stores and copies swapped bytes) uses the device only through it.
//
// It has two implementations: cuda_driver.cpp (the GPU, through libcuda) and host_driver.{h,cpp} (worker threads; the
// "device" is RAM). The code above the driver (pool, store) is the same for both.
//
// A stream runs its operations in order; different streams are ordered only by events. A *compute* stream belongs to
// the framework: its handle is passed in, never created or destroyed here. On the host driver the compute stream is
// the calling thread itself (handle nullptr): an event recorded there completes at once, and stream_wait blocks the
// caller.
//
// Thread safety: every method may be called from any thread. Errors: DriverError, never a bare code. Handles are
// opaque. A handle may be destroyed while its work is queued; this takes effect when that work has ended.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace offload {

using Stream = void*;
using Event = void*;

struct DeviceMemory {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
};

struct Copy {
  void* to = nullptr;
  const void* from = nullptr;
  size_t bytes = 0;
};

class Driver {
 public:
  virtual ~Driver() = default;

  virtual const char* name() const noexcept = 0;
  // Throws DriverError in a forked child: threads, contexts and registrations did not survive the fork.
  virtual void require_same_process() const = 0;
  virtual bool in_forked_child() const noexcept = 0;

  // A stream of our own, non-blocking with respect to the framework's default stream.
  virtual Stream stream_create() = 0;
  virtual void stream_destroy(Stream stream) noexcept = 0;
  // All work queued on `stream` after this call starts after `event`'s most recent record has completed.
  virtual void stream_wait(Stream stream, Event event) = 0;
  virtual void stream_synchronize(Stream stream) = 0;
  // Throws DriverError when `stream` is being captured into a graph: a capture would replay stale addresses.
  virtual void require_not_capturing(Stream stream) = 0;

  virtual Event event_create() = 0;
  virtual void event_destroy(Event event) noexcept = 0;
  virtual void event_record(Event event, Stream stream) = 0;
  // Returns true for an event that was never recorded.
  virtual bool event_done(Event event) = 0;
  virtual void event_synchronize(Event event) = 0;
  // Returns the milliseconds between two completed records.
  virtual double event_elapsed_ms(Event from, Event to) = 0;

  // Asynchronous copies, ordered by `stream`. `host` lies in memory given to host_register.
  virtual void copy_out(void* host, const void* device, size_t bytes, Stream stream) = 0;
  virtual void copy_in(void* device, const void* host, size_t bytes, Stream stream) = 0;

  // The same for several blocks that do not overlap, in any order. If this throws, any of the copies may have been
  // queued: synchronize the stream before the memory is used.
  virtual void copy_out_batch(const Copy* copies, size_t count, Stream stream) = 0;
  virtual void copy_in_batch(const Copy* copies, size_t count, Stream stream) = 0;

  // Pins a page-aligned range for DMA. The host driver does nothing.
  virtual void host_register(void* address, size_t bytes) = 0;
  // Returns false if the driver refuses: the range is then still pinned and must stay mapped.
  virtual bool host_unregister(void* address) noexcept = 0;

  virtual DeviceMemory device_memory() = 0;
  // Returns the NUMA node nearest to the device; -1 if it is unknown or there is only one. Never throws.
  virtual int numa_node() noexcept { return -1; }
};

// A stream that is destroyed with its owner, without waiting. The driver must outlive it. Creating it throws
// DriverError.
class OwnedStream {
 public:
  explicit OwnedStream(Driver& driver) : driver_(driver), stream_(driver.stream_create()) {}
  ~OwnedStream() { driver_.stream_destroy(stream_); }
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;

  operator Stream() const { return stream_; }

 private:
  Driver& driver_;
  const Stream stream_;
};

// Makes the driver of a GPU. Opens libcuda.so.1 (or `library`, for tests). The driver retains the primary context of
// `device` at the first call that needs it, and makes it current around every call. Throws DriverError if there is no
// CUDA driver or no such device, or if a required symbol is missing.
std::shared_ptr<Driver> make_cuda_driver(int device, const char* library = "libcuda.so.1");

// Returns the number of CUDA devices, without creating a context; 0 if there is no CUDA driver.
int cuda_device_count(const char* library = "libcuda.so.1") noexcept;

struct DriverSymbol {
  const char* name;
  bool required;  // true: without this symbol the GPU cannot be used; false: without it one feature is missing
  bool found;
};

// Returns the entry points of `library` that the engine uses, for diagnosis. Empty if the library cannot be opened.
std::vector<DriverSymbol> cuda_symbols(const char* library = "libcuda.so.1");

}  // namespace offload
