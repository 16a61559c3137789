// Device memory: host memory that is counted, limited and poisoned. Nothing is cached.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <cstring>
#include <sstream>

#include "state.h"

namespace simdevice {

struct Access {
  int64_t begin, end;  // bytes in the block
  int stream;
  uint64_t clock;
  bool write;
};

// One device allocation.
struct Block {
  void* pointer = nullptr;
  size_t nbytes = 0, rounded = 0;
  int device = 0, stream = 0;
  bool owned = false;        // `pointer` is ours to free
  c10::Storage adopted;      // or it belongs to this CPU storage, a kernel's output
  std::vector<Access> accesses;
  std::vector<int> recorded;  // streams of record_stream

  ~Block() {
    if (owned) free(pointer);
  }
};

using BlockPointer = std::shared_ptr<Block>;

// What a DataPtr holds. CPU aliases share the block, so it outlives the device tensor while a copy is pending.
struct BlockHolder {
  BlockPointer block;
};

inline void release_pending(DeviceState& device) {
  auto& pending = device.pending_frees;
  for (size_t i = 0; i < pending.size();) {
    if (pending[i].time > machine().host_time) {
      ++i;
      continue;
    }
    device.active.decrease(pending[i].bytes);
    pending[i] = pending.back();
    pending.pop_back();
  }
}

// Another stream may still use the block, its own stream does not wait for that, and nobody called record_stream.
inline void check_free(const Block& block) {
  if (machine().config.race < 1) return;
  VectorClock known = state_of(block.stream).seen;
  join(known, machine().host_seen);
  for (const Access& access : block.accesses) {
    if (access.stream == block.stream || access.clock <= position(known, access.stream)) continue;
    if (std::find(block.recorded.begin(), block.recorded.end(), access.stream) != block.recorded.end()) continue;
    std::ostringstream message;
    message << "simdevice: " << block.nbytes << " bytes allocated on stream " << block.stream
            << " were freed while stream " << access.stream << " may still " << (access.write ? "write" : "read")
            << " them (no wait, no record_stream)";
    record_hazard(message.str());
    return;
  }
}

inline void block_freed(void* context) {
  auto* holder = static_cast<BlockHolder*>(context);
  {
    Lock lock(machine().mutex);
    const Block& block = *holder->block;
    DeviceState& device = machine().devices[block.device];
    device.allocated.decrease(block.rounded);
    device.count.decrease(1);
    device.requested.decrease(block.nbytes);
    check_free(block);
    int64_t in_use_until = 0;
    for (int stream : block.recorded) in_use_until = std::max(in_use_until, state_of(stream).time);
    if (in_use_until > machine().host_time)
      device.pending_frees.push_back({in_use_until, block.rounded});
    else
      device.active.decrease(block.rounded);
  }
  delete holder;
}

// Count a new block, or raise OutOfMemoryError.
inline BlockPointer account(int device_index, size_t nbytes) {
  DeviceState& device = machine().devices[device_index];
  const auto unit = static_cast<size_t>(machine().config.alloc_round);
  const size_t rounded = (nbytes + unit - 1) / unit * unit;
  release_pending(device);
  const double capacity = machine().config.capacity_bytes;
  if (capacity >= 0) {
    const auto too_much = [&] { return static_cast<double>(device.active.current) + rounded > capacity; };
    while (too_much() && !device.pending_frees.empty()) {  // as on CUDA: wait for the recorded streams
      int64_t earliest = device.pending_frees[0].time;
      for (const auto& pending : device.pending_frees) earliest = std::min(earliest, pending.time);
      machine().host_time = std::max(machine().host_time, earliest);
      release_pending(device);
    }
    if (too_much()) {
      device.out_of_memory++;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "sim out of memory. Tried to allocate ", nbytes, " bytes. Device ", device_index,
          " has a capacity of ", static_cast<int64_t>(capacity), " bytes of which ", device.active.current,
          " are in use.");
    }
  }
  auto block = std::make_shared<Block>();
  block->nbytes = nbytes;
  block->rounded = rounded;
  block->device = device_index;
  block->stream = current_stream_number[device_index];
  device.allocations++;
  device.allocated.increase(rounded);
  device.active.increase(rounded);
  device.count.increase(1);
  device.requested.increase(nbytes);
  return block;
}

inline c10::DataPtr data_pointer_of(BlockPointer block) {
  void* pointer = block->pointer;
  const Device device(kSim, block->device);
  return {pointer, new BlockHolder{std::move(block)}, &block_freed, device};
}

inline BlockHolder* holder_of(const c10::DataPtr& pointer) { return pointer.cast_context<BlockHolder>(&block_freed); }

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    Lock lock(machine().mutex);
    if (nbytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, Device(kSim, current_device)};
    BlockPointer block = account(current_device, nbytes);
    if (posix_memalign(&block->pointer, 64, nbytes) != 0) {
      block_freed(new BlockHolder{block});
      TORCH_CHECK(false, "simdevice: the host has no memory left");
    }
    block->owned = true;
    if (machine().config.poison > 0) memset(block->pointer, 0xFF, nbytes);
    return data_pointer_of(block);
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}

  void recordStream(const c10::DataPtr& pointer, Stream stream) override {
    Lock lock(machine().mutex);
    BlockHolder* holder = holder_of(pointer);
    if (!holder) return;
    const int number = number_of(stream);
    auto& recorded = holder->block->recorded;
    const bool known = std::find(recorded.begin(), recorded.end(), number) != recorded.end();
    if (number != holder->block->stream && !known) recorded.push_back(number);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    Lock lock(machine().mutex);
    DeviceState& device = machine().devices[index];
    release_pending(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocation[0] = device.count;
    stats.allocated_bytes[0] = device.allocated;
    stats.requested_bytes[0] = device.requested;
    stats.active_bytes[0] = device.active;
    stats.reserved_bytes[0] = device.active;
    stats.num_ooms = device.out_of_memory;
    return stats;
  }

  void resetAccumulatedStats(DeviceIndex index) override {
    Lock lock(machine().mutex);
    DeviceState& device = machine().devices[index];
    for (auto* stat : {&device.allocated, &device.active, &device.count, &device.requested}) stat->reset_accumulated();
  }

  void resetPeakStats(DeviceIndex index) override {
    Lock lock(machine().mutex);
    DeviceState& device = machine().devices[index];
    release_pending(device);
    for (auto* stat : {&device.allocated, &device.active, &device.count, &device.requested}) stat->reset_peak();
  }

  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    Lock lock(machine().mutex);
    release_pending(machine().devices[index]);
    const double capacity = machine().config.capacity_bytes;
    const auto total = capacity >= 0 ? static_cast<size_t>(capacity) : size_t{1} << 40;
    const auto used = static_cast<size_t>(machine().devices[index].active.current);
    return {total - std::min(total, used), total};
  }
};

inline Allocator* allocator() {
  static Allocator* instance = new Allocator();
  return instance;
}

}  // namespace simdevice
