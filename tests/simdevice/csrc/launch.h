// One kernel on the current stream: its order, its accesses, its modelled time.
#pragma once

#include <c10/util/ArrayRef.h>

#include "races.h"

namespace simdevice {

inline bool starts_with(const std::string& name, const char* prefix) { return name.rfind(prefix, 0) == 0; }

inline int64_t bytes_of(const Tensor& tensor) { return tensor.numel() * static_cast<int64_t>(tensor.itemsize()); }

// Floating point operations of a kernel; one per output element if it is none of the known ones.
inline double flops_of(const std::string& name, c10::ArrayRef<Tensor> inputs, int64_t outputs) {
  const auto columns = [](const Tensor& t) { return t.dim() ? static_cast<double>(t.size(-1)) : 1.0; };
  const bool product = name == "aten::mm" || name == "aten::bmm" || name == "aten::mv" || name == "aten::dot";
  const bool sum_and_product =
      name == "aten::addmm" || name == "aten::baddbmm" || name == "aten::_addmm_activation";
  if (product && inputs.size() >= 2) return 2.0 * outputs * columns(inputs[0]);
  if (sum_and_product && inputs.size() >= 3) return 2.0 * outputs * columns(inputs[1]);
  if (name == "convolution") {
    const Tensor& weight = inputs[1];
    return 2.0 * outputs * (weight.numel() / static_cast<double>(std::max<int64_t>(1, weight.size(0))));
  }
  if (name == "attention") return 4.0 * inputs[0].numel() * inputs[1].size(-2);
  return static_cast<double>(outputs);
}

// All members are used under the machine's lock; the kernel itself runs without it, between `start` and `finish`.
class Launch {
 public:
  Launch(int device, std::string name)
      : device_(device), stream_(current_stream_of(device)), name_(std::move(name)) {
    machine().host_time += nanoseconds(machine().config.launch_overhead_s);
    advance(stream_);
    machine().kernels++;
  }

  StreamState& stream() { return stream_; }
  const std::string& name() const { return name_; }

  void read(const Tensor& tensor) { access(tensor, false); }
  void write(const Tensor& tensor) { access(tensor, true); }

  // Everything that is ordered before this kernel has to have run.
  void start() { flush_all(stream_.number); }

  void finish(double flops) {
    const Config& config = machine().config;
    const double busy = std::max(flops / config.flops_per_s, bytes_ / config.mem_bytes_per_s);
    DeviceState& device = machine().devices[device_];
    const int64_t duration = nanoseconds(busy + config.kernel_overhead_s);
    occupy(stream_, device.compute_time, device.compute_busy, duration, name_.c_str());
  }

 private:
  void access(const Tensor& tensor, bool write) {
    if (!tensor.defined()) return;
    touch(stream_, tensor, write, name_.c_str());
    bytes_ += static_cast<double>(bytes_of(tensor));
  }

  int device_;
  StreamState& stream_;
  std::string name_;
  double bytes_ = 0;
};

}  // namespace simdevice
