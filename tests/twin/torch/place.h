// A tensor as queued work knows it: where its bytes are, and nothing that keeps them there.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "device.h"

namespace sim {

class Place {
 public:
  explicit Place(const at::Tensor& tensor);
  // The tensor, for the CPU's kernels on a stream's thread. Without memory where it has no elements.
  at::Tensor tensor() const;
  // Tells the machine that work on `stream` is about to touch it, from its first byte to its last.
  void touch(c10::Stream stream, bool is_write, const char* what) const;
  char* view() const { return view_; }

 private:
  const void* address_ = nullptr;
  char* view_ = nullptr;
  std::vector<int64_t> sizes_, strides_;
  at::ScalarType dtype_;
  bool is_conj_, is_neg_;
};

inline bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

}  // namespace sim
