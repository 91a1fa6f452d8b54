// libcuda, opened at run time: the table of its entry points, and the texts of its result codes.
#pragma once

#include <string>

#include "cuda_api.h"
#include "error.h"

namespace offload::cuda {

inline constexpr const char* kForkRemedy =
    "CUDA does not survive a fork; use the spawn start method (multiprocessing.set_start_method(\"spawn\"))";

// Returns "CUDA_ERROR_… (…)", or "error without a name".
std::string result_text(const Api& api, Result result);

template <typename Signature>
void check(const Api& api, const Entry<Signature>& entry, Result result) {
  if (result != kSuccess) throw DriverError(entry.name, result, result_text(api, result));
}

// Throws DriverError if `library_name` cannot be opened or a required entry point is missing.
Api load_api(const char* library_name);

// Initializes CUDA, without creating a context. Throws DriverError.
int initialized_device_count(const Api& api);

}  // namespace offload::cuda
