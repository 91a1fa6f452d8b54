// What operators have to do, for the machine's clock: FLOPs of matrix products and convolutions, bytes of everything.
#pragma once

#include <ATen/core/stack.h>

#include <vector>

#include "device.h"

namespace sim {

using torch::jit::Stack;

// FLOPs of a call, from its arguments and results.
using Flops = double (*)(const Stack& arguments, const Stack& results);

// Null for an operator whose bytes alone count.
Flops flops_of(const char* name);

// The next work on `stream` is this call: it goes over each argument's bytes so often, once where nothing is told, and
// once over each result's.
void spend(c10::Stream stream, Flops flops, const Stack& arguments, const std::vector<int>& passes,
           const Stack& results);

// Inside, what the calling thread takes of the processor stands for a device's library.
struct LibraryTime {
  LibraryTime() { sim_host_enter(); }
  ~LibraryTime() { sim_host_leave(); }
  LibraryTime(const LibraryTime&) = delete;
  LibraryTime& operator=(const LibraryTime&) = delete;
};

}  // namespace sim
