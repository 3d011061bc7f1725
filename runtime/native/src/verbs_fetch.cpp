// kvp_verbs_fetch: pages of one producer by several connections at once, each by a pair of rails of its own (a lane).
//
// One thread posts on all lanes and waits for all. A lane that fails is ended, and its pages go by the others. One that is silent while
// the others are done is given up at half of the time that it had, so that the others have the rest. What is under way when the fetch
// ends, for whatever reason, is quiesced: nothing is written into the destinations afterwards.

#include <algorithm>
#include <array>
#include <new>
#include <numeric>
#include <span>
#include <vector>

#include "errors.hpp"
#include "fetched_pages.hpp"
#include "kvpeer/kvpeer.h"
#include "socket_io.hpp"
#include "verbs_connection.hpp"

namespace kvpeer::verbs {
namespace {

// How long completions are polled for before the thread sleeps until a device wakes it: a short READ takes less, and a sleep costs
// about as much.
constexpr uint64_t kSpinNs = 20'000;

struct Lane {
  kvp_verbs_conn *conn = nullptr;
  int code = KVP_OK;
  std::vector<Wanted> wanted = {};  // all that it was given
  size_t next = 0;                  // the first of them that was not posted
  uint64_t n_bytes = 0;             // of all that it was given
  uint64_t give_up_ns = 0;          // of what is under way
  bool has_delivered = false;

  bool is_busy() const { return !conn->under_way().empty(); }
  bool is_done() const { return !is_busy() && next == wanted.size(); }
};

class Fetch {
 public:
  Fetch(std::span<kvp_verbs_conn *const> conns, const PageArrays &pages, int verify, uint64_t deadline_ns);
  ~Fetch();
  Fetch(const Fetch &) = delete;
  Fetch &operator=(const Fetch &) = delete;

  // KVP_OK when every page has an outcome of its own.
  int run();
  int code(size_t lane) const { return lanes_[lane].code == KVP_OK && lanes_[lane].has_delivered ? 1 : lanes_[lane].code; }

 private:
  int share_out();
  int post();
  void look(Lane &lane, uint64_t now);
  void end(Lane &lane, int code);
  bool is_another_done(const Lane &lane) const;
  bool is_busy() const;
  void wait();

  const PageArrays &pages_;
  const int verify_;
  const uint64_t deadline_ns_;
  std::vector<Lane> lanes_;
  std::vector<uint32_t> homeless_;  // pages that no lane has
  int fault_ = KVP_ECLOSED;         // of the lane that ended last
};

Fetch::Fetch(std::span<kvp_verbs_conn *const> conns, const PageArrays &pages, int verify, uint64_t deadline_ns)
    : pages_(pages), verify_(verify), deadline_ns_(deadline_ns), homeless_(pages.n) {
  std::iota(homeless_.begin(), homeless_.end(), 0);
  for (kvp_verbs_conn *conn : conns) {
    lanes_.push_back({.conn = conn, .code = conn->is_open() ? KVP_OK : KVP_ECLOSED});
  }
}

Fetch::~Fetch() {
  for (Lane &lane : lanes_) {
    if (lane.is_busy()) {
      lane.conn->quiesce();
    }
  }
}

int Fetch::run() {
  if (share_out() == KVP_EINVAL) {
    return KVP_EINVAL;
  }
  while (now_ns() < deadline_ns_) {
    if (post() != KVP_OK) {
      continue;  // its pages have other lanes now, or none
    }
    if (!is_busy()) {
      break;
    }
    wait();
    const uint64_t now = now_ns();
    for (Lane &lane : lanes_) {
      look(lane, now);
    }
    share_out();
  }
  const bool is_late = now_ns() >= deadline_ns_;
  for (Lane &lane : lanes_) {
    if (lane.is_busy()) {
      end(lane, KVP_ETIMEOUT);
    }
    std::for_each(lane.wanted.begin() + static_cast<ptrdiff_t>(lane.next), lane.wanted.end(),
                  [this](const Wanted &page) { homeless_.push_back(page.idx); });
  }
  for (const uint32_t idx : homeless_) {
    pages_.outcomes[idx] = is_late ? KVP_TIMEOUT : KVP_MISS;
  }
  return homeless_.empty() ? KVP_OK : is_late ? KVP_ETIMEOUT : fault_;
}

// Gives each page that no lane has to the open lane with the fewest bytes; they stay without one where none is open. KVP_EINVAL when a
// destination is nowhere.
int Fetch::share_out() {
  std::vector<uint32_t> homeless;
  homeless.swap(homeless_);
  for (size_t i = 0; i < homeless.size(); ++i) {
    const uint32_t idx = homeless[i];
    Lane *least = nullptr;
    for (Lane &lane : lanes_) {
      if (lane.code == KVP_OK && (least == nullptr || lane.n_bytes < least->n_bytes)) {
        least = &lane;
      }
    }
    if (least == nullptr) {
      homeless_.push_back(idx);
      continue;
    }
    Wanted page{idx, 0};
    if (int rc = least->conn->find_destination(pages_, idx, page.local_key); rc == KVP_EINVAL) {
      homeless_.insert(homeless_.end(), homeless.begin() + static_cast<ptrdiff_t>(i), homeless.end());
      return rc;
    } else if (rc != KVP_OK) {
      end(*least, rc);
      homeless.push_back(idx);
      continue;
    }
    least->wanted.push_back(page);
    least->n_bytes += pages_.lengths[idx];
  }
  return KVP_OK;
}

// Has every lane that is idle post what it was given. Anything but KVP_OK: one could not, and ended.
int Fetch::post() {
  for (Lane &lane : lanes_) {
    if (lane.code != KVP_OK || lane.is_busy() || lane.next == lane.wanted.size()) {
      continue;
    }
    const uint64_t now = now_ns();
    lane.give_up_ns = now + (deadline_ns_ - std::min(deadline_ns_, now)) / 2;
    if (int rc = lane.conn->post(pages_, lane.wanted, lane.next); rc != KVP_OK) {
      end(lane, rc);
      share_out();
      return rc;
    }
  }
  return KVP_OK;
}

void Fetch::look(Lane &lane, uint64_t now) {
  if (!lane.is_busy()) {
    return;
  }
  const int rc = lane.conn->poll();
  if (rc == KVP_OK) {
    lane.conn->settle(pages_, verify_);
    lane.has_delivered = true;
  } else if (rc != Completions::kPending) {
    end(lane, rc);
  } else if (now >= lane.give_up_ns && is_another_done(lane)) {
    end(lane, KVP_ETIMEOUT);
  }
}

void Fetch::end(Lane &lane, int code) {
  for (const Wanted &page : lane.conn->under_way()) {
    homeless_.push_back(page.idx);
  }
  for (; lane.next < lane.wanted.size(); ++lane.next) {
    homeless_.push_back(lane.wanted[lane.next].idx);
  }
  lane.conn->quiesce();
  lane.code = fault_ = code;
}

bool Fetch::is_another_done(const Lane &lane) const {
  return std::any_of(lanes_.begin(), lanes_.end(),
                     [&](const Lane &other) { return &other != &lane && other.code == KVP_OK && other.is_done(); });
}

bool Fetch::is_busy() const {
  return std::any_of(lanes_.begin(), lanes_.end(), [](const Lane &lane) { return lane.is_busy(); });
}

// Returns when there is news of a lane, or a lane's time is up.
void Fetch::wait() {
  std::array<Completions *, KVP_RAILS_MAX> awaited;
  size_t n = 0;
  uint64_t until_ns = deadline_ns_;
  for (const Lane &lane : lanes_) {
    if (lane.is_busy()) {
      awaited[n++] = &lane.conn->completions();
      until_ns = is_another_done(lane) ? std::min(until_ns, lane.give_up_ns) : until_ns;
    }
  }
  const auto all = std::span(awaited).first(n);
  for (const uint64_t spins_until_ns = now_ns() + kSpinNs; now_ns() < spins_until_ns;) {
    if (std::any_of(all.begin(), all.end(), [](Completions *each) { return each->poll() != Completions::kPending; })) {
      return;
    }
  }
  Completions::sleep(all, until_ns);
}

}  // namespace
}  // namespace kvpeer::verbs

using namespace kvpeer;
using namespace kvpeer::verbs;

extern "C" int kvp_verbs_fetch(kvp_verbs_conn *const *conns, uint32_t n_conns, int32_t *codes, uint64_t n, const uint32_t *slots,
                               const uint32_t *generations, const uint8_t *keys, const uint32_t *lengths,
                               void *const *destinations, int verify, uint64_t deadline_ns, kvp_part *parts_out,
                               uint16_t *n_parts_out, uint8_t *outcomes) {
  if (conns == nullptr || codes == nullptr || n_conns == 0 || n_conns > KVP_RAILS_MAX || n > UINT32_MAX ||
      std::find(conns, conns + n_conns, nullptr) != conns + n_conns) {
    return KVP_EINVAL;
  }
  const PageArrays pages{static_cast<uint32_t>(n), slots,     generations, keys,   lengths,
                         destinations,             parts_out, n_parts_out, outcomes};
  if (!begin_fetch(pages, verify)) {
    return KVP_EINVAL;
  }
  try {
    Fetch fetch(std::span(conns, n_conns), pages, verify, deadline_ns);
    const int rc = fetch.run();
    for (uint32_t i = 0; i < n_conns; ++i) {
      codes[i] = fetch.code(i);
    }
    return rc;
  } catch (const std::bad_alloc &) {
    for (uint32_t i = 0; i < n_conns; ++i) {
      codes[i] = conns[i]->is_open() ? KVP_OK : KVP_ECLOSED;
    }
    return KVP_ENOMEM;
  }
}
