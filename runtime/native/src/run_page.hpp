// What the reader remembers of a page between its front and its trailer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "checksum.hpp"
#include "kvpeer/kvpeer.h"

namespace kvpeer {

// The checksum follows the receive at this distance: the bytes are still in the second-level cache.
inline constexpr size_t kChecksumPieceBytes = 256 << 10;

// Follows a payload as it arrives and compares each part with its checksum in the table.
class PartChecksums {
 public:
  PartChecksums() = default;
  PartChecksums(const std::byte *payload, const kvp_part *parts, uint16_t n_parts)
      : payload_(payload), parts_(parts), n_parts_(n_parts) {}

  // The first n_there bytes are there. Waits for more unless they end the payload or make a piece.
  void follow(size_t n_there, size_t n_bytes) {
    if (n_there < n_bytes && n_there - n_done_ < kChecksumPieceBytes) {
      return;
    }
    while (n_done_ < n_there) {
      const kvp_part &part = parts_[part_idx_];
      const size_t part_end = size_t{part.offset} + part.length;
      const size_t end = std::min(part_end, n_there);
      crc_ = crc64(crc_, payload_ + n_done_, end - n_done_);
      n_done_ = end;
      if (end == part_end) {
        all_equal_ = all_equal_ && crc_ == part.checksum;
        crc_ = 0;
        ++part_idx_;
      }
    }
  }
  // True when every part was there and had its checksum.
  bool all_equal() const { return all_equal_ && part_idx_ == n_parts_; }

 private:
  const std::byte *payload_ = nullptr;
  const kvp_part *parts_ = nullptr;
  uint16_t n_parts_ = 0;
  uint16_t part_idx_ = 0;
  size_t n_done_ = 0;
  uint64_t crc_ = 0;
  bool all_equal_ = true;
};

// A page of a run, from its front to its trailer.
struct RunPage {
  uint32_t idx;  // in the request
  uint16_t n_parts;
  bool is_page;  // the header is sound, and that of the page that was asked for
  kvp_slot_header header;
  kvp_part parts[KVP_PARTS_MAX];
  PartChecksums checksums;
};

}  // namespace kvpeer
