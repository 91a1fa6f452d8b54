#include "place.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_conj.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

namespace sim {

Place::Place(const at::Tensor& tensor)
    : sizes_(tensor.sizes().vec()),
      strides_(tensor.strides().vec()),
      dtype_(tensor.scalar_type()),
      is_conj_(tensor.is_conj()),
      is_neg_(tensor.is_neg()) {
  if (tensor.numel() == 0) return;
  address_ = tensor.const_data_ptr();
  view_ = sim_view(tensor.device().index(), address_);
}

at::Tensor Place::tensor() const {
  const at::TensorOptions options(dtype_);
  if (view_ == nullptr) return at::empty_strided(sizes_, strides_, options);
  at::Tensor tensor = at::from_blob(view_, sizes_, strides_, options);
  if (is_conj_) tensor = at::_conj(tensor);
  return is_neg_ ? at::_neg_view(tensor) : tensor;
}

void Place::touch(c10::Stream stream, bool is_write, const char* what) const {
  if (view_ == nullptr) return;
  const size_t bytes = at::detail::computeStorageNbytes(sizes_, strides_, at::elementSize(dtype_));
  sim_touch(handle_of(stream), address_, bytes, is_write ? 1 : 0, what);
}

}  // namespace sim
