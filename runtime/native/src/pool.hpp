// The agent's pool: two sealed memfds, the size class of each extent, and the only writer of slot headers.
//
// Threads: one thread assigns extents and marks slots. Any thread may resolve slots to addresses at the same time, touch extents and
// check pages. The agent's own view of a slot's state is kept in private memory and never read back from shared memory; a check
// reads a header as any reader does, to compare it with the payload.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvpeer/kvpeer.h"
#include "mapping.hpp"

struct kvp_pool {
 public:
  using RunId = std::array<std::uint8_t, KVP_AGENT_ID_BYTES>;

  // KVP_OK and a pool, or a negative code.
  static int create(std::uint64_t capacity_bytes, std::uint64_t extent_bytes, std::uint64_t hugepage_bytes,
                    const std::uint8_t *run_id, std::unique_ptr<kvp_pool> &out);

  kvp_pool(const kvp_pool &) = delete;
  kvp_pool &operator=(const kvp_pool &) = delete;

  // First byte of a slot's payload, or null when the slot does not exist (no such extent, no size class yet, index too large).
  void *slot_address(std::uint32_t slot) const noexcept;
  // Size class of a slot, or 0 when the slot does not exist.
  std::uint32_t slot_bytes(std::uint32_t slot) const noexcept;
  // slot_address when the slot holds at least n_bytes, else null; by one look at the size class, so that a slot whose extent is
  // being assigned anew can be asked for too.
  void *slot_payload(std::uint32_t slot, std::uint32_t n_bytes) const noexcept;
  // Live header of a slot (read it with copy_header), or null when the slot does not exist. The part table follows it.
  const kvp_slot_header *header(std::uint32_t slot) const noexcept;

  int touch_extent(std::uint32_t extent) noexcept;
  int assign_extent(std::uint32_t extent, std::uint32_t slot_bytes);
  int mark_writing(std::uint64_t n, const std::uint32_t *slots, const std::uint32_t *generations) noexcept;
  int mark_committed(std::uint64_t n, const std::uint32_t *slots, const std::uint32_t *generations, const std::uint8_t *keys,
                     std::uint32_t n_parts, const kvp_part *parts) noexcept;
  int mark_withdrawn(std::uint64_t n, const std::uint32_t *slots, const std::uint32_t *generations) noexcept;
  kvp_outcome check(std::uint32_t slot, std::uint32_t generation, const std::uint8_t *key) const noexcept;

  int payload_fd() const noexcept { return payload_file_.fd(); }
  const kvpeer::Mapping &payload() const noexcept { return payload_; }
  int header_fd() const noexcept { return header_file_.fd(); }
  const kvpeer::Mapping &headers() const noexcept { return headers_; }

  const RunId run_id;
  const std::uint64_t extent_bytes;
  const std::uint32_t n_extents;

 private:
  // What the agent itself last wrote into a slot's header.
  struct SlotRecord {
    std::uint32_t generation = 0;
    kvp_slot_state state = KVP_SLOT_FREE;
  };

  kvp_pool(const RunId &run_id, std::uint64_t extent_bytes, std::uint32_t n_extents);

  void *address(std::uint32_t slot, std::uint32_t size_class) const noexcept;
  SlotRecord *record(std::uint32_t slot) noexcept;
  kvp_slot_header *writable_header(std::uint32_t slot) const noexcept;
  void store(std::uint32_t slot, kvp_slot_header &next, const kvp_part *parts) noexcept;

  kvpeer::MemoryFile payload_file_;
  kvpeer::MemoryFile header_file_;
  kvpeer::Mapping payload_;
  kvpeer::Mapping headers_;
  // Size class of each extent, 0 before the first assignment. Written by the assigning thread, read by every serving thread.
  std::unique_ptr<std::atomic<std::uint32_t>[]> slot_bytes_;
  // [extent][index], sized at assignment and never shrunk: generations outlive a change of size class.
  std::vector<std::vector<SlotRecord>> records_;
};
