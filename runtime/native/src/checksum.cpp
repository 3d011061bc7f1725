#include "checksum.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "checksum_kernels.hpp"
#include "checksum_table.hpp"
#include "kvpeer/kvpeer.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace kvpeer {
namespace {

// Small enough that a piece copied first is still in the nearest cache when it is summed.
constexpr std::uint64_t kTablePieceBytes = 4096;

// Above this, a copy is larger than what the destination's next user could find in the cache of this core anyway.
constexpr std::uint64_t kStreamingBytesMin = 1u << 20;

struct Implementation {
  ChecksumKernel kernel;
  const char *name;
  bool (*is_supported)();
};

bool always() { return true; }

#if defined(__x86_64__)
bool has_pclmul() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("pclmul") != 0;
}

bool has_vpclmul() {
  return has_pclmul() && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("vpclmulqdq") != 0;
}
#endif

// In ascending order of speed; the numbers of kvp_crc64_select count from 1 here.
constexpr Implementation kImplementations[] = {
    {checksum_table, "table", always},
#if defined(__x86_64__)
    {checksum_pclmul, "pclmul", has_pclmul},
    {checksum_vpclmul, "vpclmul", has_vpclmul},
#endif
};

const Implementation *fastest() {
  const auto *first = std::begin(kImplementations);
  const auto *last = std::end(kImplementations);
  while (last - 1 != first && !(last - 1)->is_supported()) {
    --last;
  }
  return last - 1;
}

std::atomic<const Implementation *> &selected() {
  static std::atomic<const Implementation *> implementation{fastest()};
  return implementation;
}

std::uint64_t run(std::uint64_t crc, void *destination, const void *source, std::uint64_t n_bytes, Store store) noexcept {
  if (n_bytes == 0) {
    return crc;
  }
  const Implementation *implementation = selected().load(std::memory_order_relaxed);
  return ~implementation->kernel(~crc, static_cast<std::byte *>(destination), static_cast<const std::byte *>(source),
                                 n_bytes, store);
}

std::uint64_t load_word(const std::byte *source) noexcept {
  std::uint64_t word;
  std::memcpy(&word, source, sizeof(word));
  return word;
}

}  // namespace

std::uint64_t advance_by_table(std::uint64_t state, const std::byte *source, std::uint64_t n_bytes) noexcept {
  for (; n_bytes >= kSlices; source += kSlices, n_bytes -= kSlices) {
    const std::uint64_t word = state ^ load_word(source);
    state = 0;
    for (std::size_t idx = 0; idx < kSlices; ++idx) {
      state ^= kSlicingTable[kSlices - 1 - idx][(word >> (8 * idx)) & 0xff];
    }
  }
  for (; n_bytes > 0; ++source, --n_bytes) {
    state = (state >> 8) ^ kSlicingTable[0][(state ^ static_cast<std::uint64_t>(*source)) & 0xff];
  }
  return state;
}

std::uint64_t checksum_table(std::uint64_t state, std::byte *destination, const std::byte *source, std::uint64_t n_bytes,
                             Store store) noexcept {
  if (destination == nullptr) {
    return advance_by_table(state, source, n_bytes);
  }
  // The bytes that are summed are read back from the destination, so that they are the bytes that were stored even where
  // somebody changes the source meanwhile. Slow as the table is, streaming stores would gain nothing.
  static_cast<void>(store);
  for (std::uint64_t done = 0; done < n_bytes; done += kTablePieceBytes) {
    const std::uint64_t piece = std::min(kTablePieceBytes, n_bytes - done);
    std::memcpy(destination + done, source + done, piece);
    state = advance_by_table(state, destination + done, piece);
  }
  return state;
}

std::uint64_t crc64(std::uint64_t crc, const void *source, std::uint64_t n_bytes) noexcept {
  return run(crc, nullptr, source, n_bytes, Store::kCached);
}

std::uint64_t copy_crc64(std::uint64_t crc, void *destination, const void *source, std::uint64_t n_bytes, Store store) noexcept {
  return run(crc, destination, source, n_bytes, store);
}

void copy(void *destination, const void *source, std::uint64_t n_bytes, Store store) noexcept {
#if defined(__x86_64__)
  if (store == Store::kStreaming) {
    copy_streaming(static_cast<std::byte *>(destination), static_cast<const std::byte *>(source), n_bytes);
    return;
  }
#else
  static_cast<void>(store);
#endif
  std::memcpy(destination, source, n_bytes);
}

void finish_streaming() noexcept {
#if defined(__x86_64__)
  _mm_sfence();
#else
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

Store store_for(std::uint64_t total_bytes) noexcept {
  return total_bytes >= kStreamingBytesMin ? Store::kStreaming : Store::kCached;
}

const char *crc64_implementation_name() noexcept { return selected().load(std::memory_order_relaxed)->name; }

}  // namespace kvpeer

extern "C" {

uint64_t kvp_crc64(uint64_t crc, const void *data, uint64_t n_bytes) { return kvpeer::crc64(crc, data, n_bytes); }

uint64_t kvp_copy_crc64(uint64_t crc, void *dst, const void *src, uint64_t n_bytes) {
  const kvpeer::Store store = kvpeer::store_for(n_bytes);
  crc = kvpeer::copy_crc64(crc, dst, src, n_bytes, store);
  kvpeer::finish_streaming();
  return crc;
}

int kvp_crc64_select(int implementation) {
  using kvpeer::kImplementations;
  if (implementation == 0) {
    kvpeer::selected().store(kvpeer::fastest(), std::memory_order_relaxed);
    return KVP_OK;
  }
  if (implementation < 0 || implementation > static_cast<int>(std::size(kImplementations)) ||
      !kImplementations[implementation - 1].is_supported()) {
    return KVP_EINVAL;
  }
  kvpeer::selected().store(&kImplementations[implementation - 1], std::memory_order_relaxed);
  return KVP_OK;
}

}  // extern "C"
