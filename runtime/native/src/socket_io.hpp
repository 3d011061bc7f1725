// Sockets with deadlines: every call here either finishes, fails, or returns KVP_ETIMEOUT when its deadline has passed.
//
// All sockets are non-blocking; waiting is done in poll. Functions return KVP_OK or a KVP_E* code: KVP_ECLOSED when the other
// side (or a shutdown in another thread) ended the stream, KVP_ESYS with kvp_last_errno() set for what else the system reports.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace kvpeer {

// Owns a file descriptor. Not thread-safe.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket &&other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket &operator=(Socket &&other) noexcept {
    if (this != &other) {
      close();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  Socket(const Socket &) = delete;
  Socket &operator=(const Socket &) = delete;
  ~Socket() { close(); }

  int fd() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  void close();
  // Ends both directions: whoever waits on the socket, in any thread, wakes. The descriptor stays open.
  void shutdown() const;

 private:
  int fd_ = -1;
};

// CLOCK_MONOTONIC.
uint64_t now_ns();
// Now + ms.
uint64_t deadline_in_ms(uint32_t ms);

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t len = 0;
};

// Numeric IPv4 or IPv6 only: a name lookup has no deadline. False when ip is neither.
bool parse_address(const char *ip, uint16_t port, SocketAddress &out);

// Binds and listens; port_out is the port in use.
int listen_on(const SocketAddress &address, int backlog, Socket &out, uint16_t &port_out);
// Takes one waiting connection, ready for use; out is not open when nobody waits (any more). Does not wait.
int accept_waiting(const Socket &listener, Socket &out);
int connect_to(const SocketAddress &address, uint64_t deadline_ns, Socket &out);

// Waits until the socket is readable or writable (poll events); errors and hang-ups count as ready, the next call reports them.
int wait_ready(int fd, short events, uint64_t deadline_ns);

// Sends all bytes of the vectors, which are used up as scratch space.
int send_all(int fd, iovec *vectors, size_t n_vectors, uint64_t deadline_ns);
// Receives at least one byte into the vectors, in order, and says how many.
int receive_some(int fd, iovec *vectors, size_t n_vectors, uint64_t deadline_ns, size_t &n_received);
// Receives exactly n_bytes.
int receive_all(int fd, void *into, size_t n_bytes, uint64_t deadline_ns);

}  // namespace kvpeer
