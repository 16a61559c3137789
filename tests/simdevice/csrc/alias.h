// CPU views of device tensors, and device tensors made of what CPU kernels return. No byte is copied.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>

#include "allocator.h"

namespace simdevice {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;

inline void delete_holder(void* holder) { delete static_cast<BlockHolder*>(holder); }

inline DispatchKeySet keys_like(const Tensor& tensor, DispatchKey backend) {
  DispatchKeySet keys(backend);
  if (tensor.is_conj()) keys = keys.add(DispatchKey::Conjugate);
  if (tensor.is_neg()) keys = keys.add(DispatchKey::Negative);
  return keys;
}

inline Tensor view_of(c10::Storage storage, const Tensor& like, DispatchKey backend) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys_like(like, backend), like.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return view;
}

// The pairs of storages of one call: tensors that share storage on one side share it on the other.
class Alias {
 public:
  Tensor cpu(const Tensor& tensor) {
    TORCH_CHECK(
        tensor.device().type() == kSim,
        "Expected all tensors to be on the same device, but found at least two devices, sim and ", tensor.device(),
        "!");
    TORCH_CHECK(tensor.layout() == c10::kStrided, "simdevice: only strided tensors are supported");
    Tensor view = view_of(cpu_storage(tensor.storage()), tensor, DispatchKey::CPU);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) view.unsafeGetTensorImpl()->set_wrapped_number(true);
    return view;
  }

  std::optional<Tensor> cpu(const std::optional<Tensor>& tensor) {
    return tensor && tensor->defined() ? std::optional<Tensor>(cpu(*tensor)) : std::nullopt;
  }

  Tensor device(const Tensor& tensor, int index) {
    if (!tensor.defined() || tensor.device().type() != c10::kCPU) return tensor;
    return view_of(device_storage(tensor.storage(), index), tensor, DispatchKey::PrivateUse1);
  }

  // Whether the CPU storage is new, not one that an argument had.
  bool is_fresh(const Tensor& cpu_tensor) const { return !known_device_storage(cpu_tensor.storage()); }

  // Give an out= argument the storage and the shape that the kernel has given its CPU view.
  void write_back(const Tensor& tensor, const Tensor& view) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    if (view.storage().data() != tensor.storage().data()) {
      c10::Storage fresh = adopt(view.storage(), storage->device().index());
      c10::DataPtr nothing(nullptr, storage->device());
      storage->set_data_ptr_noswap(fresh.unsafeGetStorageImpl()->set_data_ptr(std::move(nothing)));
      storage->set_nbytes(view.storage().nbytes());
    }
    if (tensor.sizes() != view.sizes() || tensor.strides() != view.strides())
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
  }

 private:
  struct Pair {
    c10::Storage device, cpu;
  };

  const Pair* known_device_storage(const c10::Storage& cpu) const {
    for (const Pair& pair : pairs_)
      if (pair.cpu.unsafeGetStorageImpl() == cpu.unsafeGetStorageImpl()) return &pair;
    return nullptr;
  }

  c10::Storage cpu_storage(const c10::Storage& storage) {
    for (const Pair& pair : pairs_)
      if (pair.device.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return pair.cpu;
    void* pointer = storage.unsafeGetStorageImpl()->mutable_data();
    BlockHolder* holder = holder_of(storage.data_ptr());
    c10::DataPtr data = holder
        ? c10::DataPtr(pointer, new BlockHolder{holder->block}, &delete_holder, Device(c10::kCPU))
        : c10::DataPtr(pointer, Device(c10::kCPU));
    const bool resizable = true;
    c10::Storage cpu(
        c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), resizable);
    pairs_.push_back({storage, cpu});
    return cpu;
  }

  c10::Storage device_storage(const c10::Storage& cpu, int index) {
    if (const Pair* pair = known_device_storage(cpu)) return pair->device;
    c10::Storage device = adopt(cpu, index);
    pairs_.push_back({device, cpu});
    return device;
  }

  // Device storage over a kernel's output; it is counted like any allocation.
  static c10::Storage adopt(const c10::Storage& cpu, int index) {
    const bool resizable = true;
    c10::DataPtr data(nullptr, Device(kSim, index));
    if (cpu.nbytes() != 0) {
      Lock lock(machine().mutex);
      BlockPointer block = account(index, cpu.nbytes());
      block->adopted = cpu;
      block->pointer = cpu.unsafeGetStorageImpl()->mutable_data();
      data = data_pointer_of(block);
    }
    return c10::Storage(c10::Storage::use_byte_size_t(), cpu.nbytes(), std::move(data), allocator(), resizable);
  }

  std::vector<Pair> pairs_;
};

}  // namespace simdevice
