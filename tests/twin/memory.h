// Device memory of the machine: per device one window that frameworks and engines see, in which nothing can be read or
// written, and a second mapping of the same pages that streams alone use. What a host thread touches there kills it.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>

#include "runtime.h"

namespace sim {

constexpr size_t kDeviceBytes = size_t{8} << 30;

class Memory {
 public:
  Memory() {
    const int file = memfd_create("sim", 0);
    if (file < 0 || ftruncate(file, kDeviceBytes) != 0) abort();
    constexpr int kFlags = MAP_SHARED | MAP_NORESERVE;
    void* const window_pages = mmap(nullptr, kDeviceBytes, PROT_NONE, kFlags, file, 0);
    void* const view_pages = mmap(nullptr, kDeviceBytes, PROT_READ | PROT_WRITE, kFlags, file, 0);
    if (window_pages == MAP_FAILED || view_pages == MAP_FAILED) abort();
    close(file);
    window = static_cast<char*>(window_pages);
    view = static_cast<char*>(view_pages);
  }
  bool has(const void* address, size_t bytes) const {
    const auto* const begin = static_cast<const char*>(address);
    return begin >= window && begin + bytes <= window + kDeviceBytes;
  }
  char* view_of(const void* address) const { return view + (static_cast<const char*>(address) - window); }
  // The pages go back to the system.
  void drop(const void* address, size_t bytes) const { madvise(view_of(address), bytes, MADV_REMOVE); }

  char* window = nullptr;
  char* view = nullptr;
};

// Where a device's memory is; made when it is first asked for. Before that, a device is RAM: see Machine.
inline Memory& memory_of(int device) {
  static Memory* const memories[kDevices] = {new Memory, new Memory};
  return *memories[device];
}

}  // namespace sim
