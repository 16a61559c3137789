// All state of the simulated machine: streams, events, the modelled clock, hazards.
//
// Time is a discrete-event clock in integer nanoseconds. Order is kept in vector clocks: a stream has a position
// (`clock`) that grows with every operation, and knows (`seen`) up to which position of every other stream it is
// ordered after.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "config.h"

namespace simdevice {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 8;

// ---- vector clocks: position by stream number

using VectorClock = std::vector<uint64_t>;

inline void join(VectorClock& into, const VectorClock& other) {
  if (into.size() < other.size()) into.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

inline uint64_t position(const VectorClock& clock, int stream) {
  return static_cast<size_t>(stream) < clock.size() ? clock[stream] : 0;
}

// ---- records

// A copy, or a wait for another stream, that has been issued and has not run.
struct DeferredTask {
  uint64_t clock;
  std::function<void()> run;
};

struct StreamState {
  int number = 0;  // unique in the process; the default stream of device d is number d
  int device = 0;
  int64_t time = 0;    // when its last work is done
  uint64_t clock = 0;  // its position
  VectorClock seen;
  std::deque<DeferredTask> tasks;
};

struct Event {
  int stream = -1;
  uint64_t clock = 0;
  VectorClock seen;
  int64_t time = 0;
};

// Memory that was freed while a recorded stream still used it.
struct PendingFree {
  int64_t time;
  size_t bytes;
};

struct DeviceState {
  int64_t compute_time = 0, h2d_time = 0, d2h_time = 0, fabric_time = 0;  // when each engine is free
  int64_t compute_busy = 0, h2d_busy = 0, d2h_busy = 0, fabric_busy = 0;
  int collective_stream = -1;  // of asynchronous collectives, once there was one
  c10::CachingAllocator::Stat allocated, active, count, requested;
  std::vector<PendingFree> pending_frees;
  int64_t out_of_memory = 0;
  int64_t allocations = 0;  // ever made
  at::Generator generator;
};

struct PinnedRange {
  size_t size = 0;     // bytes that may be copied from
  size_t charged = 0;  // bytes counted
  VectorClock users;   // last copy by stream
  bool read_only = false;  // the device may not write here
};

struct TraceRow {
  std::string name;
  int stream;
  int64_t begin, end;
};

struct Machine {
  // Recursive: running a deferred copy goes through the dispatcher, which may come back here.
  std::recursive_mutex mutex;
  Config config;
  std::vector<std::unique_ptr<StreamState>> streams;
  DeviceState devices[kMaxDevices];

  int64_t host_time = 0;
  int64_t epoch = 0;       // what counts as time zero; clocks never run backwards, events outlive a reset
  VectorClock host_seen;   // what the host has waited for

  std::map<uintptr_t, PinnedRange> pinned;
  c10::CachingAllocator::Stat pinned_bytes;

  std::vector<TraceRow> trace;
  std::vector<std::string> hazards;
  int64_t kernels = 0, copies = 0, deferred_run = 0, h2d_bytes = 0, d2h_bytes = 0;
  int64_t collectives = 0, fabric_bytes = 0;

  Machine() {
    for (int device = 0; device < kMaxDevices; ++device) add_stream(device);
  }

  int add_stream(int device) {
    auto stream = std::make_unique<StreamState>();
    stream->number = static_cast<int>(streams.size());
    stream->device = device;
    streams.push_back(std::move(stream));
    return streams.back()->number;
  }
};

// Never destroyed: tensors may outlive static destructors.
inline Machine& machine() {
  static Machine* instance = new Machine();
  return *instance;
}

using Lock = std::lock_guard<std::recursive_mutex>;

inline thread_local DeviceIndex current_device = 0;
inline thread_local int current_stream_number[kMaxDevices] = {0, 1, 2, 3, 4, 5, 6, 7};

inline int number_of(const Stream& stream) {
  return stream.id() == 0 ? stream.device_index() : static_cast<int>(stream.id());
}

inline StreamState& state_of(int number) { return *machine().streams[number]; }
inline StreamState& state_of(const Stream& stream) { return state_of(number_of(stream)); }
inline StreamState& current_stream_of(int device) { return state_of(current_stream_number[device]); }

inline Stream to_stream(int number) {
  return Stream(Stream::UNSAFE, Device(kSim, state_of(number).device), number < kMaxDevices ? 0 : number);
}

inline DeviceIndex device_count() { return static_cast<DeviceIndex>(machine().config.devices); }
inline int64_t nanoseconds(double seconds) { return static_cast<int64_t>(std::llround(seconds * 1e9)); }

// ---- order

// Run the stream's deferred tasks up to a position.
inline void flush(int number, uint64_t up_to) {
  auto& tasks = state_of(number).tasks;
  while (!tasks.empty() && tasks.front().clock <= up_to) {
    DeferredTask task = std::move(tasks.front());
    tasks.pop_front();
    task.run();
  }
}

inline void flush_all(int number) { flush(number, ~uint64_t{0}); }

// The stream's next position; it comes after all that the host has waited for.
inline uint64_t advance(StreamState& stream) {
  join(stream.seen, machine().host_seen);
  stream.clock++;
  if (stream.seen.size() <= static_cast<size_t>(stream.number)) stream.seen.resize(stream.number + 1, 0);
  stream.seen[stream.number] = stream.clock;
  return stream.clock;
}

inline void host_wait(int64_t time, const VectorClock& seen) {
  machine().host_time = std::max(machine().host_time, time);
  join(machine().host_seen, seen);
}

// Put work of so many nanoseconds on an engine, after the stream's earlier work. Returns when it ends.
inline int64_t occupy(StreamState& stream, int64_t& engine, int64_t& busy, int64_t duration, const char* name) {
  const int64_t begin = std::max({stream.time, machine().host_time, engine});
  stream.time = engine = begin + duration;
  busy += duration;
  if (machine().config.trace > 0) machine().trace.push_back({name, stream.number, begin, engine});
  return engine;
}

// ---- hazards

// For code that must not throw: destructors, and Python finalizers.
inline void record_hazard(const std::string& message) { machine().hazards.push_back(message); }

inline void report_hazard(const std::string& message) {
  record_hazard(message);
  TORCH_CHECK(machine().config.race < 2, message);
}

}  // namespace simdevice
