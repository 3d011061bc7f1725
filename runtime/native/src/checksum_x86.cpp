// CRC-64/NVME by carry-less multiplication: the message is folded in wide lanes onto its last 16 bytes, which the table finishes.
//
// Every byte is loaded once; what is stored is what was summed, whoever changes the source meanwhile.
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "checksum_kernels.hpp"
#include "checksum_table.hpp"

#define KVPEER_TARGET_PCLMUL __attribute__((target("pclmul")))
#define KVPEER_TARGET_VPCLMUL __attribute__((target("pclmul,avx512f,vpclmulqdq")))

namespace kvpeer {
namespace {

constexpr std::uint64_t kLineBytes = 64;    // streaming stores fill whole cache lines
constexpr std::uint64_t kNarrowBytes = 16;  // one 128-bit vector
constexpr std::uint64_t kWideBytes = 64;    // one 512-bit vector
constexpr int kNarrowLanes = 8;             // independent folds in flight: latency of a multiplication over its issue rate
constexpr int kWideLanes = 4;

enum class Sink { kNothing, kCached, kStreaming };

// Bytes on their way, and how many are left.
struct Stream {
  std::byte *destination;
  const std::byte *source;
  std::uint64_t n_bytes;

  template <Sink sink>
  void step(std::uint64_t n) noexcept {
    source += n;
    n_bytes -= n;
    if constexpr (sink != Sink::kNothing) {
      destination += n;
    }
  }
};

// At most 64 bytes, by way of the stack.
template <Sink sink>
std::uint64_t take_few(std::uint64_t state, Stream &stream, std::uint64_t n) noexcept {
  if constexpr (sink == Sink::kNothing) {
    state = advance_by_table(state, stream.source, n);
  } else {
    std::byte few[kLineBytes];
    std::memcpy(few, stream.source, n);
    state = advance_by_table(state, few, n);
    std::memcpy(stream.destination, few, n);
  }
  stream.step<sink>(n);
  return state;
}

std::uint64_t bytes_to_line(const std::byte *address) noexcept {
  return (kLineBytes - reinterpret_cast<std::uintptr_t>(address) % kLineBytes) % kLineBytes;
}

// ---- 128 bits --------------------------------------------------------------------------------------------------------

KVPEER_TARGET_PCLMUL inline __m128i narrow_constants(FoldConstants fold) noexcept {
  return _mm_set_epi64x(static_cast<long long>(fold.low), static_cast<long long>(fold.high));
}

KVPEER_TARGET_PCLMUL inline __m128i fold_narrow(__m128i piece, __m128i constants, __m128i onto) noexcept {
  const __m128i high = _mm_clmulepi64_si128(piece, constants, 0x00);
  const __m128i low = _mm_clmulepi64_si128(piece, constants, 0x11);
  return _mm_xor_si128(_mm_xor_si128(high, low), onto);
}

template <Sink sink>
KVPEER_TARGET_PCLMUL inline __m128i take_narrow(const Stream &stream, std::uint64_t offset) noexcept {
  const __m128i piece = _mm_loadu_si128(reinterpret_cast<const __m128i *>(stream.source + offset));
  if constexpr (sink == Sink::kCached) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(stream.destination + offset), piece);
  } else if constexpr (sink == Sink::kStreaming) {
    _mm_stream_si128(reinterpret_cast<__m128i *>(stream.destination + offset), piece);
  }
  return piece;
}

// Folds what is left onto `folded`, the last 16 bytes so far, and reduces it to the register.
template <Sink sink>
KVPEER_TARGET_PCLMUL inline std::uint64_t finish_narrow(__m128i folded, Stream stream) noexcept {
  constexpr Sink kSmallSink = sink == Sink::kStreaming ? Sink::kCached : sink;  // less than a line is left
  const __m128i constants = narrow_constants(fold_over(8 * kNarrowBytes));
  while (stream.n_bytes >= kNarrowBytes) {
    folded = fold_narrow(folded, constants, take_narrow<kSmallSink>(stream, 0));
    stream.step<sink>(kNarrowBytes);
  }
  std::byte last[kNarrowBytes];
  _mm_storeu_si128(reinterpret_cast<__m128i *>(last), folded);
  const std::uint64_t state = advance_by_table(0, last, kNarrowBytes);
  return take_few<sink>(state, stream, stream.n_bytes);
}

// At least kNarrowLanes vectors.
template <Sink sink>
KVPEER_TARGET_PCLMUL std::uint64_t fold_stream_narrow(std::uint64_t state, Stream stream) noexcept {
  constexpr std::uint64_t kStepBytes = kNarrowLanes * kNarrowBytes;
  __m128i lanes[kNarrowLanes];
#pragma GCC unroll 8
  for (int lane = 0; lane < kNarrowLanes; ++lane) {
    lanes[lane] = take_narrow<sink>(stream, lane * kNarrowBytes);
  }
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi64_si128(static_cast<long long>(state)));
  stream.step<sink>(kStepBytes);

  const __m128i over_step = narrow_constants(fold_over(8 * kStepBytes));
  while (stream.n_bytes >= kStepBytes) {
#pragma GCC unroll 8
    for (int lane = 0; lane < kNarrowLanes; ++lane) {
      lanes[lane] = fold_narrow(lanes[lane], over_step, take_narrow<sink>(stream, lane * kNarrowBytes));
    }
    stream.step<sink>(kStepBytes);
  }
  const __m128i over_lane = narrow_constants(fold_over(8 * kNarrowBytes));
  __m128i folded = lanes[0];
#pragma GCC unroll 8
  for (int lane = 1; lane < kNarrowLanes; ++lane) {
    folded = fold_narrow(folded, over_lane, lanes[lane]);
  }
  return finish_narrow<sink>(folded, stream);
}

// ---- 512 bits --------------------------------------------------------------------------------------------------------

KVPEER_TARGET_VPCLMUL inline __m512i wide_constants(FoldConstants fold) noexcept {
  return _mm512_set_epi64(static_cast<long long>(fold.low), static_cast<long long>(fold.high),
                          static_cast<long long>(fold.low), static_cast<long long>(fold.high),
                          static_cast<long long>(fold.low), static_cast<long long>(fold.high),
                          static_cast<long long>(fold.low), static_cast<long long>(fold.high));
}

KVPEER_TARGET_VPCLMUL inline __m512i fold_wide(__m512i piece, __m512i constants, __m512i onto) noexcept {
  constexpr int kXorOfThree = 0x96;
  const __m512i high = _mm512_clmulepi64_epi128(piece, constants, 0x00);
  const __m512i low = _mm512_clmulepi64_epi128(piece, constants, 0x11);
  return _mm512_ternarylogic_epi64(high, low, onto, kXorOfThree);
}

template <Sink sink>
KVPEER_TARGET_VPCLMUL inline __m512i take_wide(const Stream &stream, std::uint64_t offset) noexcept {
  const __m512i piece = _mm512_loadu_si512(stream.source + offset);
  if constexpr (sink == Sink::kCached) {
    _mm512_storeu_si512(stream.destination + offset, piece);
  } else if constexpr (sink == Sink::kStreaming) {
    _mm512_stream_si512(reinterpret_cast<__m512i *>(stream.destination + offset), piece);
  }
  return piece;
}

// The four 128-bit pieces of a vector, folded onto the last.
KVPEER_TARGET_VPCLMUL inline __m128i narrow(__m512i wide) noexcept {
  alignas(kWideBytes) std::byte bytes[kWideBytes];
  _mm512_store_si512(bytes, wide);
  const Stream pieces{nullptr, bytes, kWideBytes};
  const __m128i constants = narrow_constants(fold_over(8 * kNarrowBytes));
  __m128i folded = take_narrow<Sink::kNothing>(pieces, 0);
  for (std::uint64_t offset = kNarrowBytes; offset < kWideBytes; offset += kNarrowBytes) {
    folded = fold_narrow(folded, constants, take_narrow<Sink::kNothing>(pieces, offset));
  }
  return folded;
}

// At least kWideLanes vectors.
template <Sink sink>
KVPEER_TARGET_VPCLMUL std::uint64_t fold_stream_wide(std::uint64_t state, Stream stream) noexcept {
  constexpr std::uint64_t kStepBytes = kWideLanes * kWideBytes;
  __m512i lanes[kWideLanes];
#pragma GCC unroll 4
  for (int lane = 0; lane < kWideLanes; ++lane) {
    lanes[lane] = take_wide<sink>(stream, lane * kWideBytes);
  }
  const __m128i register_bits = _mm_cvtsi64_si128(static_cast<long long>(state));
  lanes[0] = _mm512_xor_si512(lanes[0], _mm512_zextsi128_si512(register_bits));
  stream.step<sink>(kStepBytes);

  const __m512i over_step = wide_constants(fold_over(8 * kStepBytes));
  while (stream.n_bytes >= kStepBytes) {
#pragma GCC unroll 4
    for (int lane = 0; lane < kWideLanes; ++lane) {
      lanes[lane] = fold_wide(lanes[lane], over_step, take_wide<sink>(stream, lane * kWideBytes));
    }
    stream.step<sink>(kStepBytes);
  }
  const __m512i over_lane = wide_constants(fold_over(8 * kWideBytes));
  __m512i folded = lanes[0];
#pragma GCC unroll 4
  for (int lane = 1; lane < kWideLanes; ++lane) {
    folded = fold_wide(folded, over_lane, lanes[lane]);
  }
  while (stream.n_bytes >= kWideBytes) {
    folded = fold_wide(folded, over_lane, take_wide<sink>(stream, 0));
    stream.step<sink>(kWideBytes);
  }
  return finish_narrow<sink>(narrow(folded), stream);
}

// ---- entry -----------------------------------------------------------------------------------------------------------

using FoldStream = std::uint64_t (*)(std::uint64_t state, Stream stream) noexcept;

template <FoldStream nothing, FoldStream cached, FoldStream streaming>
std::uint64_t run(std::uint64_t state, Stream stream, Store store, std::uint64_t wide_bytes_min) noexcept {
  if (stream.destination == nullptr) {
    return stream.n_bytes < wide_bytes_min ? advance_by_table(state, stream.source, stream.n_bytes) : nothing(state, stream);
  }
  if (store == Store::kStreaming) {
    const std::uint64_t head = std::min(bytes_to_line(stream.destination), stream.n_bytes);
    state = take_few<Sink::kStreaming>(state, stream, head);
  }
  if (stream.n_bytes >= wide_bytes_min) {
    return store == Store::kStreaming ? streaming(state, stream) : cached(state, stream);
  }
  while (stream.n_bytes > 0) {
    state = take_few<Sink::kCached>(state, stream, std::min(kLineBytes, stream.n_bytes));
  }
  return state;
}

}  // namespace

std::uint64_t checksum_pclmul(std::uint64_t state, std::byte *destination, const std::byte *source, std::uint64_t n_bytes,
                              Store store) noexcept {
  return run<fold_stream_narrow<Sink::kNothing>, fold_stream_narrow<Sink::kCached>, fold_stream_narrow<Sink::kStreaming>>(
      state, {destination, source, n_bytes}, store, kNarrowLanes * kNarrowBytes);
}

std::uint64_t checksum_vpclmul(std::uint64_t state, std::byte *destination, const std::byte *source, std::uint64_t n_bytes,
                               Store store) noexcept {
  if (n_bytes < 2 * kWideLanes * kWideBytes) {
    return checksum_pclmul(state, destination, source, n_bytes, store);  // too short for the wide loop to start and still turn
  }
  return run<fold_stream_wide<Sink::kNothing>, fold_stream_wide<Sink::kCached>, fold_stream_wide<Sink::kStreaming>>(
      state, {destination, source, n_bytes}, store, kWideLanes * kWideBytes);
}

void copy_streaming(std::byte *destination, const std::byte *source, std::uint64_t n_bytes) noexcept {
  const std::uint64_t head = std::min(bytes_to_line(destination), n_bytes);
  std::memcpy(destination, source, head);
  std::uint64_t done = head;
  for (; done + kLineBytes <= n_bytes; done += kLineBytes) {
    __m128i pieces[kLineBytes / kNarrowBytes];
#pragma GCC unroll 4
    for (std::uint64_t idx = 0; idx < kLineBytes / kNarrowBytes; ++idx) {
      pieces[idx] = _mm_loadu_si128(reinterpret_cast<const __m128i *>(source + done + idx * kNarrowBytes));
    }
#pragma GCC unroll 4
    for (std::uint64_t idx = 0; idx < kLineBytes / kNarrowBytes; ++idx) {
      _mm_stream_si128(reinterpret_cast<__m128i *>(destination + done + idx * kNarrowBytes), pieces[idx]);
    }
  }
  std::memcpy(destination + done, source + done, n_bytes - done);
}

}  // namespace kvpeer

#endif  // __x86_64__
