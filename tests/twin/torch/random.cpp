#include "random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/TensorBase.h>

#include <array>

namespace sim {

Random::Random(DeviceIndex device)
    : GeneratorImpl(c10::Device(kSim, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

void Random::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

uint64_t Random::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

void Random::set_state(const c10::TensorImpl& state) {
  TORCH_CHECK(state.numel() == 2 * sizeof(uint64_t), "sim: the state of a generator has 16 bytes");
  const auto* const words = static_cast<const uint64_t*>(state.data());
  seed_ = words[0];
  offset_ = words[1];
}

c10::intrusive_ptr<c10::TensorImpl> Random::get_state() const {
  auto state = at::detail::empty_cpu({2 * sizeof(uint64_t)}, at::kByte);
  auto* const words = static_cast<uint64_t*>(state.mutable_data_ptr());
  words[0] = seed_;
  words[1] = offset_;
  return state.getIntrusivePtr();
}

Random* Random::clone_impl() const {
  auto* const copy = new Random(device().index());
  copy->seed_ = seed_;
  copy->offset_ = offset_;
  return copy;
}

at::Generator Random::next() {
  constexpr uint64_t kSpread = 0x9E3779B97F4A7C15U;
  return at::detail::createCPUGenerator(seed_ * kSpread + ++offset_);
}

const at::Generator& default_generator(DeviceIndex device) {
  static const auto* const generators =
      new std::array<at::Generator, kDevices>{at::make_generator<Random>(DeviceIndex{0}), at::make_generator<Random>(DeviceIndex{1})};
  return (*generators)[static_cast<size_t>(device < 0 ? current_device() : device)];
}

}  // namespace sim

#pragma GCC visibility push(default)
extern "C" {

void sim_seed(int device, uint64_t seed) {
  sim::default_generator(static_cast<c10::DeviceIndex>(device)).get<sim::Random>()->set_current_seed(seed);
}

// Seed and offset.
void sim_random_state(int device, uint64_t* state) {
  const auto* const random = sim::default_generator(static_cast<c10::DeviceIndex>(device)).get<sim::Random>();
  state[0] = random->current_seed();
  state[1] = random->get_offset();
}

void sim_set_random_state(int device, const uint64_t* state) {
  auto* const random = sim::default_generator(static_cast<c10::DeviceIndex>(device)).get<sim::Random>();
  random->set_current_seed(state[0]);
  random->set_offset(state[1]);
}
}
#pragma GCC visibility pop
