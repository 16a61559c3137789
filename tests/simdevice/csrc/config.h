// The options that tests set. Times are seconds, rates are per second, -1 means "no limit".
#pragma once

#include <string>

namespace simdevice {

struct Config {
  double h2d_bytes_per_s = 16e9;
  double d2h_bytes_per_s = 16e9;
  double pageable_bytes_per_s = 4e9;
  double copy_latency_s = 10e-6;
  double fabric_bytes_per_s = 50e9;  // what a rank receives from the others in a collective
  double fabric_latency_s = 20e-6;   // per collective
  double flops_per_s = 50e12;
  double mem_bytes_per_s = 600e9;
  double kernel_overhead_s = 2e-6;  // on the device, per kernel
  double launch_overhead_s = 4e-6;  // on the host, per kernel or copy
  double pin_bytes_per_s = 2e9;     // page-locking and filling memory take host time

  double capacity_bytes = -1;
  double pinned_capacity_bytes = -1;
  double registers_read_only = 1;  // memory that can't be written to may be page-locked, if that is asked for
  double alloc_round = 512;
  double poison = 1;  // fill new device memory with 0xFF: NaN, or -1

  double race = 2;           // 0 off, 1 record, 2 record and raise
  double verify_source = 1;  // has the host changed a pinned source before the copy ran?
  double defer = 1;          // run asynchronous copies as late as is allowed
  double trace = 0;
  double devices = 1;
  double capturing = 0;  // pretend that the current stream is being captured

  // The option called `name`, or null.
  double* find(const std::string& name) {
    static constexpr struct {
      const char* name;
      double Config::* option;
    } table[] = {
        {"h2d_bytes_per_s", &Config::h2d_bytes_per_s},
        {"d2h_bytes_per_s", &Config::d2h_bytes_per_s},
        {"pageable_bytes_per_s", &Config::pageable_bytes_per_s},
        {"copy_latency_s", &Config::copy_latency_s},
        {"fabric_bytes_per_s", &Config::fabric_bytes_per_s},
        {"fabric_latency_s", &Config::fabric_latency_s},
        {"flops_per_s", &Config::flops_per_s},
        {"mem_bytes_per_s", &Config::mem_bytes_per_s},
        {"kernel_overhead_s", &Config::kernel_overhead_s},
        {"launch_overhead_s", &Config::launch_overhead_s},
        {"pin_bytes_per_s", &Config::pin_bytes_per_s},
        {"capacity_bytes", &Config::capacity_bytes},
        {"pinned_capacity_bytes", &Config::pinned_capacity_bytes},
        {"registers_read_only", &Config::registers_read_only},
        {"alloc_round", &Config::alloc_round},
        {"poison", &Config::poison},
        {"race", &Config::race},
        {"verify_source", &Config::verify_source},
        {"defer", &Config::defer},
        {"trace", &Config::trace},
        {"devices", &Config::devices},
        {"capturing", &Config::capturing},
    };
    for (const auto& row : table)
      if (name == row.name) return &(this->*row.option);
    return nullptr;
  }
};

}  // namespace simdevice
