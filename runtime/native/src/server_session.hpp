// What one connection of the data server does, from hello to its end, on the connection's own thread.
#pragma once

#include <sys/uio.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "kvpeer/kvpeer.h"
#include "pool.hpp"
#include "tcp_protocol.hpp"

namespace kvpeer {

// What all connections count together. Each number is exact; no two are read at the same moment.
struct ServerCounters {
  std::atomic<uint64_t> connections_accepted{0}, connections_refused{0}, protocol_errors{0};
  std::atomic<uint64_t> requests{0}, pages_sent{0}, pages_stale{0}, bytes_sent{0}, io_timeouts{0};
};

class ServerSession {
 public:
  // Decides whether a reader comes in; called once.
  using Admit = std::function<bool(const tcp::Hello &)>;

  // The descriptor stays the caller's, who shuts it down to end the session from another thread.
  ServerSession(int fd, const kvp_pool &pool, const kvp_server_limits &limits, ServerCounters &counters);

  // Says hello, then answers requests until the reader leaves, breaks the protocol, or is too slow.
  void run(const Admit &admit);

 private:
  int greet(const Admit &admit);
  int read_request(tcp::RequestHeader &request);
  int answer_request(const tcp::RequestHeader &request);
  int answer_run(const tcp::RequestHeader &request, uint32_t &next);
  bool append_front(const tcp::RequestPage &page, tcp::PagePrefix prefix);
  void append_trailers();
  int send_pending(uint32_t n_payloads);
  void append(const void *bytes, size_t n_bytes);
  int count(int code);

  // A page of the run whose payload is being sent.
  struct SentPage {
    const kvp_slot_header *live;
    kvp_slot_header header;
  };

  const int fd_;
  const kvp_pool &pool_;
  const kvp_server_limits &limits_;
  ServerCounters &counters_;
  std::vector<tcp::RequestPage> pages_;
  // Everything that goes out before the next payloads: trailers and fronts travel together, in one system call with the payloads.
  std::vector<std::byte> pending_;
  std::array<SentPage, tcp::kRunPagesMax> run_;
  std::array<iovec, 1 + tcp::kRunPagesMax> vectors_;  // pending_, then the payloads of the run
  uint32_t n_run_ = 0;
};

}  // namespace kvpeer
