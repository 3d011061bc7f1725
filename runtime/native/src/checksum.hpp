// CRC-64/NVME, alone or fused with a copy, by the fastest way that this CPU has.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvpeer {

// Continues `crc` (0 at the start) over n_bytes.
std::uint64_t crc64(std::uint64_t crc, const void *source, std::uint64_t n_bytes) noexcept;

enum class Store {
  kCached,     // ordinary stores
  kStreaming,  // past the caches where alignment allows; call finish_streaming() before anybody else may look
};

// Copies and continues `crc` in one pass. The regions must not overlap.
std::uint64_t copy_crc64(std::uint64_t crc, void *destination, const void *source, std::uint64_t n_bytes, Store store) noexcept;

// Copies without a checksum.
void copy(void *destination, const void *source, std::uint64_t n_bytes, Store store) noexcept;

// Orders streaming stores before all later stores of this thread.
void finish_streaming() noexcept;

// The store kind that pays for a call that copies this much in all.
Store store_for(std::uint64_t total_bytes) noexcept;

// Name of the implementation in use: "table", "pclmul" or "vpclmul".
const char *crc64_implementation_name() noexcept;

}  // namespace kvpeer
