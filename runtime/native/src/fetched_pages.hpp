// What is the same for every way to fetch pages: the arrays of a call, and how a page looks when it arrives.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvpeer/kvpeer.h"

namespace kvpeer {

// A header with the table behind it, as they lie in a pool, so that the same code checks both.
struct PageFront {
  kvp_slot_header header;
  kvp_part parts[KVP_PARTS_MAX];
};
static_assert(sizeof(PageFront) == KVP_HEADER_STRIDE);

// True when the parts, in order, cover [0, length) without a gap or an overlap.
inline bool parts_tile(const kvp_part *parts, uint16_t n_parts, uint32_t length) {
  uint64_t end = 0;
  for (uint16_t i = 0; i < n_parts; ++i) {
    if (parts[i].offset != end || parts[i].length == 0) {
      return false;
    }
    end += parts[i].length;
  }
  return end == length;
}

// The arguments of one fetch, [n] each: where the pages should be, where they go, and what became of them.
struct PageArrays {
  uint32_t n;
  const uint32_t *slots;
  const uint32_t *generations;
  const uint8_t *keys;
  const uint32_t *lengths;
  void *const *destinations;
  kvp_part *parts_out;
  uint16_t *n_parts_out;
  uint8_t *outcomes;

  const uint8_t *key(uint32_t i) const { return keys + size_t{i} * KVP_KEY_BYTES; }
  std::byte *destination(uint32_t i) const { return static_cast<std::byte *>(destinations[i]); }
  void hit(uint32_t i, const kvp_part *parts, uint16_t n_parts) const {
    std::copy_n(parts, n_parts, parts_out + size_t{i} * KVP_PARTS_MAX);
    n_parts_out[i] = n_parts;
    outcomes[i] = KVP_HIT;
  }
};

// Says that no page was answered yet. False when the call cannot be meant.
inline bool begin_fetch(const PageArrays &pages, int verify) {
  if (verify != KVP_VERIFY_GENERATION && verify != KVP_VERIFY_FULL) {
    return false;
  }
  if (std::any_of(pages.lengths, pages.lengths + pages.n, [](uint32_t length) { return length == 0; })) {
    return false;
  }
  std::fill_n(pages.outcomes, pages.n, KVP_MISS);
  std::fill_n(pages.n_parts_out, pages.n, uint16_t{0});
  return true;
}

}  // namespace kvpeer
