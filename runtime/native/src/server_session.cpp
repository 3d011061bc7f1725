#include "server_session.hpp"

#include <poll.h>

#include <algorithm>

#include "slot_header.hpp"
#include "socket_io.hpp"

namespace kvpeer {

namespace {

// Not before so many bytes are waiting are answers without a payload sent on their own, in the middle of a run.
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
  for (uint32_t next = 0; next < request.n_pages;) {
    if (int rc = answer_run(request, next); rc != KVP_OK) {
      return rc;
    }
  }
  return send_pending(0);
}

// Answers the pages from `next` to the end of their run, and moves `next` behind it. The trailers are pending afterwards.
int ServerSession::answer_run(const tcp::RequestHeader &request, uint32_t &next) {
  uint64_t n_bytes = 0;
  n_run_ = 0;
  while (next < request.n_pages && !tcp::is_run_full(n_run_, n_bytes)) {
    const tcp::RequestPage &page = pages_[next];
    if (append_front(page, {tcp::kPageMagic, tcp::PageStatus::kSent, 0, request.request_id, next})) {
      n_bytes += page.length;
    } else if (pending_.size() >= kPendingBytesMax) {
      if (int rc = send_pending(0); rc != KVP_OK) {
        return rc;
      }
    }
    ++next;
  }
  if (int rc = send_pending(n_run_); rc != KVP_OK) {
    return rc;
  }
  append_trailers();
  return KVP_OK;
}

// True when the page is sent: it belongs to the run.
bool ServerSession::append_front(const tcp::RequestPage &page, tcp::PagePrefix prefix) {
  SentPage &sent = run_[n_run_];
  kvp_part parts[KVP_PARTS_MAX];
  const void *payload = pool_.slot_payload(page.slot, page.length);
  sent.live = pool_.header(page.slot);
  const bool is_there = payload != nullptr && sent.live != nullptr && copy_header(sent.live, sent.header, parts) &&
                        header_matches(sent.header, page.key, pool_.run_id.data(), page.generation, page.length);
  if (!is_there) {
    ++counters_.pages_stale;
    prefix.status = tcp::PageStatus::kStale;
    append(&prefix, sizeof(prefix));
    return false;
  }
  prefix.n_parts = sent.header.n_parts;
  append(&prefix, sizeof(prefix));
  append(&sent.header, sizeof(sent.header));
  append(parts, sent.header.n_parts * sizeof(kvp_part));
  vectors_[++n_run_] = {const_cast<void *>(payload), page.length};
  return true;
}

// The payloads have left the pool. If a slot still says the same now, it said so all the time: generations never come back.
// (copy_header orders its loads after the kernel's copy of the payload.)
void ServerSession::append_trailers() {
  for (uint32_t i = 0; i < n_run_; ++i) {
    kvp_slot_header trailer{};
    const bool is_unchanged = copy_header(run_[i].live, trailer, nullptr) && same_header(run_[i].header, trailer);
    if (!is_unchanged) {
      trailer = {};
    }
    ++(is_unchanged ? counters_.pages_sent : counters_.pages_stale);
    append(&trailer, sizeof(trailer));
  }
}

// Sends what is pending and then the first payloads of the run. When it returns KVP_OK, the kernel has copied all of it.
int ServerSession::send_pending(uint32_t n_payloads) {
  vectors_[0] = {pending_.data(), pending_.size()};
  uint64_t n_bytes = 0;
  for (uint32_t i = 0; i <= n_payloads; ++i) {
    n_bytes += vectors_[i].iov_len;
  }
  const int rc = count(send_all(fd_, vectors_.data(), 1 + n_payloads, deadline_in_ms(limits_.io_timeout_ms)));
  pending_.clear();
  if (rc == KVP_OK) {
    counters_.bytes_sent += n_bytes;
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
