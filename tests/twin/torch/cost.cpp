#include "cost.h"

#include <string>
#include <unordered_map>

#include "place.h"

namespace sim {
namespace {

double numel(const c10::IValue& value) { return static_cast<double>(value.toTensor().numel()); }
double size(const c10::IValue& value, int64_t dimension) { return static_cast<double>(value.toTensor().size(dimension)); }

template <size_t kLeft>
double product(const Stack& arguments, const Stack&) {
  return 2 * numel(arguments[kLeft]) * size(arguments[kLeft + 1], -1);
}

// Each element of the forward pass's output, transposed: of its input, takes one weight's worth for its channel.
double convolved(const c10::IValue& weight, const c10::IValue& output, const c10::IValue& input, bool transposed) {
  return 2 * numel(transposed ? input : output) * numel(weight) / size(weight, 0);
}

double convolution(const Stack& arguments, const Stack& results) {
  return convolved(arguments[1], results[0], arguments[0], arguments[6].toBool());
}

double convolution_backward(const Stack& arguments, const Stack&) {
  const auto wanted = arguments[10].toBoolList();
  const double once = convolved(arguments[2], arguments[0], arguments[1], arguments[7].toBool());
  return once * ((wanted[0] ? 1 : 0) + (wanted[1] ? 1 : 0));
}

double bytes_of(const at::Tensor& tensor) {
  if (!on_device(tensor)) return 0;
  double elements = 1;  // a dimension that is expanded is there once
  for (int64_t each = 0; each < tensor.dim(); ++each)
    if (tensor.stride(each) != 0 || tensor.size(each) == 0) elements *= static_cast<double>(tensor.size(each));
  return elements * static_cast<double>(tensor.itemsize());
}

double bytes_of(const c10::IValue& value) {
  if (value.isTensor()) return bytes_of(value.toTensor());
  if (!value.isTensorList() && !value.isOptionalTensorList()) return 0;
  double bytes = 0;
  for (const c10::IValue& each : value.toListRef())
    if (each.isTensor()) bytes += bytes_of(each.toTensor());
  return bytes;
}

}  // namespace

Flops flops_of(const char* name) {
  static const std::unordered_map<std::string, Flops> known{
      {"aten::mm", product<0>},
      {"aten::mm.out", product<0>},
      {"aten::bmm", product<0>},
      {"aten::bmm.out", product<0>},
      {"aten::addmm", product<1>},
      {"aten::addmm.out", product<1>},
      {"aten::_addmm_activation", product<1>},
      {"aten::_addmm_activation.out", product<1>},
      {"aten::baddbmm", product<1>},
      {"aten::baddbmm.out", product<1>},
      {"aten::convolution", convolution},
      {"aten::convolution_backward", convolution_backward},
  };
  const auto found = known.find(name);
  return found == known.end() ? nullptr : found->second;
}

void spend(c10::Stream stream, Flops flops, const Stack& arguments, const std::vector<int>& passes,
           const Stack& results) {
  if (sim_clock_is_on() == 0) return;
  double bytes = 0;
  for (size_t each = 0; each < arguments.size(); ++each)
    bytes += bytes_of(arguments[each]) * (each < passes.size() ? passes[each] : 1);
  for (const c10::IValue& each : results) bytes += bytes_of(each);
  sim_spend(handle_of(stream), flops == nullptr ? 0 : flops(arguments, results), bytes);
}

}  // namespace sim
