// kvp_server_*: one accepting thread, one thread a connection, and the lock that ties them together.
//
// Lock order: mutex_ is the only lock and is never held while sending, receiving or joining.

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "errors.hpp"
#include "kvpeer/kvpeer.h"
#include "pool.hpp"
#include "server_admission.hpp"
#include "server_session.hpp"
#include "socket_io.hpp"
#include "tcp_protocol.hpp"

namespace kvpeer {
namespace {

// A connection is a thread and a descriptor: more than this is a mistake in the settings.
constexpr uint32_t kConnectionsLimit = 65536;
constexpr int kAcceptBacklog = 128;
// Connections that may be without a hello at a time, or half of all where that is less: the agents of a large cluster that come
// back at once. Readers say hello in their first packet, so that whoever is silent for longest makes room.
constexpr uint32_t kSilentMax = 64;
// When the process is out of descriptors, accepting waits so long for some to come back, and does not spin.
constexpr uint32_t kAcceptPauseMs = 100;

bool limits_hold(const kvp_server_limits &limits) {
  return limits.connections_max >= 1 && limits.connections_max <= kConnectionsLimit && limits.pages_max >= 1 &&
         limits.pages_max <= tcp::kRequestPagesMax && limits.idle_timeout_ms > 0 && limits.io_timeout_ms > 0 &&
         limits.handshake_timeout_ms > 0;
}

AgentId agent_id(const uint8_t *bytes) {
  AgentId id;
  std::copy_n(bytes, id.size(), id.begin());
  return id;
}

// While it lives, the thread starts threads that take no signals: those belong to the process that we are loaded into.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked &) = delete;
  SignalsBlocked &operator=(const SignalsBlocked &) = delete;

 private:
  sigset_t before_;
};

// Wakes a thread that polls. Thread-safe.
class Bell {
 public:
  int open() {
    fd_ = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    return fd_ >= 0 ? KVP_OK : failed_system_call();
  }
  ~Bell() {
    if (fd_ >= 0) {
      ::close(fd_);
    }
  }
  void ring() { ::eventfd_write(fd_, 1); }
  void silence() {
    eventfd_t count;
    ::eventfd_read(fd_, &count);
  }
  int fd() const { return fd_; }

 private:
  int fd_ = -1;
};

}  // namespace
}  // namespace kvpeer

using namespace kvpeer;

struct kvp_server {
 public:
  kvp_server(const kvp_pool &pool, const kvp_server_limits &limits) : pool_(pool), limits_(limits) {}
  ~kvp_server() { stop(); }

  int start(const SocketAddress &address, uint16_t &port_out);
  int admit(const Capability &capability, const AgentId &reader_id, uint64_t expires_ns);
  void revoke(const AgentId &reader_id);
  void stats(kvp_server_stats &out) const;

 private:
  struct Connection {
    Socket socket;
    AgentId reader_id{};
    bool is_silent = true;  // until its hello came
    bool is_admitted = false;
    bool is_done = false;
    std::thread thread;
  };

  void stop();
  void accept_until_stopped();
  void accept_one();
  void make_room_for_hello();
  void serve(Connection &connection);
  bool redeem(Connection &connection, const tcp::Hello &hello);
  void join_done();

  const kvp_pool &pool_;
  const kvp_server_limits limits_;
  ServerCounters counters_;
  Socket listener_;
  Bell bell_;
  std::thread accepting_;

  mutable std::mutex mutex_;  // protects everything below, and the fields of each connection except its thread
  bool is_stopping_ = false;
  AdmissionTable admissions_;
  std::list<Connection> connections_;  // only the accepting thread adds and removes
};

int kvp_server::start(const SocketAddress &address, uint16_t &port_out) {
  if (int rc = bell_.open(); rc != KVP_OK) {
    return rc;
  }
  if (int rc = listen_on(address, kAcceptBacklog, listener_, port_out); rc != KVP_OK) {
    return rc;
  }
  SignalsBlocked signals_blocked;
  accepting_ = std::thread([this] { accept_until_stopped(); });
  return KVP_OK;
}

int kvp_server::admit(const Capability &capability, const AgentId &reader_id, uint64_t expires_ns) {
  std::lock_guard lock(mutex_);
  return admissions_.admit(capability, reader_id, expires_ns, now_ns());
}

void kvp_server::revoke(const AgentId &reader_id) {
  std::lock_guard lock(mutex_);
  admissions_.forget(reader_id);
  for (Connection &connection : connections_) {
    if (connection.is_admitted && connection.reader_id == reader_id) {
      connection.socket.shutdown();
    }
  }
}

void kvp_server::stats(kvp_server_stats &out) const {
  {
    std::lock_guard lock(mutex_);
    out.connections_open = static_cast<uint64_t>(
        std::count_if(connections_.begin(), connections_.end(), [](const Connection &each) { return !each.is_done; }));
  }
  out.connections_accepted = counters_.connections_accepted;
  out.connections_refused = counters_.connections_refused;
  out.protocol_errors = counters_.protocol_errors;
  out.requests = counters_.requests;
  out.pages_sent = counters_.pages_sent;
  out.pages_stale = counters_.pages_stale;
  out.bytes_sent = counters_.bytes_sent;
  out.io_timeouts = counters_.io_timeouts;
}

void kvp_server::stop() {
  {
    std::lock_guard lock(mutex_);
    is_stopping_ = true;
    for (Connection &connection : connections_) {
      connection.socket.shutdown();
    }
  }
  bell_.ring();
  if (accepting_.joinable()) {
    accepting_.join();
  }
  // No thread adds connections any more, and those that are left were shut down: they end by themselves.
  for (Connection &connection : connections_) {
    connection.thread.join();
  }
}

void kvp_server::accept_until_stopped() {
  pthread_setname_np(pthread_self(), "kvp-accept");
  for (;;) {
    pollfd waited[2] = {{bell_.fd(), POLLIN, 0}, {listener_.fd(), POLLIN, 0}};
    ::poll(waited, 2, -1);  // no deadline of its own: stop() rings
    bell_.silence();
    join_done();
    {
      std::lock_guard lock(mutex_);
      if (is_stopping_) {
        return;
      }
    }
    if (waited[1].revents != 0) {
      accept_one();
    }
  }
}

void kvp_server::accept_one() {
  Socket socket;
  if (accept_waiting(listener_, socket) != KVP_OK) {
    wait_ready(bell_.fd(), POLLIN, deadline_in_ms(kAcceptPauseMs));
    return;
  }
  if (!socket.is_open()) {
    return;
  }
  make_room_for_hello();
  std::lock_guard lock(mutex_);
  if (is_stopping_ || connections_.size() >= limits_.connections_max) {
    ++counters_.connections_refused;
    return;  // closes it
  }
  try {
    Connection &connection = connections_.emplace_back();
    connection.socket = std::move(socket);
    SignalsBlocked signals_blocked;
    connection.thread = std::thread([this, &connection] { serve(connection); });
    ++counters_.connections_accepted;
  } catch (const std::exception &) {  // no memory, or no more threads
    if (!connections_.empty() && !connections_.back().thread.joinable()) {
      connections_.pop_back();
    }
    ++counters_.connections_refused;
  }
}

// Strangers who say nothing hold few places, and none against somebody who speaks.
void kvp_server::make_room_for_hello() {
  const auto is_silent = [](const Connection &each) { return each.is_silent && !each.is_done; };
  std::list<Connection> dropped;
  {
    std::lock_guard lock(mutex_);
    const auto n_silent = std::count_if(connections_.begin(), connections_.end(), is_silent);
    if (n_silent < std::max<int64_t>(1, std::min(kSilentMax, limits_.connections_max / 2))) {
      return;
    }
    const auto longest = std::find_if(connections_.begin(), connections_.end(), is_silent);  // they are in order of arrival
    longest->socket.shutdown();
    ++counters_.connections_refused;
    dropped.splice(dropped.end(), connections_, longest);
  }
  dropped.front().thread.join();  // it waits for nothing but its socket
}

// The root of a connection's thread.
void kvp_server::serve(Connection &connection) {
  pthread_setname_np(pthread_self(), "kvp-serve");
  int fd;
  {
    std::lock_guard lock(mutex_);
    fd = connection.socket.fd();
  }
  try {
    ServerSession(fd, pool_, limits_, counters_).run([this, &connection](const tcp::Hello &hello) {
      return redeem(connection, hello);
    });
  } catch (const std::exception &) {
    ++counters_.connections_refused;  // no memory for its buffers: this connection ends, the others go on
  }
  std::lock_guard lock(mutex_);
  connection.socket.close();
  connection.is_done = true;
  bell_.ring();
}

bool kvp_server::redeem(Connection &connection, const tcp::Hello &hello) {
  Capability capability;
  std::copy_n(hello.capability, capability.size(), capability.begin());
  const AgentId reader_id = agent_id(hello.reader_id);
  std::lock_guard lock(mutex_);
  connection.is_silent = false;
  const bool is_known = admissions_.redeem(capability, reader_id, now_ns());
  connection.reader_id = reader_id;
  connection.is_admitted = is_known && agent_id(hello.producer_id) == pool_.run_id;
  return connection.is_admitted;
}

void kvp_server::join_done() {
  std::list<Connection> done;
  {
    std::lock_guard lock(mutex_);
    for (auto next = connections_.begin(); next != connections_.end();) {
      auto each = next++;
      if (each->is_done) {
        done.splice(done.end(), connections_, each);
      }
    }
  }
  for (Connection &connection : done) {
    connection.thread.join();
  }
}

extern "C" {

int kvp_server_start(kvp_pool *pool, const char *bind_ip, uint16_t port, const kvp_server_limits *limits, kvp_server **out,
                     uint16_t *port_out) {
  SocketAddress address;
  if (pool == nullptr || bind_ip == nullptr || limits == nullptr || out == nullptr || port_out == nullptr ||
      !limits_hold(*limits) || !parse_address(bind_ip, port, address)) {
    return KVP_EINVAL;
  }
  try {
    auto server = std::make_unique<kvp_server>(*pool, *limits);
    if (int rc = server->start(address, *port_out); rc != KVP_OK) {
      return rc;
    }
    *out = server.release();
    return KVP_OK;
  } catch (const std::bad_alloc &) {
    return KVP_ENOMEM;
  } catch (const std::system_error &error) {  // no more threads
    return failed_with(error.code().value());
  }
}

int kvp_server_admit(kvp_server *server, const uint8_t capability[32], const uint8_t reader_id[16], uint64_t expires_ns) {
  if (server == nullptr || capability == nullptr || reader_id == nullptr) {
    return KVP_EINVAL;
  }
  try {
    Capability copy;
    std::copy_n(capability, copy.size(), copy.begin());
    return server->admit(copy, agent_id(reader_id), expires_ns);
  } catch (const std::bad_alloc &) {
    return KVP_ENOMEM;
  }
}

int kvp_server_revoke(kvp_server *server, const uint8_t reader_id[16]) {
  if (server == nullptr || reader_id == nullptr) {
    return KVP_EINVAL;
  }
  server->revoke(agent_id(reader_id));
  return KVP_OK;
}

void kvp_server_get_stats(const kvp_server *server, kvp_server_stats *out) {
  if (server != nullptr && out != nullptr) {
    server->stats(*out);
  }
}

void kvp_server_stop(kvp_server *server) { delete server; }

}  // extern "C"
