// The implementations behind checksum.hpp. Each takes and returns the bare shift register (no inversion); a null destination
// means that nothing is copied.
#pragma once

#include <cstdint>

#include "checksum.hpp"

namespace kvpeer {

using ChecksumKernel = std::uint64_t (*)(std::uint64_t state, std::byte *destination, const std::byte *source,
                                         std::uint64_t n_bytes, Store store) noexcept;

std::uint64_t checksum_table(std::uint64_t state, std::byte *destination, const std::byte *source, std::uint64_t n_bytes,
                             Store store) noexcept;

// The register after n_bytes, slice by slice.
std::uint64_t advance_by_table(std::uint64_t state, const std::byte *source, std::uint64_t n_bytes) noexcept;

#if defined(__x86_64__)
// 128 bits at a time; needs PCLMULQDQ.
std::uint64_t checksum_pclmul(std::uint64_t state, std::byte *destination, const std::byte *source, std::uint64_t n_bytes,
                              Store store) noexcept;
// 512 bits at a time; needs AVX-512 F and VPCLMULQDQ.
std::uint64_t checksum_vpclmul(std::uint64_t state, std::byte *destination, const std::byte *source, std::uint64_t n_bytes,
                               Store store) noexcept;
// Copies with streaming stores.
void copy_streaming(std::byte *destination, const std::byte *source, std::uint64_t n_bytes) noexcept;
#endif

}  // namespace kvpeer
