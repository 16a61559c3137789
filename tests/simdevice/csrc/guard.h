// What torch asks of a backend: its hooks, and the guard with streams and events.
#pragma once

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/version.h>

#include <utility>

#include "allocator.h"
#include "generator.h"
#include "pinned.h"

namespace simdevice {

inline int or_current(DeviceIndex index) { return index < 0 ? current_device : index; }

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return device_count(); }

  void setCurrentDevice(DeviceIndex device) const override { current_device = device; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current_device, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current_device : std::exchange(current_device, device);
  }

  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  Device getDeviceFromPtr(void*) const override { return Device(kSim, current_device); }

  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(or_current(device));
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<SimGenerator>(static_cast<DeviceIndex>(or_current(device)));
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::DeviceGuard guard(storage.device());
    c10::DataPtr fresh = allocator()->allocate(nbytes);
    if (nbytes && storage.nbytes()) memcpy(fresh.get(), storage.data(), std::min(nbytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
};

// A query that finds work unfinished takes a microsecond of host time, so that a polling loop comes to an end.
constexpr int64_t kPollNanoseconds = 1000;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  // ---- devices
  c10::DeviceType type() const override { return kSim; }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return c10::DeviceCapability(); }
  Device getDevice() const override { return Device(kSim, current_device); }
  Device exchangeDevice(Device device) const override {
    const Device previous = getDevice();
    setDevice(device);
    return previous;
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < device_count(), "sim: invalid device ordinal ", static_cast<int>(device.index()));
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }

  // ---- streams
  Stream getStream(Device device) const override {
    return to_stream(current_stream_number[or_current(device.index())]);
  }
  Stream getDefaultStream(Device device) const override { return to_stream(or_current(device.index())); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    Lock lock(machine().mutex);
    return to_stream(machine().add_stream(or_current(device.index())));
  }
  Stream exchangeStream(Stream stream) const override {
    return to_stream(std::exchange(current_stream_number[stream.device_index()], number_of(stream)));
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 11
  void* getStreamNativeHandle(const Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<uintptr_t>(number_of(stream)));
  }
#endif
  bool queryStream(const Stream& stream) const override {
    Lock lock(machine().mutex);
    const StreamState& state = state_of(stream);
    if (machine().host_time < state.time) {
      machine().host_time += kPollNanoseconds;
      return false;
    }
    finish(state);
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    Lock lock(machine().mutex);
    finish(state_of(stream));
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    Lock lock(machine().mutex);
    for (const auto& stream : machine().streams)
      if (stream->device == or_current(device)) finish(*stream);
  }

  // ---- events
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Lock lock(machine().mutex);
    if (!*event) *event = new Event();
    const StreamState& state = state_of(stream);
    const int64_t time = std::max(state.time, machine().host_time);
    *static_cast<Event*>(*event) = Event{state.number, state.clock, state.seen, time};
  }
  void block(void* opaque, const Stream& stream) const override {
    Lock lock(machine().mutex);
    if (!opaque) return;
    const auto& event = *static_cast<Event*>(opaque);
    StreamState& state = state_of(stream);
    const uint64_t clock = advance(state);
    join(state.seen, event.seen);
    state.time = std::max(state.time, event.time);
    // What the event stands for has to run before this stream's next work does.
    if (event.stream != state.number)
      state.tasks.push_back({clock, [other = event.stream, up_to = event.clock] { flush(other, up_to); }});
  }
  bool queryEvent(void* opaque) const override {
    Lock lock(machine().mutex);
    if (!opaque) return true;
    const auto& event = *static_cast<Event*>(opaque);
    if (machine().host_time < event.time) {
      machine().host_time += kPollNanoseconds;
      return false;
    }
    synchronizeEvent(opaque);
    return true;
  }
  void synchronizeEvent(void* opaque) const override {
    Lock lock(machine().mutex);
    if (!opaque) return;
    const auto& event = *static_cast<Event*>(opaque);
    flush(event.stream, event.clock);
    host_wait(event.time, event.seen);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    return static_cast<double>(static_cast<Event*>(end)->time - static_cast<Event*>(begin)->time) / 1e6;
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    allocator()->recordStream(pointer, stream);
  }

 private:
  static void finish(const StreamState& state) {
    flush_all(state.number);
    host_wait(state.time, state.seen);
  }
};

}  // namespace simdevice
