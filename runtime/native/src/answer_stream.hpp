// The reader's end of the answer stream: small frames and large payloads from one socket with few system calls.
//
// Whatever is received beyond the payloads of a run (its trailers, the fronts of the next one) lands in a small read-ahead buffer by
// the same system call; payloads go straight to their destinations, except for the bytes that were read ahead. Not thread-safe.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvpeer {

class AnswerStream {
 public:
  // Room for what stands between the payloads of two runs when pages have few parts; more takes another system call.
  static constexpr size_t kReadAheadBytes = 4096;

  explicit AnswerStream(int fd) : fd_(fd) {}

  // Exactly n_bytes into `into`.
  int take(void *into, size_t n_bytes, uint64_t deadline_ns);
  // At least one byte and at most n_bytes_max into the payloads that are left, in order; n_taken says how many.
  // n_vectors: 1..kRunPagesMax.
  int take_payload(const iovec *vectors, size_t n_vectors, size_t n_bytes_max, uint64_t deadline_ns, size_t &n_taken);
  // True when nothing was received beyond what was taken.
  bool is_drained() const { return first_ == end_; }

 private:
  size_t take_read_ahead(void *into, size_t n_bytes);

  int fd_;
  size_t first_ = 0;
  size_t end_ = 0;
  std::array<std::byte, kReadAheadBytes> read_ahead_;
};

}  // namespace kvpeer
