// Operators that make device tensors or change a tensor's storage.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/ops/set_native.h>

#include "allocator.h"
#include "guard.h"

namespace simdevice {

using at::Tensor;

inline Device device_for(std::optional<Device> device) {
  return Device(kSim, device && device->has_index() ? device->index() : current_device);
}

inline Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
    std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device_for(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, allocator(), keys, c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device_for(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, allocator(), keys, c10::dtype_or_default(dtype));
}

inline Tensor& set_storage(Tensor& self, at::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {elements}, {1});
}

inline Tensor& set_empty(Tensor& self) {
  c10::DataPtr nothing(nullptr, self.device());
  const bool resizable = true;
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, std::move(nothing), allocator(), resizable);
  return at::native::set_storage_cpu_(self, storage, 0, {0}, {1});
}

inline void record_stream(Tensor& self, Stream stream) {
  allocator()->recordStream(self.storage().data_ptr(), stream);
}

// torch's own list of dense backends lacks this one; without it `parameter.data = device_tensor` is refused.
inline bool has_compatible_shallow_copy_type(const Tensor&, const Tensor&) { return true; }

}  // namespace simdevice
