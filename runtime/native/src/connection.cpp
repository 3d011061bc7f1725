// The reader's side of the data connection: kvp_conn_*.

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "answer_stream.hpp"
#include "fetched_pages.hpp"
#include "kvpeer/kvpeer.h"
#include "run_page.hpp"
#include "slot_header.hpp"
#include "socket_io.hpp"
#include "tcp_protocol.hpp"

namespace kvpeer {
namespace {

#ifdef KVPEER_TEST_WITHOUT_HEADER_CHECKS
// The negative control: a test is built with this file and without the checks, and must see wrong bytes.
constexpr bool kChecksHeaders = false;
#else
constexpr bool kChecksHeaders = true;
#endif

}  // namespace
}  // namespace kvpeer

using namespace kvpeer;

struct kvp_conn {
 public:
  kvp_conn(Socket socket, const uint8_t *producer_id) : socket_(std::move(socket)), stream_(socket_.fd()) {
    std::copy_n(producer_id, KVP_AGENT_ID_BYTES, producer_id_);
  }

  int greet(const uint8_t *capability, const uint8_t *reader_id, uint64_t deadline_ns);
  uint32_t pages_max() const { return pages_max_; }
  // Fills in outcomes and part tables; closes the connection unless it returns KVP_OK.
  int fetch(const PageArrays &pages, int verify, uint64_t deadline_ns);
  void shutdown();

 private:
  int send_request(const PageArrays &pages, uint64_t deadline_ns);
  int take_run(const PageArrays &pages, uint32_t &next, int verify, uint64_t deadline_ns);
  int take_fronts(const PageArrays &pages, uint32_t &next, uint64_t deadline_ns);
  int take_front(const PageArrays &pages, uint32_t i, uint64_t deadline_ns);
  int take_sent_front(const PageArrays &pages, uint32_t i, uint16_t n_parts, uint64_t deadline_ns);
  int take_payloads(const PageArrays &pages, int verify, uint64_t deadline_ns);
  int take_trailer(const PageArrays &pages, const RunPage &page, int verify, uint64_t deadline_ns);
  void close();

  std::mutex mutex_;  // keeps shutdown() from a descriptor that close() gave back
  Socket socket_;     // the fetching thread alone closes it
  AnswerStream stream_;
  uint8_t producer_id_[KVP_AGENT_ID_BYTES];
  uint32_t pages_max_ = 0;
  uint32_t request_id_ = 0;
  std::vector<tcp::RequestPage> request_;
  std::array<RunPage, tcp::kRunPagesMax> run_;
  uint32_t n_run_ = 0;
};

int kvp_conn::greet(const uint8_t *capability, const uint8_t *reader_id, uint64_t deadline_ns) {
  tcp::Hello hello{};
  hello.magic = tcp::kHelloMagic;
  hello.version = tcp::kVersion;
  std::copy_n(capability, KVP_CAPABILITY_BYTES, hello.capability);
  std::copy_n(reader_id, KVP_AGENT_ID_BYTES, hello.reader_id);
  std::copy_n(producer_id_, KVP_AGENT_ID_BYTES, hello.producer_id);
  iovec vector{&hello, sizeof(hello)};
  if (int rc = send_all(socket_.fd(), &vector, 1, deadline_ns); rc != KVP_OK) {
    return rc;
  }
  tcp::HelloAnswer answer{};
  if (int rc = receive_all(socket_.fd(), &answer, sizeof(answer), deadline_ns); rc != KVP_OK) {
    return rc;
  }
  if (answer.magic != tcp::kAnswerMagic || answer.version != tcp::kVersion) {
    return KVP_EPROTO;
  }
  if (answer.status == tcp::HelloStatus::kRefused) {
    return KVP_EREFUSED;
  }
  const bool is_producer = std::memcmp(answer.producer_id, producer_id_, KVP_AGENT_ID_BYTES) == 0;
  if (answer.status != tcp::HelloStatus::kOk || !is_producer || answer.pages_max == 0) {
    return KVP_EPROTO;
  }
  pages_max_ = std::min(answer.pages_max, tcp::kRequestPagesMax);
  request_.resize(pages_max_);
  return KVP_OK;
}

int kvp_conn::fetch(const PageArrays &pages, int verify, uint64_t deadline_ns) {
  if (!socket_.is_open()) {
    return KVP_ECLOSED;
  }
  int rc = send_request(pages, deadline_ns);
  uint32_t n_answered = 0;
  while (rc == KVP_OK && n_answered < pages.n) {
    uint32_t next = n_answered;
    rc = take_run(pages, next, verify, deadline_ns);
    n_answered = rc == KVP_OK ? next : n_answered;
  }
  if (rc == KVP_OK && !stream_.is_drained()) {
    rc = KVP_EPROTO;  // bytes that nobody asked for
  }
  if (rc != KVP_OK) {
    // Half an answer may still be on its way. It must not meet the next request, nor find a buffer: the connection ends here.
    close();
    std::fill(pages.outcomes + n_answered, pages.outcomes + pages.n, rc == KVP_ETIMEOUT ? KVP_TIMEOUT : KVP_MISS);
  }
  return rc;
}

int kvp_conn::send_request(const PageArrays &pages, uint64_t deadline_ns) {
  for (uint32_t i = 0; i < pages.n; ++i) {
    request_[i] = {pages.slots[i], pages.generations[i], {}, pages.lengths[i], 0};
    std::copy_n(pages.key(i), KVP_KEY_BYTES, request_[i].key);
  }
  tcp::RequestHeader header{tcp::kRequestMagic, ++request_id_, pages.n, 0};
  iovec vectors[2] = {{&header, sizeof(header)}, {request_.data(), pages.n * sizeof(tcp::RequestPage)}};
  return send_all(socket_.fd(), vectors, 2, deadline_ns);
}

// Takes the pages from `next` to the end of their run, and moves `next` behind it. No page of a run that breaks off is answered.
int kvp_conn::take_run(const PageArrays &pages, uint32_t &next, int verify, uint64_t deadline_ns) {
  int rc = take_fronts(pages, next, deadline_ns);
  if (rc == KVP_OK) {
    rc = take_payloads(pages, verify, deadline_ns);
  }
  for (uint32_t i = 0; rc == KVP_OK && i < n_run_; ++i) {
    rc = take_trailer(pages, run_[i], verify, deadline_ns);
  }
  return rc;
}

int kvp_conn::take_fronts(const PageArrays &pages, uint32_t &next, uint64_t deadline_ns) {
  uint64_t n_bytes = 0;
  for (n_run_ = 0; next < pages.n && !tcp::is_run_full(n_run_, n_bytes); ++next) {
    const uint32_t n_before = n_run_;
    if (int rc = take_front(pages, next, deadline_ns); rc != KVP_OK) {
      return rc;
    }
    n_bytes += n_run_ > n_before ? pages.lengths[next] : 0;
  }
  return KVP_OK;
}

int kvp_conn::take_front(const PageArrays &pages, uint32_t i, uint64_t deadline_ns) {
  tcp::PagePrefix prefix{};
  if (int rc = stream_.take(&prefix, sizeof(prefix), deadline_ns); rc != KVP_OK) {
    return rc;
  }
  if (prefix.magic != tcp::kPageMagic || prefix.request_id != request_id_ || prefix.page_idx != i) {
    return KVP_EPROTO;
  }
  switch (prefix.status) {
    case tcp::PageStatus::kSent:
      return take_sent_front(pages, i, prefix.n_parts, deadline_ns);
    case tcp::PageStatus::kStale:
      pages.outcomes[i] = KVP_STALE;
      return KVP_OK;
    case tcp::PageStatus::kRefused:
      pages.outcomes[i] = KVP_REFUSED;
      return KVP_OK;
  }
  return KVP_EPROTO;
}

int kvp_conn::take_sent_front(const PageArrays &pages, uint32_t i, uint16_t n_parts, uint64_t deadline_ns) {
  const uint32_t length = pages.lengths[i];
  if (n_parts == 0 || n_parts > KVP_PARTS_MAX) {
    return KVP_EPROTO;
  }
  PageFront front;
  const size_t front_bytes = sizeof(front.header) + n_parts * sizeof(kvp_part);
  if (int rc = stream_.take(&front, front_bytes, deadline_ns); rc != KVP_OK) {
    return rc;
  }
  // These two say how many bytes come: a sender that disagrees with itself cannot be followed any further.
  if (front.header.n_parts != n_parts || front.header.length != length) {
    return KVP_EPROTO;
  }
  RunPage &page = run_[n_run_++];
  page.idx = i;
  page.n_parts = n_parts;
  page.is_page = copy_header(&front.header, page.header, page.parts) && parts_tile(page.parts, n_parts, length) &&
                 header_matches(page.header, pages.key(i), producer_id_, pages.generations[i], length);
  page.checksums = PartChecksums(pages.destination(i), page.parts, n_parts);
  return KVP_OK;
}

// Receives the payloads of the run, and follows them with their checksums where that is asked for.
int kvp_conn::take_payloads(const PageArrays &pages, int verify, uint64_t deadline_ns) {
  std::array<iovec, tcp::kRunPagesMax> left;
  for (uint32_t i = 0; i < n_run_; ++i) {
    left[i] = {pages.destination(run_[i].idx), pages.lengths[run_[i].idx]};
  }
  const size_t piece_bytes = verify == KVP_VERIFY_FULL ? kChecksumPieceBytes : SIZE_MAX;
  for (uint32_t i = 0; i < n_run_;) {
    size_t n = 0;
    if (int rc = stream_.take_payload(&left[i], n_run_ - i, piece_bytes, deadline_ns, n); rc != KVP_OK) {
      return rc;
    }
    while (n > 0) {
      RunPage &page = run_[i];
      const size_t n_of_page = std::min(n, left[i].iov_len);
      n -= n_of_page;
      left[i] = {static_cast<std::byte *>(left[i].iov_base) + n_of_page, left[i].iov_len - n_of_page};
      if (page.is_page && verify == KVP_VERIFY_FULL) {
        page.checksums.follow(pages.lengths[page.idx] - left[i].iov_len, pages.lengths[page.idx]);
      }
      i += left[i].iov_len == 0 ? 1 : 0;
    }
  }
  return KVP_OK;
}

// Takes the header that was read after the payload, and says what became of the page.
int kvp_conn::take_trailer(const PageArrays &pages, const RunPage &page, int verify, uint64_t deadline_ns) {
  kvp_slot_header trailer;
  if (int rc = stream_.take(&trailer, sizeof(trailer), deadline_ns); rc != KVP_OK) {
    return rc;
  }
  if (kChecksHeaders && !(page.is_page && same_header(page.header, trailer))) {
    pages.outcomes[page.idx] = KVP_STALE;
  } else if (page.is_page && verify == KVP_VERIFY_FULL && !page.checksums.all_equal()) {
    pages.outcomes[page.idx] = KVP_CORRUPT;
  } else {
    pages.hit(page.idx, page.parts, page.n_parts);
  }
  return KVP_OK;
}

void kvp_conn::shutdown() {
  std::lock_guard lock(mutex_);
  socket_.shutdown();
}

void kvp_conn::close() {
  std::lock_guard lock(mutex_);
  socket_.close();
}

extern "C" {

int kvp_conn_open(const char *ip, uint16_t port, const uint8_t capability[32], const uint8_t reader_id[16],
                  const uint8_t producer_id[16], uint64_t deadline_ns, kvp_conn **out) {
  SocketAddress address;
  if (ip == nullptr || capability == nullptr || reader_id == nullptr || producer_id == nullptr || out == nullptr ||
      !parse_address(ip, port, address)) {
    return KVP_EINVAL;
  }
  try {
    Socket socket;
    if (int rc = connect_to(address, deadline_ns, socket); rc != KVP_OK) {
      return rc;
    }
    auto conn = std::make_unique<kvp_conn>(std::move(socket), producer_id);
    if (int rc = conn->greet(capability, reader_id, deadline_ns); rc != KVP_OK) {
      return rc;
    }
    *out = conn.release();
    return KVP_OK;
  } catch (const std::bad_alloc &) {
    return KVP_ENOMEM;
  }
}

uint32_t kvp_conn_pages_max(const kvp_conn *conn) { return conn == nullptr ? 0 : conn->pages_max(); }

int kvp_conn_fetch(kvp_conn *conn, uint64_t n, const uint32_t *slots, const uint32_t *generations, const uint8_t *keys,
                   const uint32_t *lengths, void *const *destinations, int verify, uint64_t deadline_ns, kvp_part *parts_out,
                   uint16_t *n_parts_out, uint8_t *outcomes) {
  if (conn == nullptr || n > conn->pages_max()) {
    return KVP_EINVAL;
  }
  const PageArrays pages{static_cast<uint32_t>(n), slots,     generations, keys,   lengths,
                         destinations,             parts_out, n_parts_out, outcomes};
  if (!begin_fetch(pages, verify)) {
    return KVP_EINVAL;
  }
  if (n == 0) {
    return KVP_OK;
  }
  return conn->fetch(pages, verify, deadline_ns);
}

void kvp_conn_shutdown(kvp_conn *conn) {
  if (conn != nullptr) {
    conn->shutdown();
  }
}

void kvp_conn_free(kvp_conn *conn) { delete conn; }

}  // extern "C"
