// Page-locked host memory: torch's pinned allocator (rounds up to a power of two) and registration in place (exact).
#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include <bit>
#include <sstream>

#include "state.h"

namespace simdevice {

// The registered range that holds the pointer, or null.
inline PinnedRange* pinned_range(const void* pointer) {
  auto& pinned = machine().pinned;
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto next = pinned.upper_bound(address);
  if (next == pinned.begin()) return nullptr;
  auto& [begin, range] = *std::prev(next);
  return address < begin + range.size ? &range : nullptr;
}

inline bool is_pinned(const void* pointer) {
  Lock lock(machine().mutex);
  return pinned_range(pointer) != nullptr;
}

inline bool pinning_fits(size_t nbytes) {
  const double capacity = machine().config.pinned_capacity_bytes;
  return capacity < 0 || static_cast<double>(machine().pinned_bytes.current) + nbytes <= capacity;
}

inline void pin(uintptr_t address, size_t nbytes, size_t charged) {
  machine().pinned[address] = PinnedRange{nbytes, charged, {}};
  machine().pinned_bytes.increase(charged);
  machine().host_time += nanoseconds(charged / machine().config.pin_bytes_per_s);
}

inline void unpin(std::map<uintptr_t, PinnedRange>::iterator entry) {
  machine().pinned_bytes.decrease(entry->second.charged);
  machine().pinned.erase(entry);
}

inline void pinned_free(void* pointer) {
  Lock lock(machine().mutex);
  auto entry = machine().pinned.find(reinterpret_cast<uintptr_t>(pointer));
  if (entry != machine().pinned.end()) unpin(entry);
  free(pointer);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, Device(c10::kCPU)};
    Lock lock(machine().mutex);
    const size_t charged = std::bit_ceil(nbytes);
    TORCH_CHECK_WITH(
        OutOfMemoryError, pinning_fits(charged), "sim: cannot pin ", charged, " bytes (", nbytes,
        " rounded up to a power of two); ", machine().pinned_bytes.current, " of ",
        static_cast<int64_t>(machine().config.pinned_capacity_bytes), " are pinned");
    void* pointer = nullptr;
    TORCH_CHECK(posix_memalign(&pointer, 4096, nbytes) == 0, "simdevice: the host has no memory left");
    pin(reinterpret_cast<uintptr_t>(pointer), nbytes, charged);
    return {pointer, pointer, &pinned_free, Device(c10::kCPU)};
  }

  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
  // A pending copy holds its tensors, so the memory cannot be given back too early.
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override { machine().pinned_bytes.reset_peak(); }
};

inline PinnedAllocator* pinned_allocator() {
  static PinnedAllocator* instance = new PinnedAllocator();
  return instance;
}

enum class Registration : int { done = 0, over_capacity = 1, overlaps = 2 };

inline Registration register_host(uintptr_t address, size_t nbytes) {
  auto& pinned = machine().pinned;
  auto next = pinned.upper_bound(address);
  if (next != pinned.end() && next->first < address + nbytes) return Registration::overlaps;
  if (pinned_range(reinterpret_cast<void*>(address))) return Registration::overlaps;
  if (!pinning_fits(nbytes)) return Registration::over_capacity;
  pin(address, nbytes, nbytes);
  return Registration::done;
}

// False if nothing is registered at the address.
inline bool unregister_host(uintptr_t address) {
  auto entry = machine().pinned.find(address);
  if (entry == machine().pinned.end()) return false;
  const PinnedRange& range = entry->second;
  for (size_t stream = 0; machine().config.race > 0 && stream < range.users.size(); ++stream) {
    if (range.users[stream] <= position(machine().host_seen, static_cast<int>(stream))) continue;
    std::ostringstream message;
    message << "simdevice: " << range.size << " bytes of host memory were unregistered while a copy on stream "
            << stream << " may still use them (the host has not waited for it)";
    record_hazard(message.str());
    break;
  }
  unpin(entry);
  return true;
}

}  // namespace simdevice
