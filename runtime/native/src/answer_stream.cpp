#include "answer_stream.hpp"

#include <algorithm>
#include <cstring>

#include "socket_io.hpp"

namespace kvpeer {

int AnswerStream::take(void *into, size_t n_bytes, uint64_t deadline_ns) {
  auto *next = static_cast<std::byte *>(into);
  for (;;) {
    const size_t n = take_read_ahead(next, n_bytes);
    next += n;
    n_bytes -= n;
    if (n_bytes == 0) {
      return KVP_OK;
    }
    iovec vector{read_ahead_.data(), read_ahead_.size()};
    size_t n_received = 0;
    if (int rc = receive_some(fd_, &vector, 1, deadline_ns, n_received); rc != KVP_OK) {
      return rc;
    }
    first_ = 0;
    end_ = n_received;
  }
}

size_t AnswerStream::take_read_ahead(void *into, size_t n_bytes) {
  const size_t n = std::min(n_bytes, end_ - first_);
  if (n > 0) {
    std::memcpy(into, read_ahead_.data() + first_, n);
    first_ += n;
  }
  return n;
}

// Receives up to n_bytes; when the piece ends the payload, what follows it is read ahead. The read-ahead is empty before.
int AnswerStream::receive_piece(std::byte *into, size_t n_bytes, bool is_last, uint64_t deadline_ns, size_t &n_received) {
  iovec vectors[2] = {{into, n_bytes}, {read_ahead_.data(), read_ahead_.size()}};
  size_t n = 0;
  if (int rc = receive_some(fd_, vectors, is_last ? 2 : 1, deadline_ns, n); rc != KVP_OK) {
    return rc;
  }
  n_received = std::min(n, n_bytes);
  first_ = 0;
  end_ = n - n_received;
  return KVP_OK;
}

}  // namespace kvpeer
