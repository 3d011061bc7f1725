#include "socket_io.hpp"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>

#include "errors.hpp"
#include "kvpeer/kvpeer.h"

namespace kvpeer {

namespace {

constexpr uint64_t kNsPerS = 1'000'000'000;
constexpr uint64_t kNsPerMs = 1'000'000;

// What the system said, as a code of the C API.
int system_error(int error) {
  switch (error) {
    case ECONNRESET:
    case EPIPE:
    case ENOTCONN:
      return KVP_ECLOSED;
    default:
      return failed_with(error);
  }
}

// Checked before every transfer too: a peer that always has a byte more would never let us wait.
bool is_past(uint64_t deadline_ns) { return now_ns() >= deadline_ns; }

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

int set_option(int fd, int level, int name, int value) {
  return ::setsockopt(fd, level, name, &value, sizeof(value)) == 0 ? KVP_OK : system_error(errno);
}

// A request waits for its answer, so nothing may linger in the kernel for company (Nagle). Buffer sizes are left to the kernel: a
// fixed one ends its tuning and is cut to net.core.*mem_max, which on many hosts is less than the tuning would have reached.
int prepare(int fd) { return set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1); }

// Drops n_bytes from the front of the vectors, and empty ones with them.
void consume(iovec *&vectors, size_t &n_vectors, size_t n_bytes) {
  while (n_vectors > 0 && n_bytes >= vectors->iov_len) {
    n_bytes -= vectors->iov_len;
    ++vectors;
    --n_vectors;
  }
  if (n_vectors > 0) {
    vectors->iov_base = static_cast<char *>(vectors->iov_base) + n_bytes;
    vectors->iov_len -= n_bytes;
  }
}

}  // namespace

void Socket::close() {
  if (fd_ >= 0) {
    ::close(std::exchange(fd_, -1));
  }
}

void Socket::shutdown() const {
  if (fd_ >= 0) {
    ::shutdown(fd_, SHUT_RDWR);
  }
}

uint64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * kNsPerS + static_cast<uint64_t>(now.tv_nsec);
}

uint64_t deadline_in_ms(uint32_t ms) { return now_ns() + ms * kNsPerMs; }

bool parse_address(const char *ip, uint16_t port, SocketAddress &out) {
  auto *v4 = reinterpret_cast<sockaddr_in *>(&out.storage);
  if (::inet_pton(AF_INET, ip, &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    out.len = sizeof(*v4);
    return true;
  }
  auto *v6 = reinterpret_cast<sockaddr_in6 *>(&out.storage);
  if (::inet_pton(AF_INET6, ip, &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    out.len = sizeof(*v6);
    return true;
  }
  return false;
}

int listen_on(const SocketAddress &address, int backlog, Socket &out, uint16_t &port_out) {
  Socket socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.is_open()) {
    return system_error(errno);
  }
  // A restarted agent takes its port again at once.
  if (int rc = set_option(socket.fd(), SOL_SOCKET, SO_REUSEADDR, 1); rc != KVP_OK) {
    return rc;
  }
  if (::bind(socket.fd(), reinterpret_cast<const sockaddr *>(&address.storage), address.len) != 0 ||
      ::listen(socket.fd(), backlog) != 0) {
    return system_error(errno);
  }
  SocketAddress bound;
  bound.len = sizeof(bound.storage);
  if (::getsockname(socket.fd(), reinterpret_cast<sockaddr *>(&bound.storage), &bound.len) != 0) {
    return system_error(errno);
  }
  port_out = bound.storage.ss_family == AF_INET ? ntohs(reinterpret_cast<sockaddr_in *>(&bound.storage)->sin_port)
                                                : ntohs(reinterpret_cast<sockaddr_in6 *>(&bound.storage)->sin6_port);
  out = std::move(socket);
  return KVP_OK;
}

int accept_waiting(const Socket &listener, Socket &out) {
  out = Socket(::accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (out.is_open()) {
    return prepare(out.fd());
  }
  // The one who knocked may be gone again: nobody waits, nothing is wrong.
  if (would_block(errno) || errno == EINTR || errno == ECONNABORTED) {
    return KVP_OK;
  }
  return system_error(errno);
}

int connect_to(const SocketAddress &address, uint64_t deadline_ns, Socket &out) {
  Socket socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.is_open()) {
    return system_error(errno);
  }
  if (int rc = prepare(socket.fd()); rc != KVP_OK) {
    return rc;
  }
  if (::connect(socket.fd(), reinterpret_cast<const sockaddr *>(&address.storage), address.len) != 0) {
    if (errno != EINPROGRESS && errno != EINTR) {
      return system_error(errno);
    }
    if (int rc = wait_ready(socket.fd(), POLLOUT, deadline_ns); rc != KVP_OK) {
      return rc;
    }
    int error = 0;
    socklen_t len = sizeof(error);
    if (::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &len) != 0) {
      return system_error(errno);
    }
    if (error != 0) {
      return system_error(error);
    }
  }
  out = std::move(socket);
  return KVP_OK;
}

int wait_ready(int fd, short events, uint64_t deadline_ns) {
  pollfd waited{fd, events, 0};
  for (;;) {
    const uint64_t now = now_ns();
    const uint64_t left = deadline_ns > now ? deadline_ns - now : 0;
    const timespec timeout{static_cast<time_t>(left / kNsPerS), static_cast<long>(left % kNsPerS)};
    const int n = ::ppoll(&waited, 1, &timeout, nullptr);
    if (n > 0) {
      return KVP_OK;
    }
    if (n == 0) {
      return KVP_ETIMEOUT;
    }
    if (errno != EINTR) {
      return system_error(errno);
    }
  }
}

int send_all(int fd, iovec *vectors, size_t n_vectors, uint64_t deadline_ns) {
  consume(vectors, n_vectors, 0);
  while (n_vectors > 0) {
    if (is_past(deadline_ns)) {
      return KVP_ETIMEOUT;
    }
    msghdr message{};
    message.msg_iov = vectors;
    message.msg_iovlen = n_vectors;
    const ssize_t n = ::sendmsg(fd, &message, MSG_NOSIGNAL);
    if (n >= 0) {
      consume(vectors, n_vectors, static_cast<size_t>(n));
    } else if (would_block(errno)) {
      if (int rc = wait_ready(fd, POLLOUT, deadline_ns); rc != KVP_OK) {
        return rc;
      }
    } else if (errno != EINTR) {
      return system_error(errno);
    }
  }
  return KVP_OK;
}

int receive_some(int fd, iovec *vectors, size_t n_vectors, uint64_t deadline_ns, size_t &n_received) {
  while (!is_past(deadline_ns)) {
    msghdr message{};
    message.msg_iov = vectors;
    message.msg_iovlen = n_vectors;
    const ssize_t n = ::recvmsg(fd, &message, 0);
    if (n > 0) {
      n_received = static_cast<size_t>(n);
      return KVP_OK;
    }
    if (n == 0) {
      return KVP_ECLOSED;
    }
    if (would_block(errno)) {
      if (int rc = wait_ready(fd, POLLIN, deadline_ns); rc != KVP_OK) {
        return rc;
      }
    } else if (errno != EINTR) {
      return system_error(errno);
    }
  }
  return KVP_ETIMEOUT;
}

int receive_all(int fd, void *into, size_t n_bytes, uint64_t deadline_ns) {
  auto *next = static_cast<char *>(into);
  while (n_bytes > 0) {
    iovec vector{next, n_bytes};
    size_t n = 0;
    if (int rc = receive_some(fd, &vector, 1, deadline_ns, n); rc != KVP_OK) {
      return rc;
    }
    next += n;
    n_bytes -= n;
  }
  return KVP_OK;
}

}  // namespace kvpeer
