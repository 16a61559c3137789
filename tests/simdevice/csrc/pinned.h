// Page-locked host memory: torch's pinned allocator (rounds up to a power of two) and registration in place (exact).
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
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

inline void pin(uintptr_t address, size_t nbytes, size_t charged, bool read_only = false) {
  machine().pinned[address] = PinnedRange{nbytes, charged, {}, read_only};
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

enum class Registration : int { done = 0, over_capacity = 1, overlaps = 2, no_access = 3, unsupported = 4 };

// Whether the kernel lets a device have these pages, to read or to write: it brings them in, as page-locking does.
// False where nothing is mapped, where a file has ended, and where the mapping may not be written to.
inline bool bring_in(uintptr_t address, size_t nbytes, bool to_write) {
#if defined(MADV_POPULATE_READ) && defined(MADV_POPULATE_WRITE)
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  static const bool is_known = [] {
    alignas(4096) static char own[4096];
    return page != 4096 || madvise(own, page, MADV_POPULATE_READ) == 0 || errno != EINVAL;
  }();
  const uintptr_t begin = address / page * page;
  const uintptr_t end = (address + nbytes + page - 1) / page * page;
  const auto populate = [to_write](uintptr_t from, uintptr_t to) {
    return madvise(reinterpret_cast<void*>(from), to - from, to_write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) == 0;
  };
  if (!is_known || nbytes == 0) return true;
  if (!to_write) return populate(begin, end);
  // Memory to be written to gets its pages when it is: only the ends are tried.
  return populate(begin, begin + page) && populate(end - page, end);
#else
  return true;
#endif
}

inline Registration register_host(uintptr_t address, size_t nbytes, bool read_only) {
  if (read_only && machine().config.registers_read_only <= 0) return Registration::unsupported;
  auto& pinned = machine().pinned;
  auto next = pinned.upper_bound(address);
  if (next != pinned.end() && next->first < address + nbytes) return Registration::overlaps;
  if (pinned_range(reinterpret_cast<void*>(address))) return Registration::overlaps;
  if (!pinning_fits(nbytes)) return Registration::over_capacity;
  if (!bring_in(address, nbytes, !read_only)) return Registration::no_access;
  pin(address, nbytes, nbytes, read_only);
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
