// The table of primitives that the data plane is written against.
//
// Two providers: cuda_driver.cpp (the GPU, through libcuda) and host_driver.{h,cpp} (worker threads; the "device" is
// RAM). Everything above this line of the data path (pool, store) is the same code on both.
//
// Streams run their operations in order; different streams are ordered by events alone. A *compute* stream belongs to
// the framework: its handle is passed in, never created or destroyed here. On the host driver the compute stream is
// the calling thread itself (handle nullptr): recording there completes at once and waiting there blocks the caller.
//
// Thread safety: every method may be called from any thread. Errors: DriverError, never a bare code. Handles are
// opaque; destroying one that still has work queued is allowed and takes effect when that work has ended.
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
  // An event never recorded counts as done.
  virtual bool event_done(Event event) = 0;
  virtual void event_synchronize(Event event) = 0;
  // Milliseconds between two completed records.
  virtual double event_elapsed_ms(Event from, Event to) = 0;

  // Asynchronous copies, ordered by `stream`. `host` lies in memory given to host_register.
  virtual void copy_out(void* host, const void* device, size_t bytes, Stream stream) = 0;
  virtual void copy_in(void* device, const void* host, size_t bytes, Stream stream) = 0;

  // The same for several blocks that do not overlap, in any order. If it throws, any of them may have been queued:
  // synchronize the stream before using the result.
  virtual void copy_out_batch(const Copy* copies, size_t count, Stream stream) = 0;
  virtual void copy_in_batch(const Copy* copies, size_t count, Stream stream) = 0;

  // Pins a page-aligned range for DMA (on the host driver: nothing to do).
  virtual void host_register(void* address, size_t bytes) = 0;
  // False if the driver refuses: the range is still pinned then, and must stay mapped.
  virtual bool host_unregister(void* address) noexcept = 0;

  virtual DeviceMemory device_memory() = 0;
  // The NUMA node nearest to the device; -1 if there is no choice. Never an error.
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

// The GPU's provider. Opens libcuda.so.1 (or `library`, for tests) at the first call; retains `device`'s primary
// context and pushes and pops it around every call. Throws DriverError where there is no driver, no such device, or a
// required symbol is missing.
std::shared_ptr<Driver> make_cuda_driver(int device, const char* library = "libcuda.so.1");

// Number of CUDA devices, without creating a context; 0 where there is no driver.
int cuda_device_count(const char* library = "libcuda.so.1") noexcept;

struct DriverSymbol {
  const char* name;
  bool required;  // without one of these there is no engine on the GPU; without another, its feature is missing
  bool found;
};

// The entry points that the engine wants of `library`, for diagnoses. Empty where it cannot be opened.
std::vector<DriverSymbol> cuda_symbols(const char* library = "libcuda.so.1");

}  // namespace offload
