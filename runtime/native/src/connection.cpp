// The reader's side of the data connection: kvp_conn_*.

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "answer_stream.hpp"
#include "checksum.hpp"
#include "kvpeer/kvpeer.h"
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

// The checksum follows the receive at this distance: the bytes are still in the second-level cache.
constexpr size_t kChecksumPieceBytes = 256 << 10;

// What precedes a payload. Header and table lie as they do in a pool, so that the same code checks both.
struct PageFront {
  kvp_slot_header header;
  kvp_part parts[KVP_PARTS_MAX];
};
static_assert(sizeof(PageFront) == KVP_HEADER_STRIDE);

// True when the parts, in order, cover [0, length) without a gap or an overlap.
bool parts_tile(const kvp_part *parts, uint16_t n_parts, uint32_t length) {
  uint64_t end = 0;
  for (uint16_t i = 0; i < n_parts; ++i) {
    if (parts[i].offset != end || parts[i].length == 0) {
      return false;
    }
    end += parts[i].length;
  }
  return end == length;
}

// Follows a payload as it arrives and compares each part with its checksum in the table.
class PartChecksums {
 public:
  PartChecksums(const std::byte *payload, const kvp_part *parts, uint16_t n_parts)
      : payload_(payload), parts_(parts), n_parts_(n_parts) {}

  // The first n_there bytes are there. Waits for more unless they end the payload or make a piece.
  void follow(size_t n_there, size_t n_bytes) {
    if (n_there < n_bytes && n_there - n_done_ < kChecksumPieceBytes) {
      return;
    }
    while (n_done_ < n_there) {
      const kvp_part &part = parts_[part_idx_];
      const size_t part_end = size_t{part.offset} + part.length;
      const size_t end = std::min(part_end, n_there);
      crc_ = crc64(crc_, payload_ + n_done_, end - n_done_);
      n_done_ = end;
      if (end == part_end) {
        all_equal_ = all_equal_ && crc_ == part.checksum;
        crc_ = 0;
        ++part_idx_;
      }
    }
  }
  // True when every part was there and had its checksum.
  bool all_equal() const { return all_equal_ && part_idx_ == n_parts_; }

 private:
  const std::byte *payload_;
  const kvp_part *parts_;
  const uint16_t n_parts_;
  uint16_t part_idx_ = 0;
  size_t n_done_ = 0;
  uint64_t crc_ = 0;
  bool all_equal_ = true;
};

// The arguments of one fetch, [n] each: where the pages should be, where they go, and what became of them.
struct PageArrays {
  uint32_t n;
  const uint32_t *slots;
  const uint32_t *generations;
  const uint8_t *keys;
  const uint32_t *lengths;
  void *const *destinations;
  kvp_part *parts_out;
  uint16_t *n_parts_out;
  uint8_t *outcomes;

  const uint8_t *key(uint32_t i) const { return keys + size_t{i} * KVP_KEY_BYTES; }
};

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
  int take_page(const PageArrays &pages, uint32_t i, int verify, uint64_t deadline_ns);
  int take_sent_page(const PageArrays &pages, uint32_t i, uint16_t n_parts, int verify, uint64_t deadline_ns);
  void close();

  std::mutex mutex_;  // keeps shutdown() from a descriptor that close() gave back
  Socket socket_;     // the fetching thread alone closes it
  AnswerStream stream_;
  uint8_t producer_id_[KVP_AGENT_ID_BYTES];
  uint32_t pages_max_ = 0;
  uint32_t request_id_ = 0;
  std::vector<tcp::RequestPage> request_;
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
    rc = take_page(pages, n_answered, verify, deadline_ns);
    n_answered += rc == KVP_OK ? 1 : 0;
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

int kvp_conn::take_page(const PageArrays &pages, uint32_t i, int verify, uint64_t deadline_ns) {
  tcp::PagePrefix prefix{};
  if (int rc = stream_.take(&prefix, sizeof(prefix), deadline_ns); rc != KVP_OK) {
    return rc;
  }
  if (prefix.magic != tcp::kPageMagic || prefix.request_id != request_id_ || prefix.page_idx != i) {
    return KVP_EPROTO;
  }
  switch (prefix.status) {
    case tcp::PageStatus::kSent:
      return take_sent_page(pages, i, prefix.n_parts, verify, deadline_ns);
    case tcp::PageStatus::kStale:
      pages.outcomes[i] = KVP_STALE;
      return KVP_OK;
    case tcp::PageStatus::kRefused:
      pages.outcomes[i] = KVP_REFUSED;
      return KVP_OK;
  }
  return KVP_EPROTO;
}

int kvp_conn::take_sent_page(const PageArrays &pages, uint32_t i, uint16_t n_parts, int verify, uint64_t deadline_ns) {
  const uint32_t length = pages.lengths[i];
  auto *destination = static_cast<std::byte *>(pages.destinations[i]);
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
  kvp_slot_header header;
  kvp_part parts[KVP_PARTS_MAX];
  const bool is_page = copy_header(&front.header, header, parts) && parts_tile(parts, n_parts, length) &&
                       header_matches(header, pages.key(i), producer_id_, pages.generations[i], length);
  const bool checks_payload = is_page && verify == KVP_VERIFY_FULL;
  PartChecksums checksums(destination, parts, n_parts);
  const size_t piece_bytes = checks_payload ? kChecksumPieceBytes : length;
  const auto on_progress = [&](size_t n_there) {
    if (checks_payload) {
      checksums.follow(n_there, length);
    }
  };
  if (int rc = stream_.take_payload(destination, length, piece_bytes, deadline_ns, on_progress); rc != KVP_OK) {
    return rc;
  }
  kvp_slot_header trailer;
  if (int rc = stream_.take(&trailer, sizeof(trailer), deadline_ns); rc != KVP_OK) {
    return rc;
  }
  if (kChecksHeaders && !(is_page && same_header(header, trailer))) {
    pages.outcomes[i] = KVP_STALE;
  } else if (checks_payload && !checksums.all_equal()) {
    pages.outcomes[i] = KVP_CORRUPT;
  } else {
    std::copy_n(parts, n_parts, pages.parts_out + size_t{i} * KVP_PARTS_MAX);
    pages.n_parts_out[i] = n_parts;
    pages.outcomes[i] = KVP_HIT;
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
  const bool is_mode = verify == KVP_VERIFY_GENERATION || verify == KVP_VERIFY_FULL;
  if (conn == nullptr || n > conn->pages_max() || !is_mode) {
    return KVP_EINVAL;
  }
  const bool has_empty_page = std::any_of(lengths, lengths + n, [](uint32_t length) { return length == 0; });
  if (has_empty_page) {
    return KVP_EINVAL;
  }
  std::fill_n(outcomes, n, KVP_MISS);
  std::fill_n(n_parts_out, n, uint16_t{0});
  if (n == 0) {
    return KVP_OK;
  }
  const PageArrays pages{static_cast<uint32_t>(n), slots,     generations, keys,   lengths,
                         destinations,             parts_out, n_parts_out, outcomes};
  return conn->fetch(pages, verify, deadline_ns);
}

void kvp_conn_shutdown(kvp_conn *conn) {
  if (conn != nullptr) {
    conn->shutdown();
  }
}

void kvp_conn_free(kvp_conn *conn) { delete conn; }

}  // extern "C"
