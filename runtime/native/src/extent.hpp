// How slot ids, extents and the two mappings relate: the same in the agent and in its clients.
#pragma once

#include <cstdint>

#include "kvpeer/kvpeer.h"

namespace kvpeer {

constexpr std::uint64_t kPageBytes = 4096;                                  // the machine's page: sizes are multiples of it
constexpr std::uint64_t kExtentsMax = KVP_EXTENTS_MAX;
static_assert(kExtentsMax * KVP_SLOTS_PER_EXTENT == 1ull << 32);
constexpr std::uint64_t kExtentBytesMax = (1ull << 32) - kPageBytes;        // one slot may fill an extent; its size has 32 bits
constexpr std::uint64_t kHeaderExtentBytes = std::uint64_t{KVP_SLOTS_PER_EXTENT} * KVP_HEADER_STRIDE;

constexpr std::uint32_t extent_of(std::uint32_t slot) { return slot / KVP_SLOTS_PER_EXTENT; }
constexpr std::uint32_t index_of(std::uint32_t slot) { return slot % KVP_SLOTS_PER_EXTENT; }

constexpr bool is_extent_valid(std::uint64_t extent_bytes) {
  return extent_bytes != 0 && extent_bytes <= kExtentBytesMax && extent_bytes % kPageBytes == 0;
}

}  // namespace kvpeer
