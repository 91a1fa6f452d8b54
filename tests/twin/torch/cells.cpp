// Recurrent cells and a normalization as accelerators have them: what the CPU does in other pieces.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "operators.h"

namespace sim {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

Tensor plus(const Tensor& value, const Optional& bias) {
  return bias && bias->defined() ? value + *bias : value;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& from_input, const Tensor& from_hidden, const Tensor& before,
                                             const Optional& input_bias, const Optional& hidden_bias) {
  const auto gates = plus(plus(from_input + from_hidden, input_bias), hidden_bias).chunk(4, 1);
  const Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  const Tensor state = forget * before + in * cell;
  return {out * state.tanh(), state, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const Optional& to_hidden, const Optional& to_state,
                                                      const Tensor& before, const Tensor& state,
                                                      const Tensor& workspace, bool has_bias) {
  const auto gates = workspace.chunk(4, 1);
  const Tensor &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  const Tensor bent = state.tanh();
  const auto given = [&](const Optional& gradient) {
    return gradient && gradient->defined() ? *gradient : at::zeros_like(state);
  };
  const Tensor hidden = given(to_hidden), total = given(to_state) + hidden * out * (1 - bent * bent);
  const Tensor to_gates = at::cat({total * cell * in * (1 - in), total * before * forget * (1 - forget),
                                   total * in * (1 - cell * cell), hidden * bent * out * (1 - out)},
                                  1);
  return {to_gates, total * forget, has_bias ? to_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& from_input, const Tensor& from_hidden, const Tensor& before,
                                    const Optional& input_bias, const Optional& hidden_bias) {
  const auto input = plus(from_input, input_bias).chunk(3, 1), hidden = plus(from_hidden, hidden_bias).chunk(3, 1);
  const Tensor reset = (hidden[0] + input[0]).sigmoid(), update = (hidden[1] + input[1]).sigmoid();
  const Tensor fresh = (input[2] + hidden[2] * reset).tanh();
  return {(before - fresh) * update + fresh, at::cat({reset, update, fresh, before, hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& gradient, const Tensor& workspace,
                                                                     bool has_bias) {
  const auto parts = workspace.chunk(5, 1);
  const Tensor &reset = parts[0], &update = parts[1], &fresh = parts[2], &before = parts[3], &hidden = parts[4];
  const Tensor to_update = gradient * (before - fresh) * (1 - update) * update;
  const Tensor to_fresh = gradient * (1 - update) * (1 - fresh * fresh);
  const Tensor to_reset = to_fresh * hidden * (1 - reset) * reset;
  const Tensor to_input = at::cat({to_reset, to_update, to_fresh}, 1);
  const Tensor to_hidden = at::cat({to_reset, to_update, to_fresh * reset}, 1);
  return {to_input, to_hidden, gradient * update, has_bias ? to_input.sum(0) : Tensor(),
          has_bias ? to_hidden.sum(0) : Tensor()};
}

// An accelerator keeps mean and deviation of half precision in float; the CPU's kernels want them as they computed them.
void layer_norm_backward(Stack& stack) {
  static const auto op = find_operator("aten::native_layer_norm_backward");
  for (const size_t each : {3, 4}) stack[each] = stack[each].toTensor().to(stack[1].toTensor().scalar_type());
  op.callBoxed(stack);
}

void batch_norm_backward(Stack& stack) {
  static const auto op = find_operator("aten::native_batch_norm_backward");
  const Tensor& kind = stack[2].isTensor() ? stack[2].toTensor() : stack[1].toTensor();
  for (const size_t each : {5, 6})
    if (stack[each].isTensor()) stack[each] = stack[each].toTensor().to(kind.scalar_type());
  op.callBoxed(stack);
}

}  // namespace
}  // namespace sim

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using namespace sim;
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  m.impl("native_layer_norm_backward",
         torch::CppFunction::makeFromBoxedFunction<&with_kernel<layer_norm_backward>>());
  m.impl("native_batch_norm_backward",
         torch::CppFunction::makeFromBoxedFunction<&with_kernel<batch_norm_backward>>());
}
