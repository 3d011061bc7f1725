// What a fuzz target's other side sent, as a socket: all of it is there at once, and after it the stream has ended.
#pragma once

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "socket_io.hpp"

namespace kvpeer::fuzz {

// Ends the run with a report: a promise was broken.
#define KVP_PROMISE(condition) ((condition) ? void() : std::abort())

inline constexpr uint32_t kAmpleMs = 1000;  // nobody waits: everything was sent, and the buffers have room for all answers

class ReceivedStream {
 public:
  ReceivedStream(const uint8_t *bytes, size_t n_bytes) {
    int fds[2];
    KVP_PROMISE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
    near_ = Socket(fds[0]);
    far_ = Socket(fds[1]);
    KVP_PROMISE(n_bytes == 0 || ::write(far_.fd(), bytes, n_bytes) == static_cast<ssize_t>(n_bytes));
    ::shutdown(far_.fd(), SHUT_WR);
  }

  Socket &near() { return near_; }
  // What this side answered so far.
  std::vector<uint8_t> answered() const {
    std::vector<uint8_t> all;
    uint8_t piece[4096];
    for (ssize_t n; (n = ::read(far_.fd(), piece, sizeof(piece))) > 0;) {
      all.insert(all.end(), piece, piece + n);
    }
    return all;
  }

 private:
  Socket near_;
  Socket far_;
};

// Takes values off the front of an input; zero when it is used up.
class Input {
 public:
  Input(const uint8_t *bytes, size_t n_bytes) : next_(bytes), left_(n_bytes) {}

  template <typename Value>
  Value take() {
    Value value{};
    auto *out = reinterpret_cast<uint8_t *>(&value);
    for (size_t idx = 0; idx < sizeof(Value) && left_ > 0; ++idx, --left_) {
      out[idx] = *next_++;
    }
    return value;
  }
  const uint8_t *rest() const { return next_; }
  size_t left() const { return left_; }

 private:
  const uint8_t *next_;
  size_t left_;
};

}  // namespace kvpeer::fuzz
