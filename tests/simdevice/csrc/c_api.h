// What Python calls through ctypes.
#pragma once

#include <cmath>
#include <sstream>

#include "collectives.h"
#include "guard.h"

namespace simdevice {

// A counter by name; -1 if there is none.
inline int64_t counter(const std::string& name, int device_index) {
  const Machine& m = machine();
  const DeviceState& device = m.devices[device_index];
  if (name == "host_ns") return m.host_time - m.epoch;
  if (name == "compute_busy_ns") return device.compute_busy;
  if (name == "h2d_busy_ns") return device.h2d_busy;
  if (name == "d2h_busy_ns") return device.d2h_busy;
  if (name == "fabric_busy_ns") return device.fabric_busy;
  if (name == "kernels") return m.kernels;
  if (name == "copies") return m.copies;
  if (name == "collectives") return m.collectives;
  if (name == "fabric_bytes") return m.fabric_bytes;
  if (name == "deferred_run") return m.deferred_run;
  if (name == "h2d_bytes") return m.h2d_bytes;
  if (name == "d2h_bytes") return m.d2h_bytes;
  if (name == "pinned_current") return m.pinned_bytes.current;
  if (name == "pinned_peak") return m.pinned_bytes.peak;
  if (name == "hazards") return static_cast<int64_t>(m.hazards.size());
  if (name == "allocations") return device.allocations;
  if (name == "pending") {
    int64_t tasks = 0;
    for (const auto& stream : m.streams) tasks += static_cast<int64_t>(stream->tasks.size());
    return tasks;
  }
  return -1;
}

// Finish everything, bring all clocks to one instant and count from there.
inline void reset_clock() {
  Machine& m = machine();
  int64_t latest = m.host_time;
  for (const auto& stream : m.streams) {
    flush_all(stream->number);
    join(m.host_seen, stream->seen);
    latest = std::max(latest, stream->time);
  }
  m.host_time = m.epoch = latest;
  for (DeviceState& device : m.devices) {
    release_pending(device);
    device.compute_busy = device.h2d_busy = device.d2h_busy = device.fabric_busy = 0;
  }
  m.kernels = m.copies = m.deferred_run = m.h2d_bytes = m.d2h_bytes = 0;
  m.collectives = m.fabric_bytes = 0;
  m.pinned_bytes.reset_peak();
  m.trace.clear();
}

}  // namespace simdevice

extern "C" {

using simdevice::Lock;
using simdevice::machine;

void sim_init() {
  c10::SetAllocator(simdevice::kSim, simdevice::allocator());
  at::RegisterPrivateUse1HooksInterface(new simdevice::Hooks());
  at::setHostAllocator(simdevice::kSim, simdevice::pinned_allocator());
}

void sim_register_collectives() { simdevice::register_collectives(); }

// Returns 0, or -1 if there is no such option.
int sim_set(const char* name, double value) {
  Lock lock(machine().mutex);
  double* option = machine().config.find(name);
  if (!option) return -1;
  *option = value;
  return 0;
}

double sim_get(const char* name) {
  Lock lock(machine().mutex);
  const double* option = machine().config.find(name);
  return option ? *option : NAN;
}

int64_t sim_stat(const char* name, int device) {
  Lock lock(machine().mutex);
  return simdevice::counter(name, device);
}

int64_t sim_stream_ns(int device, int64_t stream_id) {
  Lock lock(machine().mutex);
  return simdevice::state_of(stream_id == 0 ? device : static_cast<int>(stream_id)).time - machine().epoch;
}

// Returns 0, or 1 if a copy that was still to run has met a hazard, which is the last one recorded.
int sim_reset_clock() {
  Lock lock(machine().mutex);
  try {
    simdevice::reset_clock();
    return 0;
  } catch (const c10::Error&) {  // it must not fly through ctypes
    return 1;
  }
}

void sim_host_advance(double seconds) {
  Lock lock(machine().mutex);
  machine().host_time += simdevice::nanoseconds(seconds);
}

void sim_manual_seed(int device, uint64_t seed) {
  at::Generator& generator = simdevice::default_generator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed);
}

// The text is good until the next call of sim_hazards or sim_trace.
static std::string text;

const char* sim_hazards() {
  Lock lock(machine().mutex);
  text.clear();
  for (const std::string& hazard : machine().hazards) text += hazard + "\n";
  return text.c_str();
}

void sim_clear_hazards() {
  Lock lock(machine().mutex);
  machine().hazards.clear();
}

const char* sim_trace() {
  Lock lock(machine().mutex);
  std::ostringstream rows;
  for (const auto& row : machine().trace)
    rows << row.name << '\t' << row.stream << '\t' << row.begin - machine().epoch << '\t' << row.end - machine().epoch
         << '\n';
  text = rows.str();
  return text.c_str();
}

// Returns a simdevice::Registration.
int sim_host_register(uint64_t address, uint64_t nbytes, int read_only) {
  Lock lock(machine().mutex);
  return static_cast<int>(simdevice::register_host(address, nbytes, read_only != 0));
}

// Returns 0, or 1 if nothing is registered there.
int sim_host_unregister(uint64_t address) {
  Lock lock(machine().mutex);
  return simdevice::unregister_host(address) ? 0 : 1;
}

}  // extern "C"
