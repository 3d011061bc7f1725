#include "slot_header.hpp"

#include <atomic>
#include <cstring>

#include "checksum.hpp"

namespace kvpeer {
namespace {

constexpr std::size_t kHeaderWords = KVP_HEADER_BYTES / sizeof(std::uint64_t);
constexpr std::size_t kPartWords = KVP_PART_ENTRY_BYTES / sizeof(std::uint64_t);
constexpr int kCopyTriesMax = 2;  // one retry: a second torn copy means a slot in reuse, which is stale anyway

static_assert(sizeof(kvp_slot_header) == KVP_HEADER_BYTES && sizeof(kvp_part) == KVP_PART_ENTRY_BYTES);
static_assert(KVP_HEADER_STRIDE % sizeof(std::uint64_t) == 0);
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "memory formats are little endian");

const std::uint64_t *words_of(const kvp_slot_header *live) noexcept {
  return reinterpret_cast<const std::uint64_t *>(live);
}

void load_words(const std::uint64_t *from, std::size_t n_words, void *to) noexcept {
  auto *out = static_cast<std::byte *>(to);
  for (std::size_t idx = 0; idx < n_words; ++idx) {
    const std::uint64_t word = __atomic_load_n(from + idx, __ATOMIC_ACQUIRE);
    std::memcpy(out + idx * sizeof(word), &word, sizeof(word));
  }
}

void store_words(std::uint64_t *to, std::size_t first, std::size_t n_words, const void *from) noexcept {
  const auto *in = static_cast<const std::byte *>(from);
  for (std::size_t idx = first; idx < n_words; ++idx) {
    std::uint64_t word;
    std::memcpy(&word, in + idx * sizeof(word), sizeof(word));
    __atomic_store_n(to + idx, word, __ATOMIC_RELEASE);
  }
}

std::uint32_t header_checksum(const kvp_slot_header &header) noexcept {
  return static_cast<std::uint32_t>(crc64(0, &header, offsetof(kvp_slot_header, header_checksum)));
}

std::uint32_t table_checksum(const kvp_part *parts, std::uint32_t n_parts) noexcept {
  return static_cast<std::uint32_t>(crc64(0, parts, std::uint64_t{n_parts} * KVP_PART_ENTRY_BYTES));
}

bool is_sound(const kvp_slot_header &header) noexcept {
  return header.magic == KVP_SLOT_MAGIC && header.version == kSlotHeaderVersion && header.n_parts <= KVP_PARTS_MAX &&
         header.header_checksum == header_checksum(header);
}

// ThreadSanitizer does not model fences (and gcc refuses them there); it sees the acquire and release accesses instead.
void fence([[maybe_unused]] std::memory_order order) noexcept {
#ifdef __SANITIZE_THREAD__
  __asm__ __volatile__("" ::: "memory");
#else
  std::atomic_thread_fence(order);
#endif
}

}  // namespace

bool copy_header(const kvp_slot_header *live, kvp_slot_header &out, kvp_part *parts_out) noexcept {
  fence(std::memory_order_acquire);
  const std::uint64_t *words = words_of(live);
  for (int tries = 0; tries < kCopyTriesMax; ++tries) {
    load_words(words, kHeaderWords, &out);
    const std::size_t n_parts = out.n_parts;
    if (parts_out != nullptr && n_parts <= KVP_PARTS_MAX) {
      load_words(words + kHeaderWords, n_parts * kPartWords, parts_out);
    }
    kvp_slot_header again;
    load_words(words, kHeaderWords, &again);
    if (same_header(out, again) && is_sound(out) &&
        (parts_out == nullptr || out.table_checksum == table_checksum(parts_out, out.n_parts))) {
      return true;
    }
  }
  return false;
}

bool header_matches(const kvp_slot_header &header, const std::uint8_t *key, const std::uint8_t *run_id,
                    std::uint32_t generation, std::uint32_t length) noexcept {
  return header.state == KVP_SLOT_COMMITTED && header.checksum_algorithm == KVP_CRC64_NVME && header.n_parts >= 1 &&
         header.generation == generation && header.length == length &&
         std::memcmp(header.key, key, KVP_KEY_BYTES) == 0 && std::memcmp(header.run_id, run_id, KVP_AGENT_ID_BYTES) == 0;
}

bool same_header(const kvp_slot_header &first, const kvp_slot_header &second) noexcept {
  return std::memcmp(&first, &second, KVP_HEADER_BYTES) == 0;
}

void seal_header(kvp_slot_header &header, const kvp_part *parts) noexcept {
  header.magic = KVP_SLOT_MAGIC;
  header.version = kSlotHeaderVersion;
  header.table_checksum = table_checksum(parts, header.n_parts);
  header.header_checksum = header_checksum(header);
}

void write_header(kvp_slot_header *live, const kvp_slot_header &next, const kvp_part *parts) noexcept {
  auto *words = reinterpret_cast<std::uint64_t *>(live);
  __atomic_store_n(words, std::uint64_t{0}, __ATOMIC_RELEASE);
  store_words(words + kHeaderWords, 0, next.n_parts * kPartWords, parts);
  store_words(words, 1, kHeaderWords, &next);
  store_words(words, 0, 1, &next);
}

void order_header_writes() noexcept { fence(std::memory_order_seq_cst); }

}  // namespace kvpeer
