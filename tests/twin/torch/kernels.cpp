// The operators that a backend has to bring itself: memory, views, copies, and a few that accelerators alone have.
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <thread>

#include "allocator.h"
#include "cost.h"
#include "operators.h"
#include "pinned.h"
#include "place.h"

namespace sim {
namespace {

using at::Tensor;

// -- memory ---------------------------------------------------------------------------------------------------------------

c10::Device device_or_current(std::optional<at::Device> device) {
  return device && device->has_index() ? *device : c10::Device(kSim, current_device());
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, &allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  const auto offset = static_cast<size_t>(self.storage_offset());
  const size_t bytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), offset);
  if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  const auto items = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {items}, {});
}

Tensor& set_nothing(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  const auto how = c10::Storage::use_byte_size_t();
  return set_whole_storage(self, c10::Storage(how, 0, allocator().allocate(0), &allocator(), true));
}

void record_stream(Tensor& self, c10::Stream stream) { allocator().recordStream(self.storage().data_ptr(), stream); }

// -- copies ---------------------------------------------------------------------------------------------------------------

// Whether a copy is one of bytes, as they lie.
bool is_plain(const Tensor& from, const Tensor& to) {
  return from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg() && from.scalar_type() == to.scalar_type() &&
         from.strides() == to.strides() && from.is_non_overlapping_and_dense();
}

void copy_within(const Tensor& from, const Tensor& to) {
  const c10::Stream stream = current_stream(to.device().index());
  const Place source(from), target(to);
  source.touch(stream, false, "copy_");
  target.touch(stream, true, "copy_");
  spend(stream, nullptr, {from, to}, {}, {});
  launch(stream, [source, target] { target.tensor().copy_(source.tensor()); });
}

// Through the host: read on the source's stream; what is queued on the target's goes on when it has been written.
void copy_between(const Tensor& from, const Tensor& to) {
  const c10::Stream reader = current_stream(from.device().index()), writer = current_stream(to.device().index());
  const Place source(from), target(to);
  source.touch(reader, false, "copy between devices");
  const auto staged = std::make_shared<Tensor>();
  sim_spend_copy(handle_of(reader), 1, from.nbytes());
  launch(reader, [source, staged] { *staged = source.tensor().clone(); });
  const EventHandle read = sim_event_create();
  sim_event_record(read, handle_of(reader));
  sim_event_wait(read, handle_of(writer));
  sim_event_destroy(read);
  target.touch(writer, true, "copy between devices");
  sim_spend_copy(handle_of(writer), 0, to.nbytes());
  launch(writer, [target, staged] { target.tensor().copy_(*staged); });
}

void copy_in(const Tensor& from, const Tensor& to, bool non_blocking) {
  const c10::Stream stream = current_stream(to.device().index());
  const Place target(to);
  target.touch(stream, true, "copy_");
  sim_spend_copy(handle_of(stream), 0, to.nbytes());
  if (is_plain(from, to) && is_pinned(from.const_data_ptr())) {
    const auto* const source = static_cast<const char*>(from.const_data_ptr());
    sim_touch(handle_of(stream), source, from.nbytes(), 0, "copy_ from pinned memory");
    launch(stream, [source, bytes = from.nbytes(), target] { std::memcpy(target.view(), source, bytes); });
    hold_pinned(from, stream);
  } else {  // pageable memory: staged before the call returns
    launch(stream, [staged = from.clone(), target] { target.tensor().copy_(staged); });
  }
  if (!non_blocking) synchronize(stream);
}

void copy_out(const Tensor& from, const Tensor& to, bool non_blocking) {
  const c10::Stream stream = current_stream(from.device().index());
  const Place source(from);
  source.touch(stream, false, "copy_");
  sim_spend_copy(handle_of(stream), 1, from.nbytes());
  if (non_blocking && is_plain(from, to) && is_pinned(to.const_data_ptr())) {
    auto* const target = static_cast<char*>(to.mutable_data_ptr());
    sim_touch(handle_of(stream), target, to.nbytes(), 1, "copy_ to pinned memory");
    launch(stream, [target, bytes = to.nbytes(), source] { std::memcpy(target, source.view(), bytes); });
    hold_pinned(to, stream);
    return;
  }
  const auto staged = std::make_shared<Tensor>();  // the target may be Python's, which a stream's thread must not free
  launch(stream, [source, staged] { *staged = source.tensor().clone(); });
  synchronize(stream);
  to.copy_(*staged);
}

Tensor copy_from(const Tensor& given, const Tensor& to, bool non_blocking) {
  const LibraryTime time;
  const Tensor from = given.sizes() == to.sizes() ? given : given.expand(to.sizes());
  if (to.numel() == 0) return to;
  if (!on_device(to)) {
    copy_out(from, to, non_blocking);
  } else if (!on_device(from)) {
    copy_in(from, to, non_blocking);
  } else if (from.device() == to.device()) {
    copy_within(from, to);
  } else {
    copy_between(from, to);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& self) {
  const Tensor value = at::empty({}, at::TensorOptions(self.scalar_type()));
  copy_out(self.reshape({}), value, false);
  return at::native::_local_scalar_dense_cpu(value);
}

// -- what torch asks of a backend under a name of its own, and the CPU has under another ----------------------------------

Tensor convolve(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                   c10::IntArrayRef output_padding, int64_t groups) {
  static const auto op = find_operator("aten::convolution");
  Stack stack{input, weight, bias, stride, padding, dilation, transposed, output_padding, groups};
  compute(op, &stack);
  return stack[0].toTensor();
}

std::tuple<Tensor, Tensor, Tensor> convolve_backward(const Tensor& gradient, const Tensor& input,
                                                        const Tensor& weight, c10::IntArrayRef stride,
                                                        c10::IntArrayRef padding, c10::IntArrayRef dilation,
                                                        bool transposed, c10::IntArrayRef output_padding,
                                                        int64_t groups, std::array<bool, 3> mask) {
  static const auto op = find_operator("aten::convolution_backward");
  const std::vector<int64_t> bias{transposed ? weight.size(1) * groups : weight.size(0)};
  Stack stack{gradient,   input,          weight, c10::OptionalArray<int64_t>(bias).list, stride, padding, dilation,
              transposed, output_padding, groups, c10::List<bool>({mask[0], mask[1], mask[2]})};
  compute(op, &stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}

int64_t attention_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;  // by its formula
}

std::tuple<Tensor, Tensor> dropout(const Tensor& input, double p, std::optional<bool>) {
  const Tensor kept = at::bernoulli(at::empty_like(input), 1 - p).to(at::kBool);
  return {at::mul(input, kept).mul_(p == 1 ? 0 : 1 / (1 - p)), kept};
}

}  // namespace
}  // namespace sim

// A copy of a lazy conjugate is a copy: it must not be resolved by a copy first.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using namespace sim;
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_", set_nothing);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("view", at::native::view);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  m.impl("_fused_sdp_choice", attention_choice);
  m.impl("convolution_overrideable", convolve);
  m.impl("convolution_backward_overrideable", convolve_backward);
  m.impl("native_dropout", dropout);
  // Torch would compute them of other operators, which rounds otherwise than the CPU's kernel.
  for (const char* name : {"native_layer_norm", "native_group_norm", "addr", "addr.out", "_stack", "_stack.out",
                           "all.dims", "all.dims_out", "any.dims", "any.dims_out", "linalg__powsum", "mish_backward",
                           "silu_backward", "native_channel_shuffle",
                           // Their results' sizes are told too late.
                           "mse_loss", "smooth_l1_loss"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

#pragma GCC visibility push(default)
extern "C" void sim_sleep(unsigned microseconds) {
  if (sim_clock_is_on() != 0) return sim_spend_seconds(sim::handle_of(sim::current_stream()), 1e-6 * microseconds);
  sim::launch(sim::current_stream(), [=] { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); });
}
#pragma GCC visibility pop
