// The gradient of RMS norm, which has no CPU kernel: written in the device's own operators.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/sum.h>

#include "state.h"

namespace simdevice {

using at::Tensor;

inline std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& grad, const Tensor& input, at::IntArrayRef normalized_shape, const Tensor& inverse_rms,
    const std::optional<Tensor>& weight, std::array<bool, 2>) {
  const bool scaled = weight && weight->defined();
  std::vector<int64_t> inner, outer;
  for (int64_t d = 0; d < input.dim(); ++d)
    (d < input.dim() - static_cast<int64_t>(normalized_shape.size()) ? outer : inner).push_back(d);
  const Tensor normalized = input * inverse_rms;
  const Tensor weighted = scaled ? grad * *weight : grad;
  const Tensor projection = (weighted * normalized).mean(inner, /*keepdim=*/true);
  const Tensor for_input = ((weighted - normalized * projection) * inverse_rms).to(input.scalar_type());
  Tensor for_weight;
  if (scaled) {
    const Tensor products = grad * normalized;
    for_weight = (outer.empty() ? products : products.sum(outer)).to(weight->scalar_type());
  }
  return {for_input, for_weight};
}

}  // namespace simdevice
