// kvp_verbs_conn: the reader's end of one queue pair, and the pages that are under way by it. Not thread-safe, but for `shutdown`.
//
// A connection that failed, or that has pages under way when its fetch is over, is ended by `quiesce`: the queue pair is moved into the
// error state, its completions are drained, and it is destroyed. So nothing can be written into a destination that the caller has back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "fetched_pages.hpp"
#include "kvpeer/kvpeer.h"
#include "verbs_chain.hpp"
#include "verbs_completions.hpp"
#include "verbs_device.hpp"

namespace kvpeer::verbs {

// A page of a fetch, and the key of its destination at the device that brings it.
struct Wanted {
  uint32_t idx;
  uint32_t local_key;
};

}  // namespace kvpeer::verbs

struct kvp_verbs_conn {
 public:
  kvp_verbs_conn(kvp_verbs &device, const uint8_t *producer_id);
  ~kvp_verbs_conn() { quiesce(); }
  kvp_verbs_conn(const kvp_verbs_conn &) = delete;
  kvp_verbs_conn &operator=(const kvp_verbs_conn &) = delete;

  int create(kvp_verbs_endpoint &reader_out);
  int connect(const kvp_verbs_endpoint &producer);
  void learn(uint32_t first, uint64_t n, const kvp_verbs_extent *extents);
  bool knows(uint64_t n, const uint32_t *slots) const;
  // KVP_OK once a header came by this connection; any other return has ended it.
  int probe(uint64_t deadline_ns);
  const char *fault() const;
  void shutdown() { completions_.shutdown(); }

  bool is_open() const { return is_open_; }
  // The key by which this device writes a page's destination; see Memory::local_key.
  int find_destination(const kvpeer::PageArrays &pages, uint32_t idx, uint32_t &key) const;
  // Posts READs for as many pages from wanted[next] on as one post takes, and moves `next` behind them. Those that are nowhere are
  // STALE. Nothing else is under way.
  int post(const kvpeer::PageArrays &pages, std::span<const kvpeer::verbs::Wanted> wanted, size_t &next);
  // Pages that were posted and not settled.
  std::span<const kvpeer::verbs::Wanted> under_way() const { return under_way_; }
  // Whether they are there: see Completions::poll.
  int poll() { return completions_.poll(); }
  kvpeer::verbs::Completions &completions() { return completions_; }
  // Says what became of the pages under way, all of which are there.
  void settle(const kvpeer::PageArrays &pages, int verify);
  // Ends the queue pair; when it returns, no request touches memory any more. Nothing is under way then.
  void quiesce();

 private:
  const kvp_verbs_extent *extent(uint32_t slot) const;
  bool locate(const kvpeer::PageArrays &pages, const kvpeer::verbs::Wanted &page, kvpeer::verbs::RemotePage &out) const;
  int send(kvpeer::verbs::SendRequest *first, uint32_t n_requests);
  bool is_where_it_was_sought(uint32_t slot, uint32_t slot_bytes);
  void settle_page(const kvpeer::PageArrays &pages, uint32_t idx, uint32_t i, int verify);

  kvp_verbs &device_;
  const uint32_t reads_max_;
  uint8_t producer_id_[KVP_AGENT_ID_BYTES];
  std::vector<kvp_verbs_extent> extents_;  // of the producer, as far as they were learnt
  kvpeer::verbs::Chain chain_;
  kvpeer::verbs::Completions completions_;
  kvpeer::verbs::Endpoint endpoint_;  // after the queue that it completes to
  bool is_open_ = false;
  std::vector<kvpeer::verbs::Wanted> under_way_;  // the pages of the chain
};
