// A count and its peak so far, such as the bytes on the device or the steps that have begun.
//
// Not thread safe: callers hold the GIL.
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
