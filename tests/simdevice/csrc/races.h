// The race checker: is every access to device memory ordered after the accesses that it conflicts with?
#pragma once

#include <ATen/core/Tensor.h>

#include "allocator.h"

namespace simdevice {

using at::Tensor;

// A block keeps at most so many accesses; then the oldest quarter is forgotten. Covered and finished accesses go
// earlier, so only a block with thousands of live, disjoint views gets here.
constexpr size_t kMaxAccesses = 4096;

inline Block* block_of(const Tensor& tensor) {
  BlockHolder* holder = holder_of(tensor.storage().data_ptr());
  return holder ? holder->block.get() : nullptr;
}

// The bytes of its block that the tensor spans.
inline std::pair<int64_t, int64_t> byte_range(const Tensor& tensor) {
  const auto itemsize = static_cast<int64_t>(tensor.itemsize());
  int64_t elements = 1;
  for (int64_t i = 0; i < tensor.dim(); ++i) elements += (tensor.size(i) - 1) * tensor.stride(i);
  const int64_t begin = tensor.storage_offset() * itemsize;
  return {begin, begin + elements * itemsize};
}

inline std::string describe_race(const Access& now, const Access& before, const Block& block, const char* operation) {
  std::ostringstream message;
  message << "simdevice race: " << operation << " on stream " << now.stream << (now.write ? " writes" : " reads")
          << " bytes [" << now.begin << "," << now.end << ") of a " << block.nbytes << "-byte block that stream "
          << before.stream << (before.write ? " writes" : " reads") << " with no ordering between them";
  return message.str();
}

// Check one access of the stream's current operation, then note it.
//
// One pass over the block's accesses, which also drops those that can no longer matter: the host has waited for them,
// or this access covers them, is ordered after them and conflicts with whatever they conflict with.
inline void touch(StreamState& stream, const Tensor& tensor, bool write, const char* operation) {
  if (machine().config.race < 1 || !tensor.defined() || tensor.numel() == 0) return;
  Block* block = block_of(tensor);
  if (!block) return;
  const auto [begin, end] = byte_range(tensor);
  const Access now{begin, end, stream.number, stream.clock, write};
  auto& accesses = block->accesses;
  std::string race;
  size_t kept = 0;
  for (size_t i = 0; i < accesses.size(); ++i) {
    const Access before = accesses[i];
    const bool ordered = before.clock <= position(stream.seen, before.stream);
    const bool overlaps = before.begin < end && begin < before.end;
    if (!ordered && overlaps && (write || before.write) && race.empty())
      race = describe_race(now, before, *block, operation);
    const bool finished = before.clock <= position(machine().host_seen, before.stream);
    const bool covered = before.begin >= begin && before.end <= end && ordered && (write || !before.write);
    if (!finished && !covered) accesses[kept++] = before;
  }
  accesses.resize(kept);
  if (!race.empty()) report_hazard(race);
  if (accesses.size() >= kMaxAccesses) accesses.erase(accesses.begin(), accesses.begin() + kMaxAccesses / 4);
  accesses.push_back(now);
}

}  // namespace simdevice
