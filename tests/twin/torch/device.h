// The simulated devices as torch sees them: PrivateUse1, renamed "sim". What the files beside this have in common.
//
// Queued work holds addresses, never tensors: memory that is freed on the host is given out again at once, as CUDA's
// caching allocator does.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <exception>
#include <memory>
#include <utility>

#include "runtime.h"

namespace sim {

using c10::DeviceIndex;
using c10::StreamId;
using offload::cuda::EventHandle;
using offload::cuda::StreamHandle;

constexpr auto kSim = c10::DeviceType::PrivateUse1;

DeviceIndex current_device();
DeviceIndex exchange_device(DeviceIndex device);
c10::Stream current_stream(DeviceIndex device);
inline c10::Stream current_stream() { return current_stream(current_device()); }
StreamHandle handle_of(c10::Stream stream);

// Raises the error of work that has failed on any stream: for good, as CUDA does.
void raise_failure();
void synchronize(c10::Stream stream);

// `stream` runs `work` when its turn comes.
template <typename Work>
void launch(c10::Stream stream, Work work) {
  raise_failure();
  sim_launch(
      handle_of(stream),
      [](void* argument) {
        const std::unique_ptr<Work> mine(static_cast<Work*>(argument));
        try {
          (*mine)();
        } catch (const std::exception& error) {
          sim_fail(error.what());
        }
      },
      new Work(std::move(work)));
}

}  // namespace sim
