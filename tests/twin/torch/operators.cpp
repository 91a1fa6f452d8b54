#include "operators.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "cost.h"
#include "place.h"
#include "random.h"

namespace sim {
namespace {

using c10::IValue;

// -- what of an operator does not depend on the call --------------------------------------------------------------------

struct Kind {
  const char* name = "";
  Flops flops = nullptr;
  std::vector<bool> written;      // by argument
  std::vector<int> passes;        // by argument: over its bytes
  std::vector<int> returned;      // by result: the argument that it is, or -1
  std::vector<size_t> outs;       // arguments that are resized to hold a result
  std::optional<size_t> generator;
  bool makes_only_tensors = true;
  bool makes_nothing = true;      // but writes to arguments
};

// The argument that a result is.
int argument_of(const c10::OperatorHandle& op, const c10::AliasInfo& alias) {
  const auto& arguments = op.schema().arguments();
  TORCH_CHECK(alias.isWrite(), "sim: a view that is not registered: ", op.operator_name());
  for (size_t each = 0; each < arguments.size(); ++each)
    if (arguments[each].alias_info() != nullptr && *arguments[each].alias_info() == alias) return static_cast<int>(each);
  TORCH_CHECK(false, "sim: a result that is none of the arguments: ", op.operator_name());
}

Kind make_kind(const c10::OperatorHandle& op) {
  Kind kind;
  kind.name = strdup(toString(op.operator_name()).c_str());
  kind.flops = flops_of(kind.name);
  const auto& arguments = op.schema().arguments();
  for (size_t each = 0; each < arguments.size(); ++each) {
    const auto* const alias = arguments[each].alias_info();
    kind.written.push_back(alias != nullptr && alias->isWrite());
    kind.passes.push_back(kind.written.back() && !arguments[each].is_out() ? 2 : 1);
    if (arguments[each].type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get())))
      kind.generator = each;
    if (arguments[each].is_out()) kind.outs.push_back(each);
  }
  for (const auto& result : op.schema().returns()) {
    const auto* const alias = result.alias_info();
    kind.returned.push_back(alias == nullptr ? -1 : argument_of(op, *alias));
    if (alias != nullptr) continue;
    kind.makes_nothing = false;
    kind.makes_only_tensors = kind.makes_only_tensors && (result.type()->isSubtypeOf(*c10::TensorType::get()) ||
                                                          result.type()->isSubtypeOf(*c10::ListType::ofTensors()));
  }
  // Its meta kernel tells the shapes of another device's by-products: the host waits for the CPU's.
  if (std::strstr(kind.name, "aten::_embedding_bag") != nullptr) kind.makes_only_tensors = false;
  return kind;
}

const Kind& kind_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto& known = *new std::unordered_map<c10::OperatorName, Kind>;
  const std::lock_guard lock(mutex);
  const auto found = known.find(op.operator_name());
  return found != known.end() ? found->second : known.emplace(op.operator_name(), make_kind(op)).first->second;
}

// -- arguments, as queued work holds them -------------------------------------------------------------------------------

struct Held {
  IValue value;                              // what is no tensor of a device
  std::vector<std::optional<Place>> places;  // of the one tensor, or of a list's
  bool is_list = false;

  IValue told() const {
    if (places.empty()) return value;
    if (!is_list) return IValue(places[0]->tensor());
    auto list = value.toList().copy();
    for (size_t each = 0; each < places.size(); ++each)
      if (places[each]) list.set(each, IValue(places[each]->tensor()));
    return IValue(list);
  }
};

// A tensor of the host: what it is now.
at::Tensor copy_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  at::Tensor copy = tensor.clone();
  copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return copy;
}

Held hold(const IValue& argument) {
  Held held;
  if (argument.isTensor()) {
    const at::Tensor& tensor = argument.toTensor();
    if (on_device(tensor)) {
      held.places.emplace_back(Place(tensor));
    } else {
      held.value = copy_of(tensor);
    }
  } else if (argument.isTensorList() || argument.isOptionalTensorList()) {
    held.is_list = true;
    auto values = argument.isTensorList() ? c10::impl::GenericList(c10::TensorType::get())
                                          : c10::impl::GenericList(c10::OptionalType::ofTensor());
    for (const IValue& each : argument.toListRef()) {
      const bool is_place = each.isTensor() && on_device(each.toTensor());
      held.places.push_back(is_place ? std::make_optional<Place>(each.toTensor()) : std::nullopt);
      values.push_back(is_place ? IValue(at::Tensor()) : each.isTensor() ? IValue(copy_of(each.toTensor())) : each);
    }
    held.value = IValue(values);
  } else if (argument.isGenerator()) {
    held.value = IValue(argument.toGenerator().get<Random>()->next());
  } else if (argument.isDevice()) {
    held.value = IValue(c10::Device(at::kCPU));
  } else {
    held.value = argument;
  }
  return held;
}

// -- shapes -------------------------------------------------------------------------------------------------------------

at::Tensor as_meta(const at::Tensor& tensor) {
  if (!tensor.defined() || (tensor.dim() == 0 && tensor.is_cpu())) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
}

IValue meta_of(const IValue& argument) {
  if (argument.isTensor()) return IValue(as_meta(argument.toTensor()));
  if (argument.isTensorList() || argument.isOptionalTensorList()) {
    auto list = argument.toList().copy();
    for (size_t each = 0; each < list.size(); ++each) {
      const IValue value = list.get(each);
      if (value.isTensor()) list.set(each, IValue(as_meta(value.toTensor())));
    }
    return IValue(list);
  }
  if (argument.isDevice()) return IValue(c10::Device(at::kMeta));
  return argument.isGenerator() ? IValue() : argument;
}

std::array<std::atomic<long>, 3> counts{};  // launched, of which by a meta kernel, of which the host waited for

// Nothing where shapes depend on values, or nobody tells them.
std::optional<Stack> tell_shapes(const c10::OperatorHandle& op, const Stack& arguments) {
  ++counts[1];
  Stack shapes;
  for (const IValue& each : arguments) shapes.push_back(meta_of(each));
  try {
    op.callBoxed(shapes);
    return shapes;
  } catch (const std::exception&) {  // not implemented, in C++ or in Python; or wrong arguments: the CPU's kernel tells
    return std::nullopt;
  }
}

at::Tensor fresh_like(const at::Tensor& shape, c10::Device device) {
  if (!shape.defined()) return shape;
  return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(device).pinned_memory(false));
}

// -- a call -------------------------------------------------------------------------------------------------------------

struct Computation {
  c10::OperatorHandle op;
  Kernel kernel = nullptr;
  std::vector<Held> arguments;

  Stack run() const {
    const at::AutoDispatchBelowADInplaceOrView below;
    Stack stack;
    for (const Held& each : arguments) stack.push_back(each.told());
    try {
      kernel != nullptr ? kernel(stack) : op.callBoxed(stack);
    } catch (const std::exception& error) {
      TORCH_CHECK(false, toString(op.operator_name()), ": ", error.what());
    }
    return stack;
  }
};

class CallOf {
 public:
  CallOf(const c10::OperatorHandle& op, const Kind& kind, Stack arguments, c10::Stream stream, Kernel kernel)
      : kind_(kind), arguments_(std::move(arguments)), stream_(stream), computation_{op, kernel, {}} {
    if (kind.generator && arguments_[*kind.generator].isNone())
      arguments_[*kind.generator] = IValue(default_generator(stream.device_index()));
    size_outs();
    for (const IValue& each : arguments_) computation_.arguments.push_back(hold(each));
    for (size_t each = 0; each < arguments_.size(); ++each)
      for (const auto& place : computation_.arguments[each].places)
        if (place) place->touch(stream, kind.written[each], kind.name);
    for (const size_t each : late_) {  // it is computed into a tensor of the host
      const auto options = arguments_[each].toTensor().options().device(at::kCPU);
      computation_.arguments[each] = Held{IValue(at::empty({0}, options)), {}, false};
    }
  }

  void run(Stack* stack) {
    ++counts[0];
    bool must_wait = !kind_.makes_only_tensors || !late_.empty();
    std::optional<Stack> shapes;
    if (!must_wait && !kind_.makes_nothing) {
      shapes = tell_shapes(computation_.op, arguments_);
      must_wait = !shapes;
    }
    must_wait ? run_now(stack) : queue(shapes ? *shapes : Stack(kind_.returned.size()), stack);
  }

 private:
  // Empty results are resized, where their shapes are told; the others are late.
  void size_outs() {
    for (const size_t each : kind_.outs)
      if (arguments_[each].isTensor() && arguments_[each].toTensor().numel() == 0) late_.push_back(each);
    if (late_.empty()) return;
    const auto shapes = tell_shapes(computation_.op, arguments_);
    if (!shapes) return;
    for (size_t each = 0; each < kind_.outs.size(); ++each)
      arguments_[kind_.outs[each]].toTensor().resize_((*shapes)[each].toTensor().sizes());
    late_.clear();
  }

  void queue(const Stack& shapes, Stack* stack) {
    Stack made;
    std::vector<std::vector<std::optional<Place>>> places(kind_.returned.size());
    for (size_t each = 0; each < kind_.returned.size(); ++each) {
      if (kind_.returned[each] >= 0) {
        stack->push_back(arguments_[static_cast<size_t>(kind_.returned[each])]);
      } else if (shapes[each].isTensor()) {
        made.push_back(make(shapes[each].toTensor(), places[each]));
        stack->push_back(made.back());
      } else if (shapes[each].isNone()) {
        stack->push_back(make(at::Tensor(), places[each]));
      } else {
        std::vector<at::Tensor> list;
        for (const at::Tensor& shape : shapes[each].toTensorVector()) list.push_back(make(shape, places[each]));
        made.push_back(list);
        stack->push_back(std::move(list));
      }
    }
    spend(stream_, kind_.flops, arguments_, kind_.passes, made);
    launch(stream_, [computation = std::move(computation_), places = std::move(places)] {
      const Stack found = computation.run();
      const at::AutoDispatchBelowADInplaceOrView below;
      for (size_t each = 0; each < places.size(); ++each) {
        if (places[each].empty()) continue;
        const auto values = found[each].isTensor() ? std::vector<at::Tensor>{found[each].toTensor()}
                            : found[each].isNone() ? std::vector<at::Tensor>(1)
                                                   : found[each].toTensorVector();
        for (size_t part = 0; part < places[each].size(); ++part)
          if (places[each][part] && values[part].defined() && values[part].numel() > 0)
            places[each][part]->tensor().copy_(values[part]);
      }
    });
  }

  at::Tensor make(const at::Tensor& shape, std::vector<std::optional<Place>>& places) const {
    const at::Tensor made = fresh_like(shape, stream_.device());
    places.push_back(made.defined() ? std::make_optional<Place>(made) : std::nullopt);
    if (made.defined()) places.back()->touch(stream_, true, kind_.name);
    return made;
  }

  // The host needs to know: as on a GPU, it waits. An error of such work is the caller's, and no failure of the device.
  void run_now(Stack* stack) {
    ++counts[2];
    const auto found = std::make_shared<Stack>();
    const auto failure = std::make_shared<std::exception_ptr>();
    spend(stream_, nullptr, arguments_, kind_.passes, {});
    launch(stream_, [computation = std::move(computation_), found, failure] {
      try {
        *found = computation.run();
      } catch (...) {
        *failure = std::current_exception();
      }
    });
    synchronize(stream_);
    if (*failure) std::rethrow_exception(*failure);
    for (size_t each = 0; each < kind_.returned.size(); ++each) stack->push_back(take_home((*found)[each], each));
  }

  IValue take_home(const IValue& value, size_t result) const {
    if (kind_.returned[result] >= 0) {
      const auto argument = static_cast<size_t>(kind_.returned[result]);
      const IValue& given = arguments_[argument];
      if (std::find(late_.begin(), late_.end(), argument) != late_.end())
        given.toTensor().resize_(value.toTensor().sizes()).copy_(value.toTensor());
      return given;
    }
    const auto one = [&](const at::Tensor& tensor) {
      const at::Tensor made = fresh_like(tensor, stream_.device());
      if (made.defined()) made.copy_(tensor);
      return made;
    };
    if (value.isTensor()) return IValue(one(value.toTensor()));
    if (!value.isTensorList()) return value;
    std::vector<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(one(each));
    return IValue(std::move(list));
  }

  const Kind& kind_;
  Stack arguments_;
  const c10::Stream stream_;
  Computation computation_;
  std::vector<size_t> late_;
};

// Where a call computes: where its tensors are, or the device it names. As on a GPU, tensors of the host may be numbers
// or, for operators on indices, indices.
c10::Device device_of_call(const Kind& kind, const Stack& arguments) {
  std::optional<c10::Device> device, named;
  bool has_host = false;
  const auto see = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    has_host = has_host || (tensor.is_cpu() && tensor.dim() > 0);
    if (!on_device(tensor)) return;
    TORCH_CHECK(!device || *device == tensor.device(), kind.name,
                ": Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                tensor.device(), "!");
    device = tensor.device();
  };
  for (const IValue& each : arguments) {
    if (each.isTensor()) see(each.toTensor());
    if (each.isTensorList() || each.isOptionalTensorList())
      for (const IValue& part : each.toListRef())
        if (part.isTensor()) see(part.toTensor());
    if (each.isDevice() && each.toDevice().type() == kSim) named = each.toDevice();
  }
  TORCH_CHECK(!has_host || !device || std::strstr(kind.name, "index") != nullptr, kind.name,
              ": Expected all tensors to be on the same device, but found at least two devices, ", *device, " and cpu!");
  if (!device && named && named->has_index()) device = named;
  return device.value_or(c10::Device(kSim, current_device()));
}

}  // namespace

void compute(const c10::OperatorHandle& op, Stack* stack, Kernel kernel) {
  const LibraryTime time;
  const at::AutoDispatchBelowADInplaceOrView below;
  const Kind& kind = kind_of(op);
  const size_t count = op.schema().arguments().size();
  Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  torch::jit::drop(*stack, count);
  const c10::DeviceGuard guard(device_of_call(kind, arguments));
  CallOf(op, kind, std::move(arguments), current_stream(), kernel).run(stack);
}

void fallback(const c10::OperatorHandle& op, Stack* stack) { compute(op, stack); }

}  // namespace sim

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::fallback>()); }

#pragma GCC visibility push(default)
extern "C" void sim_counts(long* out) {
  for (size_t each = 0; each < sim::counts.size(); ++each) out[each] = sim::counts[each];
}
#pragma GCC visibility pop
