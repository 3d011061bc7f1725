// The reader's end of the answer stream: small frames and large payloads from one socket with few system calls.
//
// Whatever is received beyond a payload (trailer, next prefix, header, part table) lands in a small read-ahead buffer by the
// same system call; a payload goes straight to its destination, except for the bytes that were read ahead. Not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kvpeer/kvpeer.h"
#include "tcp_protocol.hpp"

namespace kvpeer {

class AnswerStream {
 public:
  // Between two payloads: trailer, prefix, header, full part table.
  static constexpr size_t kReadAheadBytes =
      KVP_HEADER_BYTES + sizeof(tcp::PagePrefix) + KVP_HEADER_BYTES + KVP_PARTS_MAX * KVP_PART_ENTRY_BYTES;

  explicit AnswerStream(int fd) : fd_(fd) {}

  // Exactly n_bytes into `into`.
  int take(void *into, size_t n_bytes, uint64_t deadline_ns);
  // Exactly n_bytes into `into`, in pieces of at most piece_bytes; after each piece on_progress hears how many bytes are there.
  template <typename OnProgress>
  int take_payload(std::byte *into, size_t n_bytes, size_t piece_bytes, uint64_t deadline_ns, OnProgress on_progress);
  // True when nothing was received beyond what was taken.
  bool is_drained() const { return first_ == end_; }

 private:
  size_t take_read_ahead(void *into, size_t n_bytes);
  int receive_piece(std::byte *into, size_t n_bytes, bool is_last, uint64_t deadline_ns, size_t &n_received);

  int fd_;
  size_t first_ = 0;
  size_t end_ = 0;
  std::array<std::byte, kReadAheadBytes> read_ahead_;
};

template <typename OnProgress>
int AnswerStream::take_payload(std::byte *into, size_t n_bytes, size_t piece_bytes, uint64_t deadline_ns,
                               OnProgress on_progress) {
  size_t n_there = take_read_ahead(into, n_bytes);
  while (n_there < n_bytes) {
    const size_t left = n_bytes - n_there;
    const size_t piece = left < piece_bytes ? left : piece_bytes;
    size_t n = 0;
    if (int rc = receive_piece(into + n_there, piece, piece == left, deadline_ns, n); rc != KVP_OK) {
      return rc;
    }
    n_there += n;
    on_progress(n_there);
  }
  on_progress(n_bytes);
  return KVP_OK;
}

}  // namespace kvpeer
