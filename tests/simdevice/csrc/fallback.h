// The boxed fallback: any operator runs as its CPU kernel, over CPU views of its arguments.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include <optional>

#include "alias.h"
#include "generator.h"
#include "launch.h"

namespace simdevice {

// Operators that take CPU index tensors, as on CUDA.
inline bool accepts_cpu_indices(const std::string& name) {
  return name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_" ||
      name == "aten::index_put" || name == "aten::_unsafe_index";
}

// Operators whose result's shape the host must know: they block the host, as on a GPU.
inline bool blocks_host(const std::string& name) {
  return name == "aten::nonzero" || name == "aten::masked_select" || starts_with(name, "aten::unique") ||
      starts_with(name, "aten::_unique");
}

class FallbackCall {
 public:
  FallbackCall(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(*stack), schema_(op.schema()), name_(schema_.name()),
        first_(stack->size() - schema_.arguments().size()) {}

  void run() {
    take_arguments();
    take_generators();
    std::optional<Launch> launch;
    {
      Lock lock(machine().mutex);
      launch.emplace(device_, name_);
      for (const Argument& a : arguments_) a.write ? launch->write(a.tensor) : launch->read(a.tensor);
      launch->start();
    }
    {
      at::AutoDispatchBelowAutograd below_autograd;
      op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack_);
    }
    for (const Argument& a : arguments_)
      if (a.write) alias_.write_back(a.tensor, a.view);
    Lock lock(machine().mutex);
    const bool host_needs_result = give_results(*launch) || blocks_host(name_);
    launch->finish(flops_of(name_, inputs_, outputs_));
    if (host_needs_result) host_wait(launch->stream().time, launch->stream().seen);
  }

 private:
  struct Argument {
    Tensor tensor, view;
    bool write;
  };

  Tensor take(const Tensor& tensor, bool write) {
    if (!tensor.defined()) return tensor;
    inputs_.push_back(tensor);
    if (tensor.device().type() != kSim) {
      // As on CUDA, CPU scalars may be mixed with device tensors.
      if (tensor.device().type() == c10::kCPU && tensor.dim() > 0) cpu_seen_ = true;
      return tensor;
    }
    const int index = tensor.device().index();
    TORCH_CHECK(
        device_ < 0 || device_argument_ || device_ == index,
        "Expected all tensors to be on the same device, but found at least two devices, sim:", device_, " and ",
        tensor.device(), "! (when calling ", name_, ")");
    device_ = index;
    arguments_.push_back({tensor, alias_.cpu(tensor), write});
    return arguments_.back().view;
  }

  void take_arguments() {
    const auto& declared = schema_.arguments();
    for (size_t i = 0; i < declared.size(); ++i) {
      c10::IValue& value = stack_[first_ + i];
      const bool write = declared[i].alias_info() && declared[i].alias_info()->isWrite();
      if (value.isTensor()) {
        value = take(value.toTensor(), write);
      } else if (value.isTensorList()) {
        auto tensors = value.toTensorVector();
        for (Tensor& tensor : tensors) tensor = take(tensor, write);
        value = c10::IValue(std::move(tensors));
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> tensors;
        for (std::optional<Tensor> tensor : value.toOptionalTensorList())
          tensors.push_back(tensor && tensor->defined() ? std::optional<Tensor>(take(*tensor, write)) : tensor);
        value = c10::IValue(std::move(tensors));
      } else if (value.isDevice() && value.toDevice().type() == kSim) {
        const Device wanted = value.toDevice();
        if (device_ < 0) device_ = wanted.index() < 0 ? current_device : wanted.index();
        device_argument_ = true;
        value = c10::IValue(Device(c10::kCPU));
      }
    }
    TORCH_CHECK(device_ >= 0, "simdevice: no device tensor in a call of ", name_);
    TORCH_CHECK(
        !cpu_seen_ || accepts_cpu_indices(name_),
        "Expected all tensors to be on the same device, but found at least two devices, sim:", device_,
        " and cpu! (when calling ", name_, ")");
  }

  void take_generators() {
    const auto& declared = schema_.arguments();
    for (size_t i = 0; i < declared.size(); ++i) {
      if (declared[i].name() != "generator") continue;
      c10::IValue& value = stack_[first_ + i];
      if (value.isGenerator()) {
        const at::Generator generator = value.toGenerator();
        TORCH_CHECK(
            generator.device().type() == kSim, "Expected a 'sim' device type for generator but found '",
            generator.device().type(), "'");
        value = cpu_generator(generator);
      } else if (value.isNone()) {
        value = cpu_generator(default_generator(device_));
      }
    }
  }

  Tensor give(const Tensor& result, Launch& launch) {
    if (!result.defined()) return result;
    outputs_ = std::max(outputs_, result.numel());
    for (const Argument& a : arguments_)
      if (a.view.unsafeGetTensorImpl() == result.unsafeGetTensorImpl()) return a.tensor;
    const bool fresh = alias_.is_fresh(result);
    Tensor tensor = alias_.device(result, device_);
    if (fresh) launch.write(tensor);
    return tensor;
  }

  // Put device tensors on the stack. Returns whether there is a result that only the host can hold.
  bool give_results(Launch& launch) {
    const size_t count = schema_.returns().size();
    bool host_only = false;
    for (size_t i = stack_.size() - count; i < stack_.size(); ++i) {
      c10::IValue& value = stack_[i];
      if (value.isTensor()) {
        value = give(value.toTensor(), launch);
      } else if (value.isTensorList()) {
        auto tensors = value.toTensorVector();
        for (Tensor& tensor : tensors) tensor = give(tensor, launch);
        value = c10::IValue(std::move(tensors));
      } else if (!value.isNone()) {
        host_only = true;
      }
    }
    return host_only;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  const c10::FunctionSchema& schema_;
  const std::string& name_;
  const size_t first_;
  Alias alias_;
  int device_ = -1;
  bool cpu_seen_ = false, device_argument_ = false;
  std::vector<Argument> arguments_;
  c10::SmallVector<Tensor, 8> inputs_;
  int64_t outputs_ = 0;
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { FallbackCall(op, stack).run(); }

}  // namespace simdevice
