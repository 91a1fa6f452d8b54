// Pinned host memory as torch gives it out: its own cache, with the simulated devices' events.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/Allocator.h>

#include "device.h"

namespace sim {

bool is_pinned(const void* address);
// The tensor's memory is given out again only after what `stream` does with it.
void hold_pinned(const at::TensorBase& host, c10::Stream stream);
c10::Allocator* pinned_allocator();

}  // namespace sim
