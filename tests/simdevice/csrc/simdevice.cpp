// A simulated accelerator for PyTorch (PrivateUse1), in one translation unit. Host memory plays device memory.
//
//   values   Kernels run at once, on the CPU, over views of the device's bytes. Asynchronous copies run only when
//            something is ordered after them, so a missing wait always shows the old bytes.
//   order    Vector clocks find every conflicting pair of accesses without an order, and every premature free.
//   time     A discrete-event clock gives every kernel and copy a modelled duration.
//   memory   Allocations are counted, and limited if a test asks for it.
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "attention.h"
#include "autocast.h"
#include "c_api.h"
#include "collectives.h"
#include "convolution.h"
#include "copies.h"
#include "fallback.h"
#include "guard.h"
#include "norm.h"
#include "tensors.h"

using namespace simdevice;

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  register_autocast(m);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  // New tensors and storage.
  m.impl("empty.memory_format", TORCH_FN(simdevice::empty));
  m.impl("empty_strided", TORCH_FN(simdevice::empty_strided));
  m.impl("resize_", TORCH_FN(at::native::resize_));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("set_", TORCH_FN(set_empty));
  m.impl("record_stream", TORCH_FN(simdevice::record_stream));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(has_compatible_shallow_copy_type));
  // Views: no kernel runs.
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("view.dtype", TORCH_FN(at::native::view_dtype));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  // Copies.
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  // Kernels that the fallback can't find on the CPU under the same name.
  m.impl("_scaled_dot_product_fused_attention_overrideable", TORCH_FN(attention));
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", TORCH_FN(attention_backward));
  m.impl("convolution_overrideable", TORCH_FN(simdevice::convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(simdevice::convolution_backward));
  m.impl("_fused_rms_norm_backward", TORCH_FN(rms_norm_backward));
  // These would decompose for an unknown backend; the CPU kernel gives the CPU's exact numbers.
  for (const char* name :
       {"native_layer_norm", "native_group_norm", "_fused_rms_norm", "native_layer_norm_backward",
        "native_group_norm_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Real backends answer this before a tensor subclass is asked: some subclasses would refuse, or dequantize themselves.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(has_compatible_shallow_copy_type));
}

// Without these, the conjugate and negative fallbacks clone the source, which copies it, which clones it again ...
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY(simdevice, m) {
  m.def("get_rng_state(int device) -> Tensor", [](int64_t device) {
    return default_generator(static_cast<int>(device)).get_state();
  });
  m.def("set_rng_state(int device, Tensor state) -> ()", [](int64_t device, const at::Tensor& state) {
    default_generator(static_cast<int>(device)).set_state(state);
  });
}

namespace simdevice {
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
}
