#include "server_session.hpp"

#include <poll.h>

#include <algorithm>

#include "slot_header.hpp"
#include "socket_io.hpp"

namespace kvpeer {

namespace {

// Not before so many bytes are waiting are answers without a payload sent on their own.
constexpr size_t kPendingBytesMax = 64 << 10;

}  // namespace

ServerSession::ServerSession(int fd, const kvp_pool &pool, const kvp_server_limits &limits, ServerCounters &counters)
    : fd_(fd), pool_(pool), limits_(limits), counters_(counters) {}

void ServerSession::run(const Admit &admit) {
  int rc = greet(admit);
  while (rc == KVP_OK) {
    tcp::RequestHeader request{};
    rc = read_request(request);
    if (rc == KVP_OK) {
      rc = answer_request(request);
    }
  }
}

int ServerSession::greet(const Admit &admit) {
  const uint64_t deadline_ns = deadline_in_ms(limits_.handshake_timeout_ms);
  tcp::Hello hello{};
  if (int rc = receive_all(fd_, &hello, sizeof(hello), deadline_ns); rc != KVP_OK) {
    return count(rc);
  }
  if (hello.magic != tcp::kHelloMagic || hello.version != tcp::kVersion) {
    return count(KVP_EPROTO);
  }
  const bool is_admitted = admit(hello);
  tcp::HelloAnswer answer{};
  answer.magic = tcp::kAnswerMagic;
  answer.version = tcp::kVersion;
  answer.status = is_admitted ? tcp::HelloStatus::kOk : tcp::HelloStatus::kRefused;
  if (is_admitted) {
    std::copy(pool_.run_id.begin(), pool_.run_id.end(), answer.producer_id);
    answer.pages_max = limits_.pages_max;
    pages_.resize(limits_.pages_max);
  } else {
    ++counters_.connections_refused;
  }
  iovec vector{&answer, sizeof(answer)};
  const int rc = count(send_all(fd_, &vector, 1, deadline_ns));
  return is_admitted ? rc : KVP_EREFUSED;
}

int ServerSession::read_request(tcp::RequestHeader &request) {
  if (int rc = wait_ready(fd_, POLLIN, deadline_in_ms(limits_.idle_timeout_ms)); rc != KVP_OK) {
    return rc;  // idle for too long: nobody's fault
  }
  const uint64_t deadline_ns = deadline_in_ms(limits_.io_timeout_ms);
  if (int rc = receive_all(fd_, &request, sizeof(request), deadline_ns); rc != KVP_OK) {
    return count(rc);
  }
  if (request.magic != tcp::kRequestMagic || request.n_pages == 0 || request.n_pages > limits_.pages_max) {
    return count(KVP_EPROTO);
  }
  return count(receive_all(fd_, pages_.data(), request.n_pages * sizeof(tcp::RequestPage), deadline_ns));
}

int ServerSession::answer_request(const tcp::RequestHeader &request) {
  ++counters_.requests;
  pending_.clear();
  for (uint32_t i = 0; i < request.n_pages; ++i) {
    const tcp::PagePrefix prefix{tcp::kPageMagic, tcp::PageStatus::kSent, 0, request.request_id, i};
    if (int rc = answer_page(pages_[i], prefix); rc != KVP_OK) {
      return rc;
    }
  }
  return send_pending(nullptr, 0);
}

int ServerSession::answer_page(const tcp::RequestPage &page, tcp::PagePrefix prefix) {
  kvp_slot_header header;
  kvp_part parts[KVP_PARTS_MAX];
  const void *payload = pool_.slot_payload(page.slot, page.length);
  const kvp_slot_header *live = pool_.header(page.slot);
  const bool is_there = payload != nullptr && live != nullptr && copy_header(live, header, parts) &&
                        header_matches(header, page.key, pool_.run_id.data(), page.generation, page.length);
  if (!is_there) {
    ++counters_.pages_stale;
    prefix.status = tcp::PageStatus::kStale;
    append(&prefix, sizeof(prefix));
    return pending_.size() < kPendingBytesMax ? KVP_OK : send_pending(nullptr, 0);
  }
  prefix.n_parts = header.n_parts;
  append(&prefix, sizeof(prefix));
  append(&header, sizeof(header));
  append(parts, header.n_parts * sizeof(kvp_part));
  if (int rc = send_pending(payload, page.length); rc != KVP_OK) {
    return rc;
  }
  // The payload has left the pool. If the slot still says the same now, it said so all the time: generations never come back.
  // (copy_header orders its loads after the kernel's copy of the payload.)
  kvp_slot_header trailer{};
  const bool is_unchanged = copy_header(live, trailer, nullptr) && same_header(header, trailer);
  if (!is_unchanged) {
    trailer = {};
  }
  ++(is_unchanged ? counters_.pages_sent : counters_.pages_stale);
  append(&trailer, sizeof(trailer));
  return KVP_OK;
}

int ServerSession::send_pending(const void *payload, size_t n_bytes) {
  iovec vectors[2] = {{pending_.data(), pending_.size()}, {const_cast<void *>(payload), n_bytes}};
  const uint64_t n_sent = pending_.size() + n_bytes;
  const int rc = count(send_all(fd_, vectors, 2, deadline_in_ms(limits_.io_timeout_ms)));
  pending_.clear();
  if (rc == KVP_OK) {
    counters_.bytes_sent += n_sent;
  }
  return rc;
}

void ServerSession::append(const void *bytes, size_t n_bytes) {
  const auto *first = static_cast<const std::byte *>(bytes);
  pending_.insert(pending_.end(), first, first + n_bytes);
}

// Counts whose fault the end of a connection is, and passes the code on.
int ServerSession::count(int code) {
  if (code == KVP_EPROTO) {
    ++counters_.protocol_errors;
  } else if (code == KVP_ETIMEOUT) {
    ++counters_.io_timeouts;
  }
  return code;
}

}  // namespace kvpeer
