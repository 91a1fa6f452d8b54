// Typed errors of the data plane. Only bindings.cpp maps them to Python:
//   PoolExhausted → offload.PoolExhausted (a MemoryError)   DriverError, PinningFailed → RuntimeError
//   SpillError    → OSError(errno, text, path)              std::invalid_argument → ValueError
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace offload {

// The slab pool has too little free memory for a request. The attributes give the numbers.
class PoolExhausted : public std::runtime_error {
 public:
  PoolExhausted(size_t asked, size_t free, size_t max)
      : std::runtime_error("pinned pool exhausted: asked " + std::to_string(asked) + " bytes, " + std::to_string(free) +
                           " free of " + std::to_string(max) + "; raise host_limit"),
        asked_bytes(asked),
        free_bytes(free),
        max_bytes(max) {}

  const size_t asked_bytes;
  const size_t free_bytes;
  const size_t max_bytes;
};

// A driver entry point failed, is missing, or was called from the wrong process. Code 0: offload raised it, not the
// driver.
class DriverError : public std::runtime_error {
 public:
  DriverError(const std::string& entry_point, int result, const std::string& detail)
      : std::runtime_error(entry_point + (result ? " failed with code " + std::to_string(result) : "") + ": " + detail),
        call(entry_point),
        code(result) {}

  const std::string call;
  const int code;
};

// Host memory cannot be pinned. The device itself works, so the caller can continue without pinned memory.
class PinningFailed : public DriverError {
 public:
  explicit PinningFailed(const DriverError& cause) : DriverError(cause) {}
};

// File I/O failed. Has errno, the path, and the offset in the file (-1: the error has no offset).
class SpillError : public std::runtime_error {
 public:
  SpillError(int number, std::string file, int64_t at, const std::string& detail)
      : std::runtime_error(detail + " at offset " + std::to_string(at) + " of " + file + ": " + std::strerror(number)),
        error_number(number),
        path(std::move(file)),
        offset(at) {}

  const int error_number;
  const std::string path;
  const int64_t offset;
};

}  // namespace offload
