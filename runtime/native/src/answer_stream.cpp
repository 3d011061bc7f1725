#include "answer_stream.hpp"

#include <algorithm>
#include <cstring>

#include "kvpeer/kvpeer.h"
#include "socket_io.hpp"
#include "tcp_protocol.hpp"

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

int AnswerStream::take_payload(const iovec *vectors, size_t n_vectors, size_t n_bytes_max, uint64_t deadline_ns,
                               size_t &n_taken) {
  if (!is_drained()) {
    n_taken = take_read_ahead(vectors->iov_base, std::min(vectors->iov_len, n_bytes_max));
    return KVP_OK;
  }
  std::array<iovec, tcp::kRunPagesMax + 1> into;
  size_t n_into = 0;
  size_t n_wanted = 0;
  for (; n_into < n_vectors && n_wanted < n_bytes_max; ++n_into) {
    into[n_into] = {vectors[n_into].iov_base, std::min(vectors[n_into].iov_len, n_bytes_max - n_wanted)};
    n_wanted += into[n_into].iov_len;
  }
  const bool ends_payloads = n_into == n_vectors && into[n_into - 1].iov_len == vectors[n_into - 1].iov_len;
  if (ends_payloads) {
    into[n_into++] = {read_ahead_.data(), read_ahead_.size()};
  }
  size_t n = 0;
  if (int rc = receive_some(fd_, into.data(), n_into, deadline_ns, n); rc != KVP_OK) {
    return rc;
  }
  n_taken = std::min(n, n_wanted);
  first_ = 0;
  end_ = n - n_taken;
  return KVP_OK;
}

}  // namespace kvpeer
