// Automatic mixed precision on the simulated devices, by torch's own policies for accelerators (ATen/autocast_mode.h).
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "operators.h"
#include "place.h"

// Declared in ATen/autocast_mode.h as well, which takes longer to compile than everything here.
namespace at::autocast {
TORCH_API ScalarType get_autocast_dtype(c10::DeviceType device_type);
TORCH_API Tensor cached_cast(ScalarType to_type, const Tensor& arg, c10::DeviceType device_type);
}  // namespace at::autocast

namespace sim {
namespace {

enum class Policy { lower_precision, full_precision, promote, full_result };

constexpr const char* kLower[] = {
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul",
    "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention"};
constexpr const char* kFull[] = {
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d",
    "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa", "norm.Scalar",
    "norm.ScalarOpt_dim"};
constexpr const char* kFullResult[] = {
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList"};
constexpr const char* kPromote[] = {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler",
                                    "index_put", "tensordot", "scatter_add"};

bool is_eligible(const at::Tensor& tensor) {
  return on_device(tensor) && tensor.is_floating_point() && tensor.scalar_type() != at::kDouble;
}

// Applies `change` to every tensor among an operator's arguments.
template <typename Change>
void change_tensors(Stack::iterator begin, Stack::iterator end, const Change& change) {
  for (auto each = begin; each != end; ++each) {
    if (each->isTensor()) *each = change(each->toTensor());
    if (!each->isTensorList()) continue;
    std::vector<at::Tensor> list;
    for (const at::Tensor& part : each->toTensorVector()) list.push_back(change(part));
    *each = std::move(list);
  }
}

template <Policy policy>
void cast(const c10::OperatorHandle& op, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
  const auto& arguments = op.schema().arguments();
  const auto begin = stack->end() - static_cast<std::ptrdiff_t>(arguments.size());
  at::ScalarType to = policy == Policy::full_precision ? at::kFloat : at::autocast::get_autocast_dtype(kSim);
  if (policy == Policy::full_result) {
    const auto dtype = op.schema().argumentIndexWithName("dtype");
    if (begin->isTensor() && is_eligible(begin->toTensor()) && dtype && (begin + *dtype)->isNone())
      *(begin + *dtype) = c10::IValue(at::kFloat);
    op.callBoxed(stack);
    return;
  }
  if (policy == Policy::promote) {
    change_tensors(begin, stack->end(), [&](const at::Tensor& tensor) {
      if (is_eligible(tensor) && tensor.scalar_type() == at::kFloat) to = at::kFloat;
      return tensor;
    });
  }
  change_tensors(begin, stack->end(), [&](const at::Tensor& tensor) {
    return is_eligible(tensor) ? at::autocast::cached_cast(to, tensor, kSim) : tensor;
  });
  op.callBoxed(stack);
}

template <Policy policy, size_t count>
void register_as(torch::Library& library, const char* const (&names)[count]) {
  for (const char* const name : names) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast<policy>>());
}

}  // namespace
}  // namespace sim

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace sim;
  register_as<Policy::lower_precision>(m, kLower);
  register_as<Policy::full_precision>(m, kFull);
  register_as<Policy::full_result>(m, kFullResult);
  register_as<Policy::promote>(m, kPromote);
}
