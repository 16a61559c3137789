// Copies between host and device. Asynchronous ones run as late as a GPU is allowed to run them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/resize_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include "alias.h"
#include "launch.h"
#include "pinned.h"

namespace simdevice {

// FNV-1a over the bytes of a contiguous tensor, a word at a time.
inline uint64_t hash_of(const Tensor& tensor) {
  const auto* bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
  const auto size = static_cast<size_t>(bytes_of(tensor));
  constexpr uint64_t prime = 1099511628211ull;
  uint64_t hash = 1469598103934665603ull;
  size_t i = 0;
  for (uint64_t word; i + 8 <= size; i += 8) {
    memcpy(&word, bytes + i, 8);
    hash = (hash ^ word) * prime;
  }
  for (; i < size; ++i) hash = (hash ^ bytes[i]) * prime;
  return hash;
}

inline void copy_on_device(const Tensor& source, const Tensor& target) {
  Launch launch(target.device().index(), "copy_d2d");
  if (source.device() != target.device()) {  // between devices: after all work of both
    StreamState& other = current_stream_of(source.device().index());
    flush_all(other.number);
    join(launch.stream().seen, other.seen);
    launch.stream().time = std::max(launch.stream().time, other.time);
  }
  launch.read(source);
  launch.write(target);
  launch.start();
  Alias alias;
  alias.cpu(target).copy_(alias.cpu(source));
  launch.finish(0);
  if (source.device() != target.device()) {  // and what either does next comes after the copy
    StreamState& other = current_stream_of(source.device().index());
    join(other.seen, launch.stream().seen);
    other.time = std::max(other.time, launch.stream().time);
  }
}

inline void defer_copy(StreamState& stream, uint64_t clock, Tensor to, Tensor from, bool to_device) {
  const Config& config = machine().config;
  const bool verify = to_device && config.verify_source > 0 && config.race > 0 && from.is_contiguous();
  const uint64_t hash = verify ? hash_of(from) : 0;
  // The views hold both memories until the copy has run.
  stream.tasks.push_back({clock, [to, from, verify, hash]() mutable {
    machine().deferred_run++;
    if (verify && hash_of(from) != hash)
      report_hazard(
          "simdevice race: the pinned source of an asynchronous copy was changed by the host before the copy had run");
    at::AutoDispatchBelowAutograd below_autograd;
    // Views that were made in inference mode can be written to in inference mode only.
    c10::InferenceMode inference_mode;
    to.copy_(from);
  }});
}

inline void copy_with_host(const Tensor& source, const Tensor& target, bool non_blocking) {
  const bool to_device = target.device().type() == kSim;
  const Tensor& host = to_device ? source : target;
  TORCH_CHECK(host.device().type() == c10::kCPU, "simdevice: copies go between cpu and sim");
  const Tensor& on_device = to_device ? target : source;
  const Config& config = machine().config;
  DeviceState& device = machine().devices[on_device.device().index()];
  StreamState& stream = current_stream_of(on_device.device().index());
  PinnedRange* pinned = pinned_range(host.storage().data());
  TORCH_CHECK(
      to_device || !pinned || !pinned->read_only,
      "simdevice: a copy would write to host memory that is page-locked to be read only");

  const char* name = to_device ? (pinned ? "copy_h2d" : "copy_h2d_pageable")
                               : (pinned ? "copy_d2h" : "copy_d2h_pageable");
  machine().host_time += nanoseconds(config.launch_overhead_s);
  const uint64_t clock = advance(stream);
  touch(stream, on_device, to_device, name);
  if (pinned) {
    if (pinned->users.size() <= static_cast<size_t>(stream.number)) pinned->users.resize(stream.number + 1, 0);
    pinned->users[stream.number] = clock;
  }

  const int64_t bytes = bytes_of(host);
  machine().copies++;
  (to_device ? machine().h2d_bytes : machine().d2h_bytes) += bytes;
  const double rate = !pinned ? config.pageable_bytes_per_s
      : to_device             ? config.h2d_bytes_per_s
                              : config.d2h_bytes_per_s;
  const int64_t duration = nanoseconds(config.copy_latency_s + bytes / rate);
  const int64_t end = to_device ? occupy(stream, device.h2d_time, device.h2d_busy, duration, name)
                                : occupy(stream, device.d2h_time, device.d2h_busy, duration, name);

  Alias alias;
  const Tensor view = alias.cpu(on_device);
  const Tensor to = to_device ? view : host.detach();
  const Tensor from = to_device ? host.detach() : view;
  if (non_blocking && pinned && config.defer > 0) {
    defer_copy(stream, clock, to, from, to_device);
    return;
  }
  flush_all(stream.number);
  to.copy_(from);
  host_wait(end, stream.seen);
}

inline Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  Lock lock(machine().mutex);
  at::AutoDispatchBelowAutograd below_autograd;
  if (source.device().type() == kSim && target.device().type() == kSim)
    copy_on_device(source, target);
  else
    copy_with_host(source, target, non_blocking);
  return target;
}

inline Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) {
    if (target.device().type() == kSim) {
      c10::DeviceGuard guard(target.device());
      at::native::resize_(target, source.sizes());
    } else {
      target.resize_(source.sizes());
    }
  }
  return copy_from(source, target, false);
}

// `tensor.item()`: a small copy that the host waits for.
inline at::Scalar local_scalar(const Tensor& tensor) {
  Lock lock(machine().mutex);
  const int index = tensor.device().index();
  StreamState& stream = current_stream_of(index);
  DeviceState& device = machine().devices[index];
  advance(stream);
  touch(stream, tensor, false, "item");
  flush_all(stream.number);
  const int64_t duration = nanoseconds(machine().config.copy_latency_s);
  host_wait(occupy(stream, device.d2h_time, device.d2h_busy, duration, "item"), stream.seen);
  Alias alias;
  return alias.cpu(tensor).item();
}

}  // namespace simdevice
