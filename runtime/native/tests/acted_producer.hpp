// A producer that follows a test's script instead of the protocol.
#pragma once

#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "slot_header.hpp"
#include "tcp_fixture.hpp"
#include "tcp_protocol.hpp"

namespace kvpeer::testing {

inline constexpr uint32_t kLength = 64 << 10;
inline constexpr uint32_t kNParts = 4;

// All that an honest producer sends for one page; a test changes what it wants to lie about.
struct Answer {
  explicit Answer(const Location &location) : payload(page_words(location.key, location.length)), parts(KVP_PARTS_MAX) {
    const uint32_t part_bytes = location.length / kNParts;
    for (uint32_t i = 0; i < kNParts; ++i) {
      parts[i] = {i * part_bytes, part_bytes, kvp_crc64(0, bytes() + i * part_bytes, part_bytes)};
    }
    header.state = KVP_SLOT_COMMITTED;
    header.n_parts = kNParts;
    header.generation = location.generation;
    header.length = location.length;
    header.checksum_algorithm = KVP_CRC64_NVME;
    std::copy(location.key.begin(), location.key.end(), header.key);
    std::copy(kProducerId.begin(), kProducerId.end(), header.run_id);
    seal();
  }

  uint8_t *bytes() { return reinterpret_cast<uint8_t *>(payload.data()); }
  const uint8_t *bytes() const { return reinterpret_cast<const uint8_t *>(payload.data()); }
  // After a change of header or parts: makes the checksums right again, before and after the payload.
  void seal() {
    seal_header(header, parts.data());
    trailer = header;
  }

  tcp::PagePrefix prefix{tcp::kPageMagic, tcp::PageStatus::kSent, kNParts, 1, 0};
  kvp_slot_header header{};
  std::vector<uint64_t> payload;
  std::vector<kvp_part> parts;  // kNParts are sent, whatever the header claims
  kvp_slot_header trailer{};
};

inline const Location kPage{3, 7, key_of(3, 7), kLength};

// What an honest producer sends for n requests of kPage, from the first_idx-th on.
inline std::vector<Answer> answers_to(uint32_t n, uint32_t first_idx = 0) {
  std::vector<Answer> answers(n, Answer(kPage));
  for (uint32_t i = 0; i < n; ++i) {
    answers[i].prefix.page_idx = first_idx + i;
  }
  return answers;
}

// The producer's end of one connection, played by the test.
class Stage {
 public:
  explicit Stage(const Socket &listener) {
    EXPECT_EQ(wait_ready(listener.fd(), POLLIN, deadline_in_ms(kAmpleMs)), KVP_OK);
    EXPECT_EQ(accept_waiting(listener, socket_), KVP_OK);
  }

  void send(const void *bytes, size_t n_bytes) {
    iovec vector{const_cast<void *>(bytes), n_bytes};
    send_all(socket_.fd(), &vector, 1, deadline_in_ms(kAmpleMs));  // the reader may have left: that is its right
  }
  void send_front(const Answer &answer) {
    send(&answer.prefix, sizeof(answer.prefix));
    send(&answer.header, sizeof(answer.header));
    send(answer.parts.data(), kNParts * sizeof(kvp_part));
  }
  // A run: all fronts, all payloads, all trailers.
  void send_run(const std::vector<Answer> &answers) {
    for (const Answer &answer : answers) {
      send_front(answer);
    }
    for (const Answer &answer : answers) {
      send(answer.payload.data(), kLength);
    }
    for (const Answer &answer : answers) {
      send(&answer.trailer, sizeof(answer.trailer));
    }
  }
  // A run of one page; without its trailer where the payload is cut off.
  void send(const Answer &answer, size_t payload_bytes = kLength) {
    send_front(answer);
    send(answer.payload.data(), payload_bytes);
    if (payload_bytes == kLength) {
      send(&answer.trailer, sizeof(answer.trailer));
    }
  }
  void take_hello() { EXPECT_EQ(take(sizeof(tcp::Hello)), KVP_OK); }
  void greet(tcp::HelloAnswer answer) {
    take_hello();
    send(&answer, sizeof(answer));
  }
  void greet() {
    tcp::HelloAnswer answer{tcp::kAnswerMagic, tcp::kVersion, tcp::HelloStatus::kOk, {}, 64, 0};
    std::copy(kProducerId.begin(), kProducerId.end(), answer.producer_id);
    greet(answer);
  }
  int take_request(uint32_t n_pages) { return take(sizeof(tcp::RequestHeader) + n_pages * sizeof(tcp::RequestPage)); }
  // Waits for the reader to leave.
  void await_end() {
    uint8_t byte;
    while (receive_all(socket_.fd(), &byte, 1, deadline_in_ms(kAmpleMs)) == KVP_OK) {
    }
  }
  void close() { socket_.close(); }

 private:
  int take(size_t n_bytes) {
    std::vector<uint8_t> bytes(n_bytes);
    return receive_all(socket_.fd(), bytes.data(), bytes.size(), deadline_in_ms(kAmpleMs));
  }
  Socket socket_;
};

// A producer that follows a script instead of the protocol.
class Actor {
 public:
  explicit Actor(std::function<void(Stage &)> script) {
    SocketAddress address;
    EXPECT_TRUE(parse_address(kHost, 0, address));
    EXPECT_EQ(listen_on(address, 8, listener_, port_), KVP_OK);
    thread_ = std::thread([this, script = std::move(script)] {
      Stage stage(listener_);
      script(stage);
    });
  }
  ~Actor() { thread_.join(); }
  Actor(const Actor &) = delete;
  Actor &operator=(const Actor &) = delete;
  uint16_t port() const { return port_; }

 private:
  Socket listener_;
  uint16_t port_ = 0;
  std::thread thread_;
};

inline int open(Reader &reader, const Actor &actor, uint32_t timeout_ms = kAmpleMs) {
  return reader.open(actor.port(), {}, kReaderId, kProducerId, timeout_ms);
}

}  // namespace kvpeer::testing
