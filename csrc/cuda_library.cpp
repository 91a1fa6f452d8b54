#include "cuda_library.h"

#include <dlfcn.h>

#include <string>
#include <vector>

#include "driver.h"

namespace offload {
namespace cuda {

std::string result_text(const Api& api, Result result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (api.cuGetErrorName.function != nullptr) api.cuGetErrorName.function(result, &name);
  if (api.cuGetErrorString.function != nullptr) api.cuGetErrorString.function(result, &text);
  if (name == nullptr) return "error without a name";
  return text == nullptr ? std::string(name) : std::string(name) + " (" + text + ")";
}

namespace {

template <typename Signature>
bool resolve(void* library, Entry<Signature>& entry) {
  entry.function = reinterpret_cast<Signature*>(dlsym(library, entry.name));
  return entry.function != nullptr;
}

}  // namespace

Api load_api(const char* library_name) {
  // Never closed: libcuda does not support being unloaded.
  void* const library = dlopen(library_name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    throw DriverError(std::string("dlopen(") + library_name + ")", kFileNotFound,
                      std::string(reason == nullptr ? "no reason given" : reason) +
                          "; install the NVIDIA driver, or keep the model on the CPU");
  }
  Api api;
  const auto require = [&](auto& entry) {
    if (resolve(library, entry)) return;
    throw DriverError(entry.name, kSymbolNotFound,
                      std::string("missing in ") + library_name + "; install a driver for CUDA 12 or newer");
  };
#define OFFLOAD_CUDA_REQUIRE(symbol, parameters) require(api.symbol);
  OFFLOAD_CUDA_REQUIRED(OFFLOAD_CUDA_REQUIRE)
#undef OFFLOAD_CUDA_REQUIRE
#define OFFLOAD_CUDA_RESOLVE(symbol, parameters) resolve(library, api.symbol);
  OFFLOAD_CUDA_OPTIONAL(OFFLOAD_CUDA_RESOLVE)
#undef OFFLOAD_CUDA_RESOLVE
  return api;
}

int initialized_device_count(const Api& api) {
  const Result result = api.cuInit.function(0);
  if (result == kNotInitialized) {
    // libcuda returns this in a forked child if the parent had initialized CUDA.
    throw DriverError(api.cuInit.name, result, result_text(api, result) + "; " + kForkRemedy);
  }
  check(api, api.cuInit, result);
  int count = 0;
  check(api, api.cuDeviceGetCount, api.cuDeviceGetCount.function(&count));
  return count;
}

}  // namespace cuda

int cuda_device_count(const char* library) noexcept {
  try {
    return cuda::initialized_device_count(cuda::load_api(library));
  } catch (...) {
    return 0;
  }
}

std::vector<DriverSymbol> cuda_symbols(const char* library) {
  void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return {};
  std::vector<DriverSymbol> symbols;
#define OFFLOAD_CUDA_LIST(symbol, parameters) symbols.push_back({#symbol, true, dlsym(handle, #symbol) != nullptr});
  OFFLOAD_CUDA_REQUIRED(OFFLOAD_CUDA_LIST)
#undef OFFLOAD_CUDA_LIST
#define OFFLOAD_CUDA_LIST(symbol, parameters) symbols.push_back({#symbol, false, dlsym(handle, #symbol) != nullptr});
  OFFLOAD_CUDA_OPTIONAL(OFFLOAD_CUDA_LIST)
#undef OFFLOAD_CUDA_LIST
  return symbols;
}

}  // namespace offload
