#include "verbs_connection.hpp"

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
#include "run_page.hpp"
#include "slot_header.hpp"
#include "socket_io.hpp"

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

kvp_verbs_conn::kvp_verbs_conn(kvp_verbs &device, const uint8_t *producer_id)
    : device_(device),
      reads_max_(static_cast<uint32_t>(
          std::min({device.attributes().max_qp_wr, device.attributes().max_cqe, static_cast<int>(3 * Chain::kPagesMax)}))),
      chain_(reads_max_),
      completions_(device.library, device.context()),
      endpoint_(device.library, device.port()) {
  std::copy_n(producer_id, KVP_AGENT_ID_BYTES, producer_id_);
  under_way_.reserve(Chain::kPagesMax);
}

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

int kvp_verbs_conn::probe(uint64_t deadline_ns) {
  const auto there = std::find_if(extents_.begin(), extents_.end(), [](const auto &extent) { return extent.slot_bytes != 0; });
  if (!is_open_ || there == extents_.end()) {
    return is_open_ ? KVP_OK : KVP_ECLOSED;
  }
  int rc = send(chain_.link_header(completions_.next_id(), there->header_address, there->header_key), 1);
  while (rc == KVP_OK && (rc = completions_.poll()) == Completions::kPending && now_ns() < deadline_ns) {
    std::array<Completions *, 1> awaited{&completions_};
    Completions::sleep(awaited, deadline_ns);
    rc = KVP_OK;
  }
  if (rc != KVP_OK) {
    quiesce();
  }
  return rc == Completions::kPending ? KVP_ETIMEOUT : rc;
}

const char *kvp_verbs_conn::fault() const {
  return completions_.fault() == kSuccess ? "" : device_.library.wc_status_str(completions_.fault());
}

int kvp_verbs_conn::find_destination(const PageArrays &pages, uint32_t idx, uint32_t &key) const {
  return device_.memory().local_key(pages.destinations[idx], pages.lengths[idx], key);
}

// Where a page is, by what the producer told; false when there can be no such page.
bool kvp_verbs_conn::locate(const PageArrays &pages, const Wanted &page, RemotePage &out) const {
  const uint32_t i = page.idx;
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
         page.local_key,
         pages.destination(i)};
  return true;
}

int kvp_verbs_conn::post(const PageArrays &pages, std::span<const Wanted> wanted, size_t &next) {
  chain_.clear();
  for (; next < wanted.size(); ++next) {
    RemotePage page;
    if (!locate(pages, wanted[next], page)) {
      pages.outcomes[wanted[next].idx] = KVP_STALE;
    } else if (chain_.add(page)) {
      under_way_.push_back(wanted[next]);
    } else {
      break;
    }
  }
  return chain_.is_empty() ? KVP_OK : send(chain_.link(completions_.next_id()), chain_.n_reads());
}

int kvp_verbs_conn::send(SendRequest *first, uint32_t n_requests) {
  SendRequest *bad = nullptr;
  const int error = device_.context()->ops.post_send(endpoint_.get(), first, &bad);
  completions_.posted(error == 0 || bad == nullptr ? completions_.next_id() + n_requests : bad->id);
  return error == 0 ? KVP_OK : failed_with(error);
}

void kvp_verbs_conn::settle(const PageArrays &pages, int verify) {
  for (uint32_t i = 0; i < under_way_.size(); ++i) {
    settle_page(pages, under_way_[i].idx, i, verify);
  }
  under_way_.clear();
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
void kvp_verbs_conn::settle_page(const PageArrays &pages, uint32_t idx, uint32_t i, int verify) {
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

void kvp_verbs_conn::quiesce() {
  is_open_ = false;
  if (endpoint_.get() != nullptr) {
    endpoint_.stop();
    completions_.drain();
    while (!endpoint_.destroy()) {
      std::this_thread::sleep_for(kDestroyPause);
    }
  }
  under_way_.clear();
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

int kvp_verbs_conn_probe(kvp_verbs_conn *conn, uint64_t deadline_ns) { return conn == nullptr ? KVP_EINVAL : conn->probe(deadline_ns); }

const char *kvp_verbs_conn_fault(const kvp_verbs_conn *conn) { return conn == nullptr ? "" : conn->fault(); }

void kvp_verbs_conn_shutdown(kvp_verbs_conn *conn) {
  if (conn != nullptr) {
    conn->shutdown();
  }
}

void kvp_verbs_conn_free(kvp_verbs_conn *conn) { delete conn; }

}  // extern "C"
