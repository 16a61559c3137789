// Autocast: which operators run in the lower precision, in float32, or in the widest of their inputs' types is in lists
// that every backend shares.
#pragma once

#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace simdevice {

inline void register_autocast(torch::Library& m) {
#define SIM_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIM_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIM_FLOAT32_RESULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIM_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER_PRECISION)
  AT_FORALL_FP32(SIM_FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_FLOAT32_RESULT)
  AT_FORALL_PROMOTE(SIM_WIDEST)
#undef SIM_LOWER_PRECISION
#undef SIM_FLOAT32
#undef SIM_FLOAT32_RESULT
#undef SIM_WIDEST
}

}  // namespace simdevice
