// The device's random generator: a CPU generator inside, so that one seed gives the CPU's numbers.
#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include "state.h"

namespace simdevice {

struct SimGenerator final : c10::GeneratorImpl {
  at::Generator inner;

  explicit SimGenerator(DeviceIndex device, at::Generator cpu = at::detail::createCPUGenerator())
      : GeneratorImpl(Device(kSim, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(cpu)) {}

  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  SimGenerator* clone_impl() const override { return new SimGenerator(device_.index(), inner.clone()); }
};

inline at::Generator& default_generator(int device) {
  Lock lock(machine().mutex);
  at::Generator& generator = machine().devices[device].generator;
  if (!generator.defined()) generator = at::make_generator<SimGenerator>(static_cast<DeviceIndex>(device));
  return generator;
}

inline at::Generator cpu_generator(const at::Generator& generator) {
  return static_cast<SimGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
}

}  // namespace simdevice
