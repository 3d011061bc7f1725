#include "pool.hpp"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "checksum.hpp"
#include "extent.hpp"
#include "slot_header.hpp"

using kvpeer::extent_of;
using kvpeer::index_of;

namespace {

constexpr std::uint64_t kHugePageBytes[] = {0, 2ull << 20, 1ull << 30};

bool are_sizes_valid(std::uint64_t capacity_bytes, std::uint64_t extent_bytes, std::uint64_t hugepage_bytes) {
  const bool is_known_hugepage =
      std::find(std::begin(kHugePageBytes), std::end(kHugePageBytes), hugepage_bytes) != std::end(kHugePageBytes);
  if (!is_known_hugepage || !kvpeer::is_extent_valid(extent_bytes)) {
    return false;
  }
  if (hugepage_bytes != 0 && extent_bytes % hugepage_bytes != 0) {
    return false;
  }
  const std::uint64_t n_extents = capacity_bytes / extent_bytes;
  return n_extents >= 1 && n_extents <= kvpeer::kExtentsMax;
}

// Every part lies in the slot and their sum is a length that fits it. Writes the sum.
bool are_parts_valid(const kvp_part *parts, std::uint32_t n_parts, std::uint32_t slot_bytes, std::uint32_t &length) {
  std::uint64_t sum = 0;
  for (std::uint32_t idx = 0; idx < n_parts; ++idx) {
    if (parts[idx].length == 0 || std::uint64_t{parts[idx].offset} + parts[idx].length > slot_bytes) {
      return false;
    }
    sum += parts[idx].length;
  }
  length = static_cast<std::uint32_t>(sum);
  return sum <= slot_bytes;
}

// A memfd mapped for writing here. Mapped before it is sealed: FUTURE_WRITE leaves this mapping alone and forbids new ones.
int open_sealed(const char *name, std::uint64_t n_bytes, std::uint64_t hugepage_bytes, int seals, kvpeer::MemoryFile &file,
                kvpeer::Mapping &mapping) {
  int result = file.create(name, n_bytes, hugepage_bytes);
  if (result == KVP_OK) {
    result = mapping.map(file.fd(), n_bytes, PROT_READ | PROT_WRITE);
  }
  return result == KVP_OK ? file.seal(seals) : result;
}

}  // namespace

kvp_pool::kvp_pool(const RunId &run, std::uint64_t extent, std::uint32_t extents)
    : run_id(run),
      extent_bytes(extent),
      n_extents(extents),
      slot_bytes_(std::make_unique<std::atomic<std::uint32_t>[]>(extents)),
      records_(extents) {}

int kvp_pool::create(std::uint64_t capacity_bytes, std::uint64_t extent_bytes, std::uint64_t hugepage_bytes,
                     const std::uint8_t *run_id, std::unique_ptr<kvp_pool> &out) {
  if (!are_sizes_valid(capacity_bytes, extent_bytes, hugepage_bytes)) {
    return KVP_EINVAL;
  }
  const std::uint64_t n_extents = capacity_bytes / extent_bytes;
  RunId run;
  std::copy_n(run_id, run.size(), run.begin());
  std::unique_ptr<kvp_pool> pool(new kvp_pool(run, extent_bytes, static_cast<std::uint32_t>(n_extents)));

  constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;
  int result = open_sealed("kvpeer-payload", n_extents * extent_bytes, hugepage_bytes, kSizeSeals | F_SEAL_SEAL,
                           pool->payload_file_, pool->payload_);
  if (result == KVP_OK) {
    result = open_sealed("kvpeer-headers", n_extents * kvpeer::kHeaderExtentBytes, 0,
                         kSizeSeals | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL, pool->header_file_, pool->headers_);
  }
  if (result == KVP_OK) {
    out = std::move(pool);
  }
  return result;
}

std::uint32_t kvp_pool::slot_bytes(std::uint32_t slot) const noexcept {
  const std::uint32_t extent = extent_of(slot);
  if (extent >= n_extents) {
    return 0;
  }
  const std::uint32_t size_class = slot_bytes_[extent].load(std::memory_order_acquire);
  return size_class != 0 && index_of(slot) < extent_bytes / size_class ? size_class : 0;
}

void *kvp_pool::address(std::uint32_t slot, std::uint32_t size_class) const noexcept {
  return payload_.data() + extent_of(slot) * extent_bytes + std::uint64_t{index_of(slot)} * size_class;
}

void *kvp_pool::slot_address(std::uint32_t slot) const noexcept {
  const std::uint32_t size_class = slot_bytes(slot);
  return size_class == 0 ? nullptr : address(slot, size_class);
}

void *kvp_pool::slot_payload(std::uint32_t slot, std::uint32_t n_bytes) const noexcept {
  const std::uint32_t size_class = slot_bytes(slot);
  return size_class == 0 || n_bytes > size_class ? nullptr : address(slot, size_class);
}

kvp_slot_header *kvp_pool::writable_header(std::uint32_t slot) const noexcept {
  return reinterpret_cast<kvp_slot_header *>(headers_.data() + std::uint64_t{slot} * KVP_HEADER_STRIDE);
}

const kvp_slot_header *kvp_pool::header(std::uint32_t slot) const noexcept {
  return slot_bytes(slot) == 0 ? nullptr : writable_header(slot);
}

kvp_pool::SlotRecord *kvp_pool::record(std::uint32_t slot) noexcept {
  return slot_bytes(slot) == 0 ? nullptr : &records_[extent_of(slot)][index_of(slot)];
}

int kvp_pool::touch_extent(std::uint32_t extent) noexcept {
  return extent < n_extents ? payload_.populate(extent * extent_bytes, extent_bytes) : KVP_EINVAL;
}

int kvp_pool::assign_extent(std::uint32_t extent, std::uint32_t slot_bytes) {
  if (extent >= n_extents || slot_bytes == 0 || slot_bytes % kvpeer::kPageBytes != 0 || slot_bytes > extent_bytes ||
      extent_bytes / slot_bytes > KVP_SLOTS_PER_EXTENT) {
    return KVP_EINVAL;
  }
  std::vector<SlotRecord> &records = records_[extent];
  const bool is_in_use = std::any_of(records.begin(), records.end(), [](const SlotRecord &slot) {
    return slot.state != KVP_SLOT_FREE && slot.state != KVP_SLOT_WITHDRAWN;
  });
  if (is_in_use) {
    return KVP_EINVAL;
  }
  const std::uint64_t n_slots = extent_bytes / slot_bytes;
  // Headers are faulted in here, so that a full host refuses a size class instead of killing the agent at a later header write.
  const std::uint64_t n_header_pages = (n_slots * KVP_HEADER_STRIDE + kvpeer::kPageBytes - 1) / kvpeer::kPageBytes;
  const int result = headers_.populate(extent * kvpeer::kHeaderExtentBytes, n_header_pages * kvpeer::kPageBytes);
  if (result != KVP_OK) {
    return result;
  }
  records.resize(std::max<std::size_t>(records.size(), n_slots));
  slot_bytes_[extent].store(slot_bytes, std::memory_order_release);
  return KVP_OK;
}

void kvp_pool::store(std::uint32_t slot, kvp_slot_header &next, const kvp_part *parts) noexcept {
  std::copy(run_id.begin(), run_id.end(), next.run_id);
  next.slot_bytes = slot_bytes(slot);
  kvpeer::seal_header(next, parts);
  kvpeer::write_header(writable_header(slot), next, parts);
  *record(slot) = {next.generation, static_cast<kvp_slot_state>(next.state)};
}

int kvp_pool::mark_writing(std::uint64_t n, const std::uint32_t *slots, const std::uint32_t *generations) noexcept {
  for (std::uint64_t idx = 0; idx < n; ++idx) {
    const SlotRecord *last = record(slots[idx]);
    if (last == nullptr || generations[idx] == 0 || generations[idx] == last->generation) {
      return KVP_EINVAL;
    }
  }
  for (std::uint64_t idx = 0; idx < n; ++idx) {
    kvp_slot_header next{};
    next.state = KVP_SLOT_WRITING;
    next.generation = generations[idx];
    store(slots[idx], next, nullptr);
  }
  kvpeer::order_header_writes();
  return KVP_OK;
}

int kvp_pool::mark_committed(std::uint64_t n, const std::uint32_t *slots, const std::uint32_t *generations,
                             const std::uint8_t *keys, std::uint32_t n_parts, const kvp_part *parts) noexcept {
  if (n_parts < 1 || n_parts > KVP_PARTS_MAX) {
    return KVP_EINVAL;
  }
  std::uint32_t length = 0;
  for (std::uint64_t idx = 0; idx < n; ++idx) {
    const SlotRecord *last = record(slots[idx]);
    if (last == nullptr || last->state != KVP_SLOT_WRITING || last->generation != generations[idx] ||
        !are_parts_valid(parts + idx * n_parts, n_parts, slot_bytes(slots[idx]), length)) {
      return KVP_EINVAL;
    }
  }
  for (std::uint64_t idx = 0; idx < n; ++idx) {
    const kvp_part *page_parts = parts + idx * n_parts;
    are_parts_valid(page_parts, n_parts, slot_bytes(slots[idx]), length);
    kvp_slot_header next{};
    next.state = KVP_SLOT_COMMITTED;
    next.n_parts = static_cast<std::uint16_t>(n_parts);
    next.generation = generations[idx];
    next.length = length;
    next.checksum_algorithm = KVP_CRC64_NVME;
    std::memcpy(next.key, keys + idx * KVP_KEY_BYTES, KVP_KEY_BYTES);
    store(slots[idx], next, page_parts);
  }
  kvpeer::order_header_writes();
  return KVP_OK;
}

int kvp_pool::mark_withdrawn(std::uint64_t n, const std::uint32_t *slots, const std::uint32_t *generations) noexcept {
  for (std::uint64_t idx = 0; idx < n; ++idx) {
    const SlotRecord *last = record(slots[idx]);
    if (last == nullptr || last->state == KVP_SLOT_FREE || last->generation != generations[idx]) {
      return KVP_EINVAL;
    }
  }
  for (std::uint64_t idx = 0; idx < n; ++idx) {
    kvp_slot_header next{};
    next.state = KVP_SLOT_WITHDRAWN;
    next.generation = generations[idx];
    store(slots[idx], next, nullptr);
  }
  kvpeer::order_header_writes();
  return KVP_OK;
}

kvp_outcome kvp_pool::check(std::uint32_t slot, std::uint32_t generation, const std::uint8_t *key) const noexcept {
  const kvp_slot_header *live = header(slot);
  kvp_slot_header before, after;
  kvp_part parts[KVP_PARTS_MAX];
  if (live == nullptr || !kvpeer::copy_header(live, before, parts) ||
      !kvpeer::header_matches(before, key, run_id.data(), generation, before.length)) {
    return KVP_STALE;
  }
  bool is_right = true;
  for (std::uint32_t idx = 0; idx < before.n_parts && is_right; ++idx) {
    const auto *part = static_cast<const std::byte *>(slot_payload(slot, parts[idx].offset + parts[idx].length));
    if (part == nullptr) {
      return KVP_STALE;
    }
    is_right = kvpeer::crc64(0, part + parts[idx].offset, parts[idx].length) == parts[idx].checksum;
  }
  if (!kvpeer::copy_header(live, after, nullptr) || !kvpeer::same_header(before, after)) {
    return KVP_STALE;
  }
  return is_right ? KVP_HIT : KVP_CORRUPT;
}

extern "C" {

int kvp_pool_create(uint64_t capacity_bytes, uint64_t extent_bytes, uint64_t hugepage_bytes, const uint8_t run_id[16],
                    kvp_pool **out) {
  if (run_id == nullptr || out == nullptr) {
    return KVP_EINVAL;
  }
  try {
    std::unique_ptr<kvp_pool> pool;
    const int result = kvp_pool::create(capacity_bytes, extent_bytes, hugepage_bytes, run_id, pool);
    *out = pool.release();
    return result;
  } catch (const std::bad_alloc &) {
    return KVP_ENOMEM;
  }
}

void kvp_pool_destroy(kvp_pool *pool) { delete pool; }

int kvp_pool_fds(const kvp_pool *pool, int *payload_fd, int *header_fd) {
  if (pool == nullptr || payload_fd == nullptr || header_fd == nullptr) {
    return KVP_EINVAL;
  }
  *payload_fd = pool->payload_fd();
  *header_fd = pool->header_fd();
  return KVP_OK;
}

uint64_t kvp_pool_n_extents(const kvp_pool *pool) { return pool == nullptr ? 0 : pool->n_extents; }

int kvp_pool_touch_extent(kvp_pool *pool, uint32_t extent) {
  return pool == nullptr ? KVP_EINVAL : pool->touch_extent(extent);
}

int kvp_pool_assign_extent(kvp_pool *pool, uint32_t extent, uint32_t slot_bytes) {
  try {
    return pool == nullptr ? KVP_EINVAL : pool->assign_extent(extent, slot_bytes);
  } catch (const std::bad_alloc &) {
    return KVP_ENOMEM;
  }
}

void *kvp_pool_payload(const kvp_pool *pool, uint64_t *n_bytes) {
  if (pool == nullptr || n_bytes == nullptr) {
    return nullptr;
  }
  *n_bytes = pool->payload().n_bytes();
  return pool->payload().data();
}

void *kvp_pool_slot_address(const kvp_pool *pool, uint32_t slot) {
  return pool == nullptr ? nullptr : pool->slot_address(slot);
}

int kvp_pool_mark_writing(kvp_pool *pool, uint64_t n, const uint32_t *slots, const uint32_t *generations) {
  if (pool == nullptr || (n != 0 && (slots == nullptr || generations == nullptr))) {
    return KVP_EINVAL;
  }
  return pool->mark_writing(n, slots, generations);
}

int kvp_pool_mark_committed(kvp_pool *pool, uint64_t n, const uint32_t *slots, const uint32_t *generations,
                            const uint8_t *keys, uint32_t n_parts, const kvp_part *parts) {
  if (pool == nullptr ||
      (n != 0 && (slots == nullptr || generations == nullptr || keys == nullptr || parts == nullptr))) {
    return KVP_EINVAL;
  }
  return pool->mark_committed(n, slots, generations, keys, n_parts, parts);
}

int kvp_pool_mark_withdrawn(kvp_pool *pool, uint64_t n, const uint32_t *slots, const uint32_t *generations) {
  if (pool == nullptr || (n != 0 && (slots == nullptr || generations == nullptr))) {
    return KVP_EINVAL;
  }
  return pool->mark_withdrawn(n, slots, generations);
}

int kvp_pool_check(const kvp_pool *pool, uint32_t slot, uint32_t generation, const uint8_t key[16]) {
  return pool == nullptr || key == nullptr ? static_cast<int>(KVP_EINVAL) : static_cast<int>(pool->check(slot, generation, key));
}

}  // extern "C"
