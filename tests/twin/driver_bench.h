// What driver_checks.cpp is written with: requirements, address space, and a driver with everything its methods need.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>

#include "driver.h"
#include "error.h"
#include "controls.h"

namespace checks {

using offload::Driver;
using offload::DriverError;
using offload::Event;
using offload::Stream;

constexpr size_t kPageBytes = 4096;
constexpr size_t kGiB = size_t{1} << 30;
constexpr int kOutOfMemory = 2;

inline const char* library = nullptr;
inline const char* library_without_query = nullptr;
inline const char* library_without_optional = nullptr;

inline void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("not so: " + what);
}

inline void require_equal(const std::string& found, const std::string& expected, const std::string& what) {
  require(found == expected, what + " is '" + expected + "' (it is '" + found + "')");
}

inline DriverError driver_error(const std::function<void()>& action, const std::string& what) {
  try {
    action();
  } catch (const DriverError& error) {
    return error;
  }
  throw std::runtime_error("no DriverError from " + what);
}

inline void require_text(const DriverError& error, const std::string& text) {
  require(std::string(error.what()).find(text) != std::string::npos, "'" + text + "' in '" + error.what() + "'");
}

// Address space without memory behind it until it is touched, beginning at a multiple of 1 GiB.
class Pages {
 public:
  explicit Pages(size_t bytes) : mapped_bytes_(bytes + kGiB) {
    mapped_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    require(mapped_ != MAP_FAILED, "address space for " + std::to_string(mapped_bytes_) + " bytes");
    data = static_cast<std::byte*>(mapped_) + (kGiB - reinterpret_cast<uintptr_t>(mapped_) % kGiB);
  }
  ~Pages() { munmap(mapped_, mapped_bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  std::byte* data = nullptr;

 private:
  const size_t mapped_bytes_;
  void* mapped_ = nullptr;
};

// A driver with everything that its methods need.
struct Bench {
  Bench() { driver->host_register(host.data, kPageBytes); }
  ~Bench() {
    driver->stream_synchronize(stream);
    driver->host_unregister(host.data);
    driver->event_destroy(from);
    driver->event_destroy(to);
    driver->stream_destroy(stream);
  }

  // Every method that may throw, by the entry point it is there for.
  std::map<std::string, std::function<void()>> methods() {
    return {
        {"cuStreamCreate", [this] { driver->stream_destroy(driver->stream_create()); }},
        {"cuStreamWaitEvent", [this] { driver->stream_wait(stream, from); }},
        {"cuStreamSynchronize", [this] { driver->stream_synchronize(stream); }},
        {"cuStreamIsCapturing", [this] { driver->require_not_capturing(stream); }},
        {"cuEventCreate", [this] { driver->event_destroy(driver->event_create()); }},
        {"cuEventRecord", [this] { driver->event_record(from, stream); }},
        {"cuEventQuery", [this] { driver->event_done(to); }},
        {"cuEventSynchronize", [this] { driver->event_synchronize(from); }},
        {"cuEventElapsedTime", [this] { elapsed(); }},
        {"cuMemcpyDtoHAsync_v2", [this] { driver->copy_out(host.data, device.data, kPageBytes, stream); }},
        {"cuMemcpyHtoDAsync_v2", [this] { driver->copy_in(device.data, host.data, kPageBytes, stream); }},
        {"cuMemcpyBatchAsync", [this] { copy_together(); }},
        {"cuMemHostRegister_v2", [this] { register_other(); }},
        {"cuMemGetInfo_v2", [this] { driver->device_memory(); }},
    };
  }

  double elapsed() {
    driver->event_record(from, stream);
    driver->event_record(to, stream);
    driver->event_synchronize(to);
    return driver->event_elapsed_ms(from, to);
  }

  void copy_together() {
    const offload::Copy out[] = {{host.data, device.data, 64}, {host.data + 64, device.data + 64, 64}};
    driver->copy_out_batch(out, 2, stream);
    const offload::Copy in[] = {{device.data + 128, host.data + 128, 64}, {device.data + 192, host.data + 192, 64}};
    driver->copy_in_batch(in, 2, stream);
  }

  void register_other() {
    driver->host_register(other.data, kPageBytes);
    driver->host_unregister(other.data);
  }

  Pages host{kPageBytes};
  Pages device{kPageBytes};
  Pages other{kPageBytes};
  std::shared_ptr<Driver> driver = offload::make_cuda_driver(0, library);
  Stream stream = driver->stream_create();
  Event from = driver->event_create();
  Event to = driver->event_create();
};

}  // namespace checks
