// Convolution: torch offers backends the "overrideable" pair, which has no CPU kernel to fall back to.
#pragma once

#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>

#include "alias.h"
#include "launch.h"

namespace simdevice {

inline Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
    int64_t groups) {
  Alias alias;
  const int device = input.device().index();
  std::optional<Launch> launch;
  {
    Lock lock(machine().mutex);
    launch.emplace(device, "convolution");
    launch->read(input);
    launch->read(weight);
    if (bias) launch->read(*bias);
    launch->start();
  }
  at::AutoDispatchBelowAutograd below_autograd;
  const Tensor result = at::convolution(
      alias.cpu(input), alias.cpu(weight), alias.cpu(bias), stride, padding, dilation, transposed, output_padding,
      groups);
  Lock lock(machine().mutex);
  Tensor output = alias.device(result, device);
  launch->write(output);
  launch->finish(flops_of(launch->name(), {input, weight}, result.numel()));
  return output;
}

inline std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  Alias alias;
  const int device = input.device().index();
  std::optional<Launch> launch;
  {
    Lock lock(machine().mutex);
    launch.emplace(device, "convolution_backward");
    for (const Tensor* tensor : {&grad, &input, &weight}) launch->read(*tensor);
    launch->start();
  }
  at::AutoDispatchBelowAutograd below_autograd;
  const std::vector<int64_t> bias_shape{transposed ? weight.size(1) * groups : weight.size(0)};
  auto [for_input, for_weight, for_bias] = at::convolution_backward(
      alias.cpu(grad), alias.cpu(input), alias.cpu(weight), at::OptionalIntArrayRef(bias_shape), stride, padding,
      dilation, transposed, output_padding, groups, mask);
  Lock lock(machine().mutex);
  launch->finish(2 * flops_of("convolution", {input, weight}, grad.numel()));
  return {alias.device(for_input, device), alias.device(for_weight, device), alias.device(for_bias, device)};
}

}  // namespace simdevice
