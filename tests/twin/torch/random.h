// Random numbers of a simulated device: as on a GPU, what is drawn depends on seed and offset, told on the host.
#pragma once

#include <ATen/core/Generator.h>

#include "device.h"

namespace sim {

class Random final : public c10::GeneratorImpl {
 public:
  explicit Random(DeviceIndex device);
  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  // What the next operator draws from, when it runs.
  at::Generator next();

 private:
  Random* clone_impl() const override;
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

const at::Generator& default_generator(DeviceIndex device);

}  // namespace sim
