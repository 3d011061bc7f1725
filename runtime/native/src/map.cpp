// A client's view of its agent's pool: engine blocks -> slots (gather) and slots -> engine blocks (scatter), verified.
//
// Threads: a map is immutable after creation; calls may run in parallel as long as their slots and blocks differ.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <memory>
#include <new>

#include "checksum.hpp"
#include "errors.hpp"
#include "extent.hpp"
#include "kvpeer/kvpeer.h"
#include "mapping.hpp"
#include "slot_header.hpp"

namespace {

// Layers times K and V of the largest models, with room; bounds the work that one page can cause.
constexpr std::uint32_t kSegmentsMax = 65536;

// The engine's strided arrays, checked.
class EngineBlocks {
 public:
  // False when the layout breaks the contract.
  bool set(const kvp_layout *layout) noexcept {
    if (layout == nullptr || layout->n_segments == 0 || layout->n_segments > kSegmentsMax || layout->base == nullptr ||
        layout->stride == nullptr || layout->length == nullptr) {
      return false;
    }
    layout_ = layout;
    for (std::uint32_t idx = 0; idx < layout->n_segments; ++idx) {
      if (layout->base[idx] == 0 || layout->length[idx] == 0) {
        return false;
      }
      part_bytes_ += layout->length[idx];
    }
    return part_bytes_ <= kvpeer::kExtentBytesMax;
  }

  // Bytes of one block over all segments: one part of a page.
  std::uint64_t part_bytes() const noexcept { return part_bytes_; }

  // Calls use(address, offset in the part, n_bytes) for each piece of a block, in order.
  template <class Use>
  void for_each_piece(std::int64_t block, Use use) const {
    std::uint64_t offset = 0;
    for (std::uint32_t idx = 0; idx < layout_->n_segments; ++idx) {
      const std::uint64_t address = layout_->base[idx] + static_cast<std::uint64_t>(block) * layout_->stride[idx];
      use(reinterpret_cast<std::byte *>(address), offset, layout_->length[idx]);
      offset += layout_->length[idx];
    }
  }

 private:
  const kvp_layout *layout_ = nullptr;
  std::uint64_t part_bytes_ = 0;
};

bool are_blocks_valid(std::uint64_t n, const std::int64_t *blocks) {
  return std::all_of(blocks, blocks + n, [](std::int64_t block) { return block >= 0; });
}

// What a reader expects of one slot.
struct Expected {
  std::uint32_t slot;
  std::uint32_t generation;
  std::uint64_t offset;
  const std::uint8_t *key;
  std::uint32_t part;
};

// Bytes of the file when it can never shrink under a mapping (which would raise SIGBUS), else 0.
std::uint64_t sealed_bytes(int fd) {
  struct stat status {};
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || ::fstat(fd, &status) != 0) {
    return 0;
  }
  return static_cast<std::uint64_t>(status.st_size);
}

}  // namespace

struct kvp_map {
 public:
  static int create(int payload_fd, int header_fd, std::uint64_t extent_bytes, const std::uint8_t *run_id,
                    std::unique_ptr<kvp_map> &out) {
    const std::uint64_t payload_bytes = sealed_bytes(payload_fd);
    if (!kvpeer::is_extent_valid(extent_bytes) || payload_bytes == 0 || payload_bytes % extent_bytes != 0) {
      return KVP_EINVAL;
    }
    const std::uint64_t n_extents = payload_bytes / extent_bytes;
    if (n_extents > kvpeer::kExtentsMax || sealed_bytes(header_fd) != n_extents * kvpeer::kHeaderExtentBytes) {
      return KVP_EINVAL;
    }
    auto map = std::make_unique<kvp_map>();
    map->extent_bytes_ = extent_bytes;
    map->n_extents_ = n_extents;
    std::copy_n(run_id, map->run_id_.size(), map->run_id_.begin());
    int result = map->payload_.map(payload_fd, payload_bytes, PROT_READ | PROT_WRITE);
    if (result == KVP_OK) {
      result = map->headers_.map(header_fd, n_extents * kvpeer::kHeaderExtentBytes, PROT_READ);
    }
    if (result == KVP_OK) {
      out = std::move(map);
    }
    return result;
  }

  const kvpeer::Mapping &payload() const noexcept { return payload_; }

  // True when [offset, offset + n_bytes) lies in one extent of the payload.
  bool holds(std::uint64_t offset, std::uint64_t n_bytes) const noexcept {
    return offset < payload_.n_bytes() && n_bytes <= extent_bytes_ - offset % extent_bytes_;
  }

  bool all_hold(std::uint64_t n, const std::uint64_t *offsets, std::uint64_t part_offset, std::uint64_t n_bytes) const {
    return std::all_of(offsets, offsets + n, [=, this](std::uint64_t offset) { return holds(offset, part_offset + n_bytes); });
  }

  // True when each offset lies in the extent of its slot, and the extent exists.
  bool are_locations_valid(std::uint64_t n, const std::uint32_t *slots, const std::uint64_t *offsets) const {
    return std::equal(slots, slots + n, offsets, [this](std::uint32_t slot, std::uint64_t offset) {
      return kvpeer::extent_of(slot) < n_extents_ && offset / extent_bytes_ == kvpeer::extent_of(slot);
    });
  }

  std::uint64_t gather_page(std::uint64_t slot_offset, const EngineBlocks &engine, std::int64_t block, kvpeer::Store store) const {
    std::byte *page_part = payload_.data() + slot_offset;
    std::uint64_t crc = 0;
    engine.for_each_piece(block, [&](const std::byte *piece, std::uint64_t offset, std::uint64_t n_bytes) {
      crc = kvpeer::copy_crc64(crc, page_part + offset, piece, n_bytes, store);
    });
    return crc;
  }

  kvp_outcome scatter_page(const Expected &expected, const EngineBlocks &engine, std::int64_t block, kvp_verify verify,
                           kvpeer::Store store) const {
    kvp_slot_header before;
    std::array<kvp_part, KVP_PARTS_MAX> parts;
    if (!kvpeer::copy_header(header(expected.slot), before, parts.data()) ||
        !kvpeer::header_matches(before, expected.key, run_id_.data(), expected.generation, before.length) ||
        expected.part >= before.n_parts) {
      return KVP_STALE;
    }
    const kvp_part &part = parts[expected.part];
    if (part.length != engine.part_bytes() || !holds(expected.offset, std::uint64_t{part.offset} + part.length)) {
      return KVP_STALE;  // a page of another layout, or of another size class than the offset was given for
    }
    const std::byte *page_part = payload_.data() + expected.offset + part.offset;
    std::uint64_t crc = 0;
    engine.for_each_piece(block, [&](std::byte *piece, std::uint64_t offset, std::uint64_t n_bytes) {
      if (verify == KVP_VERIFY_FULL) {
        crc = kvpeer::copy_crc64(crc, piece, page_part + offset, n_bytes, store);
      } else {
        kvpeer::copy(piece, page_part + offset, n_bytes, store);
      }
    });
    kvp_slot_header after;
    if (!kvpeer::copy_header(header(expected.slot), after, nullptr) || !kvpeer::same_header(before, after)) {
      return KVP_STALE;
    }
    return verify == KVP_VERIFY_FULL && crc != part.checksum ? KVP_CORRUPT : KVP_HIT;
  }

 private:
  const kvp_slot_header *header(std::uint32_t slot) const noexcept {
    return reinterpret_cast<const kvp_slot_header *>(headers_.data() + std::uint64_t{slot} * KVP_HEADER_STRIDE);
  }

  kvpeer::Mapping payload_;
  kvpeer::Mapping headers_;
  std::uint64_t extent_bytes_ = 0;
  std::uint64_t n_extents_ = 0;
  std::array<std::uint8_t, KVP_AGENT_ID_BYTES> run_id_{};
};

extern "C" {

int kvp_map_create(int payload_fd, int header_fd, uint64_t extent_bytes, const uint8_t run_id[16], kvp_map **out) {
  if (run_id == nullptr || out == nullptr) {
    return KVP_EINVAL;
  }
  try {
    std::unique_ptr<kvp_map> map;
    const int result = kvp_map::create(payload_fd, header_fd, extent_bytes, run_id, map);
    *out = map.release();
    return result;
  } catch (const std::bad_alloc &) {
    return KVP_ENOMEM;
  }
}

void kvp_map_destroy(kvp_map *map) { delete map; }

void *kvp_map_payload(const kvp_map *map, uint64_t *n_bytes) {
  if (map == nullptr || n_bytes == nullptr) {
    return nullptr;
  }
  *n_bytes = map->payload().n_bytes();
  return map->payload().data();
}

int kvp_map_gather(kvp_map *map, uint64_t n, const uint64_t *offsets, uint32_t part_offset, const kvp_layout *layout,
                   const int64_t *blocks, uint64_t *checksums) {
  EngineBlocks engine;
  if (map == nullptr || offsets == nullptr || blocks == nullptr || checksums == nullptr || !engine.set(layout) ||
      !are_blocks_valid(n, blocks) || !map->all_hold(n, offsets, part_offset, engine.part_bytes())) {
    return KVP_EINVAL;
  }
  const kvpeer::Store store = kvpeer::store_for(n * engine.part_bytes());
  for (uint64_t idx = 0; idx < n; ++idx) {
    checksums[idx] = map->gather_page(offsets[idx] + part_offset, engine, blocks[idx], store);
  }
  kvpeer::finish_streaming();
  return KVP_OK;
}

int kvp_map_scatter(kvp_map *map, uint64_t n, const uint32_t *slots, const uint32_t *generations, const uint64_t *offsets,
                    const uint8_t *keys, uint32_t part, const kvp_layout *layout, const int64_t *blocks, int verify,
                    uint8_t *outcomes) {
  EngineBlocks engine;
  if (map == nullptr || slots == nullptr || generations == nullptr || offsets == nullptr || keys == nullptr ||
      blocks == nullptr || outcomes == nullptr || part >= KVP_PARTS_MAX ||
      (verify != KVP_VERIFY_GENERATION && verify != KVP_VERIFY_FULL) || !engine.set(layout) ||
      !are_blocks_valid(n, blocks) || !map->are_locations_valid(n, slots, offsets)) {
    return KVP_EINVAL;
  }
  const kvpeer::Store store = kvpeer::store_for(n * engine.part_bytes());
  for (uint64_t idx = 0; idx < n; ++idx) {
    const Expected expected{slots[idx], generations[idx], offsets[idx], keys + idx * KVP_KEY_BYTES, part};
    outcomes[idx] = map->scatter_page(expected, engine, blocks[idx], static_cast<kvp_verify>(verify), store);
  }
  kvpeer::finish_streaming();
  return KVP_OK;
}

int kvp_map_checksum(kvp_map *map, uint64_t n, const uint64_t *offsets, uint32_t part_offset, uint32_t part_length,
                     uint64_t *checksums) {
  if (map == nullptr || offsets == nullptr || checksums == nullptr || !map->all_hold(n, offsets, part_offset, part_length)) {
    return KVP_EINVAL;
  }
  for (uint64_t idx = 0; idx < n; ++idx) {
    checksums[idx] = kvpeer::crc64(0, map->payload().data() + offsets[idx] + part_offset, part_length);
  }
  return KVP_OK;
}

}  // extern "C"
