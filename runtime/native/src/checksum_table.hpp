// Arithmetic of CRC-64/NVME at compile time: everything follows from the polynomial.
//
// Words are "reflected": bit i of a 64-bit word is the coefficient of x^(63 - i), and memory order is little endian, so that the
// first byte of a message holds its highest powers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvpeer {

constexpr std::uint64_t kPolynomial = 0x9a6c9329ac4bc9b5;  // without its x^64 term
constexpr std::uint64_t kOne = std::uint64_t{1} << 63;     // the constant 1

// word * x mod P.
constexpr std::uint64_t times_x(std::uint64_t word) { return (word >> 1) ^ ((word & 1) != 0 ? kPolynomial : 0); }

// x^n mod P.
constexpr std::uint64_t x_to_the(unsigned n) {
  std::uint64_t power = kOne;
  for (unsigned idx = 0; idx < n; ++idx) {
    power = times_x(power);
  }
  return power;
}

constexpr std::size_t kSlices = 8;
using SlicingTable = std::array<std::array<std::uint64_t, 256>, kSlices>;

// table[s][b]: the remainder that byte b leaves when s more bytes follow it.
constexpr SlicingTable make_slicing_table() {
  SlicingTable table{};
  for (unsigned byte = 0; byte < 256; ++byte) {
    std::uint64_t word = byte;
    for (unsigned bit = 0; bit < 8; ++bit) {
      word = times_x(word);
    }
    table[0][byte] = word;
  }
  for (std::size_t slice = 1; slice < kSlices; ++slice) {
    for (unsigned byte = 0; byte < 256; ++byte) {
      const std::uint64_t shorter = table[slice - 1][byte];
      table[slice][byte] = (shorter >> 8) ^ table[0][shorter & 0xff];
    }
  }
  return table;
}

inline constexpr SlicingTable kSlicingTable = make_slicing_table();

// Folding moves a 128-bit piece `high * x^64 + low` over `n_bits` of message: high * first ^ low * second is congruent to the piece
// times x^n_bits. A carry-less product of two reflected words stands one power of x too high, hence the -1.
struct FoldConstants {
  std::uint64_t high;  // for the word that comes first in memory
  std::uint64_t low;
};

constexpr FoldConstants fold_over(unsigned n_bits) { return {x_to_the(n_bits + 64 - 1), x_to_the(n_bits - 1)}; }

}  // namespace kvpeer
