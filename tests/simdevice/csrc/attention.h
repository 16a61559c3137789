// Scaled dot product attention: the CPU chooses the kernel, so that the numbers are the CPU's.
#pragma once

#include <ATen/SDPBackend.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>

#include "alias.h"
#include "launch.h"

namespace simdevice {

inline int64_t attention_choice(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout,
    bool causal, std::optional<double> scale, bool grouped_heads) {
  for (const Tensor* tensor : {&query, &key, &value})
    if (tensor->device() != query.device()) return static_cast<int64_t>(at::SDPBackend::math);  // raises in its turn
  // The CPU's own choice. It looks at shapes, dtypes and whether gradients are wanted, so it does for tensors without
  // data too, with which the compiler traces.
  const int64_t choice =
      at::native::_fused_sdp_choice_cpp(query, key, value, mask, dropout, causal, scale, grouped_heads);
  const bool flash = choice == static_cast<int64_t>(at::SDPBackend::flash_attention);
  return static_cast<int64_t>(flash ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

using AttentionResult =
    std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

// Returns output, log-sum-exp, and what other backends need for their backward pass.
inline AttentionResult attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& bias, double dropout,
    bool causal, bool, std::optional<double> scale) {
  Alias alias;
  const int device = query.device().index();
  std::optional<Launch> launch;
  {
    Lock lock(machine().mutex);
    launch.emplace(device, "attention");
    for (const Tensor* tensor : {&query, &key, &value}) launch->read(*tensor);
    if (bias) launch->read(*bias);
    launch->start();
  }
  at::AutoDispatchBelowAutograd below_autograd;
  auto [output, log_sum_exp] = at::_scaled_dot_product_flash_attention_for_cpu(
      alias.cpu(query), alias.cpu(key), alias.cpu(value), dropout, causal, alias.cpu(bias), scale);
  Lock lock(machine().mutex);
  Tensor device_output = alias.device(output, device), device_sums = alias.device(log_sum_exp, device), none;
  launch->write(device_output);
  launch->write(device_sums);
  launch->finish(flops_of("attention", {query, key}, 0));
  return {device_output, device_sums, none, none, query.size(2), key.size(2), none, none, none};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias,
    std::array<bool, 4>, const Tensor& output, const Tensor& log_sum_exp, const Tensor&, const Tensor&, int64_t,
    int64_t, double dropout, bool causal, const Tensor&, const Tensor&, std::optional<double> scale) {
  Alias alias;
  const int device = query.device().index();
  std::optional<Launch> launch;
  {
    Lock lock(machine().mutex);
    launch.emplace(device, "attention_backward");
    for (const Tensor* tensor : {&grad, &query, &key, &value, &bias, &output, &log_sum_exp}) launch->read(*tensor);
    launch->start();
  }
  at::AutoDispatchBelowAutograd below_autograd;
  auto [for_query, for_key, for_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      alias.cpu(grad), alias.cpu(query), alias.cpu(key), alias.cpu(value), alias.cpu(output), alias.cpu(log_sum_exp),
      dropout, causal, alias.cpu(std::optional<Tensor>(bias)), scale);
  Lock lock(machine().mutex);
  launch->finish(2.5 * flops_of("attention", {query, key}, 0));
  return {alias.device(for_query, device), alias.device(for_key, device), alias.device(for_value, device), Tensor()};
}

}  // namespace simdevice

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &simdevice::attention_choice)
}
