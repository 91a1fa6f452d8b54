// A figure at one moment, and the most it ever was: bytes on the device, steps begun.
//
// Beside the data path. Not thread safe: callers hold the GIL.
#pragma once

#include <cstdint>

namespace offload {

struct Gauge {
  int64_t now = 0;
  int64_t peak = 0;
  void add(int64_t more) {
    now += more;
    if (now > peak) peak = now;
  }
};

}  // namespace offload
