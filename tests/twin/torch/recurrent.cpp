// Recurrent layers as the CPU has them: the inputs' part of all gates in one product, and then step after step. Torch's
// own code takes fused cells on every other device, which sum in another order; projections and packed sequences still do.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/lstm_native.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include <algorithm>

namespace sim {
namespace {

using at::Tensor;

struct State {
  Tensor hidden, cell;
};

struct Weights {
  Tensor of_input, of_hidden, input_bias, hidden_bias;
};

using Cell = State (*)(const Tensor& from_input, const State& before, const Weights& weights);

State lstm_cell(const Tensor& from_input, const State& before, const Weights& weights) {
  auto gates = at::linear(before.hidden, weights.of_hidden, weights.hidden_bias).add_(from_input).unsafe_chunk(4, 1);
  const Tensor in = gates[0].sigmoid_(), forget = gates[1].sigmoid_(), fresh = gates[2].tanh_(), out = gates[3].sigmoid_();
  const Tensor cell = (forget * before.cell).add_(in * fresh);
  return {out * cell.tanh(), cell};
}

State gru_cell(const Tensor& from_input, const State& before, const Weights& weights) {
  const auto input = from_input.unsafe_chunk(3, 1);
  auto hidden = at::linear(before.hidden, weights.of_hidden, weights.hidden_bias).unsafe_chunk(3, 1);
  const Tensor reset = hidden[0].add_(input[0]).sigmoid_(), update = hidden[1].add_(input[1]).sigmoid_();
  const Tensor fresh = input[2].add(hidden[2].mul_(reset)).tanh_();
  return {(before.hidden - fresh).mul_(update).add_(fresh), {}};
}

struct Shape {
  bool has_biases;
  double dropout;
  bool trains, is_bidirectional, is_batch_first;
};

Weights weights_of(at::TensorList params, size_t number, bool has_biases) {
  const Tensor* const first = &params[number * (has_biases ? 4 : 2)];
  return has_biases ? Weights{first[0], first[1], first[2], first[3]} : Weights{first[0], first[1], {}, {}};
}

// The outputs of one direction of one layer; `state` is its first and then its last.
Tensor run(const Tensor& inputs, State& state, const Weights& weights, Cell cell, bool is_reversed) {
  std::vector<Tensor> steps = at::linear(inputs, weights.of_input, weights.input_bias).unbind(0);
  if (is_reversed) std::reverse(steps.begin(), steps.end());
  for (Tensor& step : steps) {
    state = cell(step, state, weights);
    step = state.hidden;
  }
  if (is_reversed) std::reverse(steps.begin(), steps.end());
  return at::stack(steps, 0);
}

// Outputs of the last layer; `states`, by layer and direction, are the first and then the last.
Tensor run_layers(Tensor x, std::vector<State>& states, at::TensorList params, const Shape& shape, Cell cell) {
  if (shape.is_batch_first) x = x.transpose(0, 1);
  const size_t directions = shape.is_bidirectional ? 2 : 1;
  for (size_t first = 0; first < states.size(); first += directions) {
    std::vector<Tensor> outputs;
    for (size_t each = first; each < first + directions; ++each)
      outputs.push_back(run(x, states[each], weights_of(params, each, shape.has_biases), cell, each > first));
    x = directions == 1 ? outputs[0] : at::cat(outputs, outputs[0].dim() - 1);
    if (shape.dropout > 0 && shape.trains && first + directions < states.size())
      x = at::dropout(x, shape.dropout, true);
  }
  return shape.is_batch_first ? x.transpose(0, 1) : x;
}

std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& input, at::TensorList before, at::TensorList params,
                                        bool has_biases, int64_t layers, double dropout, bool trains,
                                        bool is_bidirectional, bool is_batch_first) {
  if (before[0].size(2) != before[1].size(2))
    return at::native::lstm(input, before, params, has_biases, layers, dropout, trains, is_bidirectional,
                            is_batch_first);
  std::vector<State> states;
  const auto hidden = before[0].unbind(0), cells = before[1].unbind(0);
  for (size_t each = 0; each < hidden.size(); ++each) states.push_back({hidden[each], cells[each]});
  const Shape shape{has_biases, dropout, trains, is_bidirectional, is_batch_first};
  const Tensor output = run_layers(input, states, params, shape, lstm_cell);
  std::vector<Tensor> last_hidden, last_cells;
  for (const State& state : states) {
    last_hidden.push_back(state.hidden);
    last_cells.push_back(state.cell);
  }
  return {output, at::stack(last_hidden, 0), at::stack(last_cells, 0)};
}

std::tuple<Tensor, Tensor> gru(const Tensor& input, const Tensor& before, at::TensorList params, bool has_biases,
                               int64_t, double dropout, bool trains, bool is_bidirectional,
                               bool is_batch_first) {
  std::vector<State> states;
  for (const Tensor& each : before.unbind(0)) states.push_back({each, {}});
  const Shape shape{has_biases, dropout, trains, is_bidirectional, is_batch_first};
  const Tensor output = run_layers(input, states, params, shape, gru_cell);
  std::vector<Tensor> last;
  for (const State& state : states) last.push_back(state.hidden);
  return {output, at::stack(last, 0)};
}

}  // namespace
}  // namespace sim

// Of operators that autograd knows: with gradients and, in inference mode, without.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("lstm.input", sim::lstm);
  m.impl("gru.input", sim::gru);
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("lstm.input", sim::lstm);
  m.impl("gru.input", sim::gru);
}
