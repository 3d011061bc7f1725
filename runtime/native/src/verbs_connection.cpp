// The reader's side of one-sided READs: kvp_verbs_conn_*.
//
// A fetch that did not go well ends the queue pair: it is moved into the error state, its completions are drained, and it is destroyed
// before the fetch returns. So nothing can be written into a destination that the caller has back.

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "checksum.hpp"
#include "errors.hpp"
#include "extent.hpp"
#include "fetched_pages.hpp"
#include "kvpeer/kvpeer.h"
#include "run_page.hpp"
#include "slot_header.hpp"
#include "socket_io.hpp"
#include "verbs_chain.hpp"
#include "verbs_completions.hpp"
#include "verbs_device.hpp"

namespace kvpeer::verbs {
namespace {

#ifdef KVPEER_TEST_WITHOUT_HEADER_CHECKS
// The negative control: a test is built with this file and without the checks, and must see wrong bytes.
constexpr bool kChecksHeaders = false;
#else
constexpr bool kChecksHeaders = true;
#endif

// A device that cannot destroy a queue pair is asked again so often: until it did, the destinations are not given back.
constexpr auto kDestroyPause = std::chrono::milliseconds(10);

}  // namespace
}  // namespace kvpeer::verbs

using namespace kvpeer;
using namespace kvpeer::verbs;

struct kvp_verbs_conn {
 public:
  kvp_verbs_conn(kvp_verbs &device, const uint8_t *producer_id)
      : device_(device),
        reads_max_(static_cast<uint32_t>(std::min(
            {device.attributes().max_qp_wr, device.attributes().max_cqe, static_cast<int>(3 * Chain::kPagesMax)}))),
        chain_(reads_max_),
        completions_(device.library, device.context()),
        endpoint_(device.library, device.port()) {
    std::copy_n(producer_id, KVP_AGENT_ID_BYTES, producer_id_);
  }
  ~kvp_verbs_conn() { quiesce(); }

  int create(kvp_verbs_endpoint &reader_out);
  int connect(const kvp_verbs_endpoint &producer);
  void learn(uint32_t first, uint64_t n, const kvp_verbs_extent *extents);
  bool knows(uint64_t n, const uint32_t *slots) const;
  int fetch(const PageArrays &pages, int verify, uint64_t deadline_ns);
  const char *fault() const {
    return completions_.fault() == kSuccess ? "" : device_.library.wc_status_str(completions_.fault());
  }
  void shutdown() { completions_.shutdown(); }

 private:
  const kvp_verbs_extent *extent(uint32_t slot) const;
  int find_destinations(const PageArrays &pages);
  bool locate(const PageArrays &pages, uint32_t i, RemotePage &out) const;
  int fetch_chain(const PageArrays &pages, uint32_t &next, int verify, uint64_t deadline_ns);
  int post();
  bool is_where_it_was_sought(uint32_t slot, uint32_t slot_bytes);
  void settle(const PageArrays &pages, uint32_t idx, uint32_t i, int verify);
  void quiesce();

  kvp_verbs &device_;
  const uint32_t reads_max_;
  uint8_t producer_id_[KVP_AGENT_ID_BYTES];
  std::vector<kvp_verbs_extent> extents_;  // of the producer, as far as they were learnt
  Chain chain_;
  Completions completions_;
  Endpoint endpoint_;  // after the queue that it completes to
  bool is_open_ = false;
  std::vector<uint32_t> local_keys_;      // [n] of the pages of a fetch
  std::array<uint32_t, Chain::kPagesMax> chain_pages_;  // places in the fetch of the pages of the chain
  uint32_t n_chain_pages_ = 0;
};

int kvp_verbs_conn::create(kvp_verbs_endpoint &reader_out) {
  const Library &library = device_.library;
  if (reads_max_ < Chain::kPageReadsMax) {
    return KVP_EINVAL;
  }
  if (int rc = completions_.create(reads_max_); rc != KVP_OK) {
    return rc;
  }
  if (int rc = chain_.set_up(library, device_.pd()); rc != KVP_OK) {
    return rc;
  }
  if (int rc = endpoint_.create(device_.pd(), completions_.queue(), reads_max_, false); rc != KVP_OK) {
    return rc;
  }
  reader_out = endpoint_.describe(device_.started_reads(UINT8_MAX));
  return KVP_OK;
}

int kvp_verbs_conn::connect(const kvp_verbs_endpoint &producer) {
  if (endpoint_.get() == nullptr || is_open_) {
    return KVP_EINVAL;
  }
  int rc = endpoint_.serve(producer, 1);  // it serves nothing, but devices want at least one
  if (rc == KVP_OK) {
    rc = endpoint_.send(device_.started_reads(producer.reads_max));
  }
  is_open_ = rc == KVP_OK;
  return rc;
}

void kvp_verbs_conn::learn(uint32_t first, uint64_t n, const kvp_verbs_extent *extents) {
  extents_.resize(std::max<size_t>(extents_.size(), first + n));
  std::copy_n(extents, n, extents_.begin() + first);
}

const kvp_verbs_extent *kvp_verbs_conn::extent(uint32_t slot) const {
  const uint32_t number = extent_of(slot);
  const bool is_known = number < extents_.size() && index_of(slot) < extents_[number].n_slots && extents_[number].slot_bytes != 0;
  return is_known ? &extents_[number] : nullptr;
}

bool kvp_verbs_conn::knows(uint64_t n, const uint32_t *slots) const {
  return std::all_of(slots, slots + n, [this](uint32_t slot) { return extent(slot) != nullptr; });
}

int kvp_verbs_conn::fetch(const PageArrays &pages, int verify, uint64_t deadline_ns) {
  if (!is_open_) {
    return KVP_ECLOSED;
  }
  int rc = find_destinations(pages);
  if (rc == KVP_EINVAL) {
    return rc;
  }
  uint32_t n_answered = 0;
  while (rc == KVP_OK && n_answered < pages.n) {
    uint32_t next = n_answered;
    rc = fetch_chain(pages, next, verify, deadline_ns);
    n_answered = rc == KVP_OK ? next : n_answered;
  }
  if (rc != KVP_OK) {
    quiesce();
    std::fill(pages.outcomes + n_answered, pages.outcomes + pages.n, rc == KVP_ETIMEOUT ? KVP_TIMEOUT : KVP_MISS);
  }
  return rc;
}

int kvp_verbs_conn::find_destinations(const PageArrays &pages) {
  local_keys_.resize(pages.n);
  for (uint32_t i = 0; i < pages.n; ++i) {
    if (int rc = device_.memory().local_key(pages.destinations[i], pages.lengths[i], local_keys_[i]); rc != KVP_OK) {
      return rc;
    }
  }
  return KVP_OK;
}

// Where a page is, by what the producer told; false when there can be no such page.
bool kvp_verbs_conn::locate(const PageArrays &pages, uint32_t i, RemotePage &out) const {
  const kvp_verbs_extent *there = extent(pages.slots[i]);
  if (there == nullptr || pages.lengths[i] > there->slot_bytes) {
    return false;
  }
  const uint64_t index = index_of(pages.slots[i]);
  out = {there->header_address + index * KVP_HEADER_STRIDE,
         there->payload_address + index * there->slot_bytes,
         there->header_key,
         there->payload_key,
         pages.lengths[i],
         local_keys_[i],
         pages.destination(i)};
  return true;
}

// Reads as many pages from `next` on as one post takes, and moves `next` behind them.
int kvp_verbs_conn::fetch_chain(const PageArrays &pages, uint32_t &next, int verify, uint64_t deadline_ns) {
  chain_.clear();
  n_chain_pages_ = 0;
  for (; next < pages.n; ++next) {
    RemotePage page;
    if (!locate(pages, next, page)) {
      pages.outcomes[next] = KVP_STALE;
    } else if (chain_.add(page)) {
      chain_pages_[n_chain_pages_++] = next;
    } else {
      break;
    }
  }
  if (chain_.is_empty()) {
    return KVP_OK;
  }
  if (now_ns() >= deadline_ns) {
    return KVP_ETIMEOUT;
  }
  if (int rc = post(); rc != KVP_OK) {
    return rc;
  }
  if (int rc = completions_.await(deadline_ns); rc != KVP_OK) {
    return rc;
  }
  for (uint32_t i = 0; i < n_chain_pages_; ++i) {
    settle(pages, chain_pages_[i], i, verify);
  }
  return KVP_OK;
}

int kvp_verbs_conn::post() {
  SendRequest *bad = nullptr;
  SendRequest *first = chain_.link(completions_.next_id());
  const int error = device_.context()->ops.post_send(endpoint_.get(), first, &bad);
  completions_.posted(error == 0 || bad == nullptr ? completions_.next_id() + chain_.n_reads() : bad->id);
  return error == 0 ? KVP_OK : failed_with(error);
}

// True when the extent still has slots of the size from which the place of the payload was reckoned. Else what is known of it is
// forgotten, so that the next fetch asks anew.
bool kvp_verbs_conn::is_where_it_was_sought(uint32_t slot, uint32_t slot_bytes) {
  kvp_verbs_extent &there = extents_[extent_of(slot)];
  if (there.slot_bytes != slot_bytes) {
    there.slot_bytes = 0;
  }
  return there.slot_bytes != 0;
}

// Says what became of the i-th page of the chain, whose place in the fetch is idx. A header that was torn by a write is not read again:
// a location is told when its header stands, so a header that changes is that of another page.
void kvp_verbs_conn::settle(const PageArrays &pages, uint32_t idx, uint32_t i, int verify) {
  const uint32_t length = pages.lengths[idx];
  kvp_slot_header header;
  kvp_part parts[KVP_PARTS_MAX];
  const bool is_page = copy_header(&chain_.front(i).header, header, parts) && parts_tile(parts, header.n_parts, length) &&
                       header_matches(header, pages.key(idx), producer_id_, pages.generations[idx], length) &&
                       is_where_it_was_sought(pages.slots[idx], header.slot_bytes);
  if (kChecksHeaders && !(is_page && same_header(header, chain_.trailer(i)))) {
    pages.outcomes[idx] = KVP_STALE;
    return;
  }
  if (is_page && verify == KVP_VERIFY_FULL) {
    PartChecksums checksums(pages.destination(idx), parts, header.n_parts);
    checksums.follow(length, length);
    if (!checksums.all_equal()) {
      pages.outcomes[idx] = KVP_CORRUPT;
      return;
    }
  }
  pages.hit(idx, parts, header.n_parts);
}

// Ends the queue pair; when it returns, no request touches memory any more.
void kvp_verbs_conn::quiesce() {
  is_open_ = false;
  if (endpoint_.get() == nullptr) {
    return;
  }
  endpoint_.stop();
  completions_.drain();
  while (!endpoint_.destroy()) {
    std::this_thread::sleep_for(kDestroyPause);
  }
}

extern "C" {

int kvp_verbs_conn_create(kvp_verbs *verbs, const uint8_t producer_id[16], kvp_verbs_endpoint *reader_out, kvp_verbs_conn **out) {
  if (verbs == nullptr || producer_id == nullptr || reader_out == nullptr || out == nullptr) {
    return KVP_EINVAL;
  }
  try {
    auto conn = std::make_unique<kvp_verbs_conn>(*verbs, producer_id);
    if (int rc = conn->create(*reader_out); rc != KVP_OK) {
      return rc;
    }
    *out = conn.release();
    return KVP_OK;
  } catch (const std::bad_alloc &) {
    return KVP_ENOMEM;
  }
}

int kvp_verbs_conn_connect(kvp_verbs_conn *conn, const kvp_verbs_endpoint *producer) {
  return conn == nullptr || producer == nullptr || !is_valid(*producer) ? KVP_EINVAL : conn->connect(*producer);
}

int kvp_verbs_conn_learn(kvp_verbs_conn *conn, uint32_t first, uint64_t n, const kvp_verbs_extent *extents) {
  if (conn == nullptr || extents == nullptr || first > KVP_EXTENTS_MAX || n > KVP_EXTENTS_MAX - first) {
    return KVP_EINVAL;
  }
  try {
    conn->learn(first, n, extents);
    return KVP_OK;
  } catch (const std::bad_alloc &) {
    return KVP_ENOMEM;
  }
}

int kvp_verbs_conn_knows(const kvp_verbs_conn *conn, uint64_t n, const uint32_t *slots) {
  return conn != nullptr && slots != nullptr && conn->knows(n, slots) ? 1 : 0;
}

int kvp_verbs_conn_fetch(kvp_verbs_conn *conn, uint64_t n, const uint32_t *slots, const uint32_t *generations, const uint8_t *keys,
                         const uint32_t *lengths, void *const *destinations, int verify, uint64_t deadline_ns, kvp_part *parts_out,
                         uint16_t *n_parts_out, uint8_t *outcomes) {
  if (conn == nullptr || n > UINT32_MAX) {
    return KVP_EINVAL;
  }
  const PageArrays pages{static_cast<uint32_t>(n), slots,     generations, keys,   lengths,
                         destinations,             parts_out, n_parts_out, outcomes};
  if (!begin_fetch(pages, verify)) {
    return KVP_EINVAL;
  }
  try {
    return n == 0 ? KVP_OK : conn->fetch(pages, verify, deadline_ns);
  } catch (const std::bad_alloc &) {
    return KVP_ENOMEM;
  }
}

const char *kvp_verbs_conn_fault(const kvp_verbs_conn *conn) { return conn == nullptr ? "" : conn->fault(); }

void kvp_verbs_conn_shutdown(kvp_verbs_conn *conn) {
  if (conn != nullptr) {
    conn->shutdown();
  }
}

void kvp_verbs_conn_free(kvp_verbs_conn *conn) { delete conn; }

}  // extern "C"
