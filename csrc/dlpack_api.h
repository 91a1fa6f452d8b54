// The part of DLPack 1.x that is used here. DLPack is a C interface for passing tensors between libraries; torch 2.10
// and later provide it as Tensor.__dlpack_c_exchange_api__. With it, C++ reads a tensor's address and shape, and
// creates a tensor over existing memory, without a Python call.
//
// The layouts are those of the standard (dmlc/dlpack, dlpack.h) and are stable within a major version.
#pragma once

#include <cstdint>

namespace offload::dlpack {

constexpr uint32_t kMajorVersion = 1;
constexpr int32_t kCpu = 1;
constexpr uint8_t kComplex = 5;  // a type code
constexpr const char* kCapsuleName = "dlpack_exchange_api";

struct Version {
  uint32_t major, minor;
};

struct Device {
  int32_t type, ordinal;
};

struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};

struct Managed {
  Version version;
  void* context;
  void (*deleter)(Managed*);
  uint64_t flags;
  Tensor tensor;
};

// The functions return 0, or -1 with a Python error.
struct ExchangeApi {
  Version version;
  ExchangeApi* older;
  int (*allocate)(Tensor*, Managed**, void*, void (*)(void*, const char*, const char*));
  int (*to_managed)(void* object, Managed** made);
  int (*to_object)(Managed* given, void** made);  // takes ownership of `given`
  int (*describe)(void* object, Tensor* described);  // may be null; its pointers refer to memory of `object`
  int (*current_stream)(int32_t device_type, int32_t ordinal, void** stream);
};

// Null if this torch does not provide the interface.
inline const ExchangeApi* api = nullptr;

}  // namespace offload::dlpack
