// What the tests of the data connection share: a pool whose pages' bytes follow from their keys, and both ends of a connection.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "kvpeer/kvpeer.h"
#include "socket_io.hpp"
#include "tcp_protocol.hpp"

namespace kvpeer::testing {

inline constexpr const char *kHost = "127.0.0.1";
inline constexpr uint32_t kAmpleMs = 10'000;  // longer than anything takes that is not stuck
inline constexpr kvp_server_limits kAmpleLimits{8, 64, kAmpleMs, kAmpleMs, kAmpleMs};

using Id = std::array<uint8_t, 16>;

inline Id id_of(uint64_t number) {
  Id id{};
  std::memcpy(id.data(), &number, sizeof(number));
  id[15] = 0xab;
  return id;
}

inline const Id kProducerId = id_of(1);
inline const Id kReaderId = id_of(2);

// Where a page is.
struct Location {
  uint32_t slot = 0;
  uint32_t generation = 0;
  Id key{};
  uint32_t length = 0;
};

inline Id key_of(uint32_t slot, uint32_t generation) { return id_of((uint64_t{slot} << 32) | generation); }

// Functions that touch whole pages are not instrumented by ThreadSanitizer: readers race with the writer of a slot on purpose, as
// they do between processes, and the tests need a writer that is fast.
#define KVP_UNINSTRUMENTED __attribute__((no_sanitize("thread")))

// The idx-th 8 bytes of the page whose key starts with seed.
KVP_UNINSTRUMENTED inline uint64_t word_of(uint64_t seed, uint64_t idx) {
  return (seed + 1) * 0x9e3779b97f4a7c15u + idx * 0xd6e8feb86659fd93u;
}

inline uint64_t seed_of(const Id &key) {
  uint64_t seed;
  std::memcpy(&seed, key.data(), sizeof(seed));
  return seed;
}

KVP_UNINSTRUMENTED inline void fill_words(uint64_t seed, uint64_t *words, size_t n_words) {
  for (size_t i = 0; i < n_words; ++i) {
    words[i] = word_of(seed, i);
  }
}

KVP_UNINSTRUMENTED inline bool holds_words(uint64_t seed, const uint64_t *words, size_t n_words) {
  for (size_t i = 0; i < n_words; ++i) {
    if (words[i] != word_of(seed, i)) {
      return false;
    }
  }
  return true;
}

// Starts at the end, and so meets a reader who started at the beginning whatever their speeds.
KVP_UNINSTRUMENTED inline void write_payload(void *slot, const uint64_t *words, size_t n_words) {
  auto *to = static_cast<volatile uint64_t *>(slot);
  for (size_t i = n_words; i > 0; --i) {
    to[i - 1] = words[i - 1];
  }
}

inline std::vector<uint64_t> page_words(const Id &key, uint32_t length) {
  std::vector<uint64_t> words(length / sizeof(uint64_t));
  fill_words(seed_of(key), words.data(), words.size());
  return words;
}

inline bool holds_page(const Id &key, const std::vector<uint64_t> &words) {
  return holds_words(seed_of(key), words.data(), words.size());
}

// A pool of one extent. Publishing is for one thread at a time.
class PagePool {
 public:
  PagePool(uint32_t n_slots, uint32_t slot_bytes) : slot_bytes_(slot_bytes) {
    const uint64_t n_bytes = uint64_t{n_slots} * slot_bytes;
    EXPECT_EQ(kvp_pool_create(n_bytes, n_bytes, 0, kProducerId.data(), &pool_), KVP_OK);
    EXPECT_EQ(kvp_pool_touch_extent(pool_, 0), KVP_OK);
    EXPECT_EQ(kvp_pool_assign_extent(pool_, 0, slot_bytes), KVP_OK);
  }
  ~PagePool() { kvp_pool_destroy(pool_); }
  PagePool(const PagePool &) = delete;
  PagePool &operator=(const PagePool &) = delete;

  kvp_pool *get() const { return pool_; }

  Location publish(uint32_t slot, uint32_t generation, uint32_t n_parts = 1) {
    return publish(slot, generation, n_parts, slot_bytes_);
  }

  Location publish(uint32_t slot, uint32_t generation, uint32_t n_parts, uint32_t length) {
    const Location location{slot, generation, key_of(slot, generation), length};
    const std::vector<uint64_t> words = page_words(location.key, length);
    std::vector<kvp_part> parts(n_parts);
    const uint32_t part_bytes = length / n_parts;
    for (uint32_t i = 0; i < n_parts; ++i) {
      const auto *first = reinterpret_cast<const uint8_t *>(words.data()) + i * part_bytes;
      parts[i] = {i * part_bytes, part_bytes, kvp_crc64(0, first, part_bytes)};
    }
    EXPECT_EQ(kvp_pool_mark_writing(pool_, 1, &slot, &generation), KVP_OK);
    write_payload(payload(slot), words.data(), words.size());
    EXPECT_EQ(kvp_pool_mark_committed(pool_, 1, &slot, &generation, location.key.data(), n_parts, parts.data()), KVP_OK);
    return location;
  }

  void withdraw(const Location &location) {
    EXPECT_EQ(kvp_pool_mark_withdrawn(pool_, 1, &location.slot, &location.generation), KVP_OK);
  }

  uint8_t *payload(uint32_t slot) const { return static_cast<uint8_t *>(kvp_pool_slot_address(pool_, slot)); }

 private:
  const uint32_t slot_bytes_;
  kvp_pool *pool_ = nullptr;
};

// A server on a pool.
class Producer {
 public:
  explicit Producer(const PagePool &pool, const kvp_server_limits &limits = kAmpleLimits) {
    EXPECT_EQ(kvp_server_start(pool.get(), kHost, 0, &limits, &server_, &port_), KVP_OK);
  }
  ~Producer() { stop(); }
  Producer(const Producer &) = delete;
  Producer &operator=(const Producer &) = delete;

  void stop() { kvp_server_stop(std::exchange(server_, nullptr)); }
  uint16_t port() const { return port_; }
  kvp_server *get() const { return server_; }

  // A capability that admits kReaderId once.
  std::array<uint8_t, 32> admit(uint32_t ttl_ms = kAmpleMs, const Id &reader_id = kReaderId) {
    std::array<uint8_t, 32> capability{};
    const uint64_t number = ++n_admitted_;
    std::memcpy(capability.data(), &number, sizeof(number));
    EXPECT_EQ(kvp_server_admit(server_, capability.data(), reader_id.data(), deadline_in_ms(ttl_ms)), KVP_OK);
    return capability;
  }

  kvp_server_stats stats() const {
    kvp_server_stats stats{};
    kvp_server_get_stats(server_, &stats);
    return stats;
  }

 private:
  kvp_server *server_ = nullptr;
  uint16_t port_ = 0;
  std::atomic<uint64_t> n_admitted_{0};
};

// What a fetch returned.
struct Fetched {
  int rc = KVP_OK;
  std::vector<uint8_t> outcomes;
  std::vector<uint16_t> n_parts;
  std::vector<kvp_part> parts;
  std::vector<std::vector<uint64_t>> pages;
};



// Fetches into fresh buffers full of 0xee.
template <typename Connection, typename Fetch>
Fetched fetch_with(Fetch fetch, Connection *conn, const std::vector<Location> &locations, int verify, uint64_t deadline_ns) {
  const size_t n = locations.size();
  Fetched out{KVP_OK, std::vector<uint8_t>(n, 0xff), std::vector<uint16_t>(n), std::vector<kvp_part>(n * KVP_PARTS_MAX), {}};
  std::vector<uint32_t> slots, generations, lengths;
  std::vector<uint8_t> keys;
  std::vector<void *> destinations;
  for (const Location &location : locations) {
    slots.push_back(location.slot);
    generations.push_back(location.generation);
    lengths.push_back(location.length);
    keys.insert(keys.end(), location.key.begin(), location.key.end());
    out.pages.emplace_back(location.length / sizeof(uint64_t), 0xeeeeeeeeeeeeeeeeu);
  }
  for (auto &page : out.pages) {
    destinations.push_back(page.data());
  }
  out.rc = fetch(conn, n, slots.data(), generations.data(), keys.data(), lengths.data(), destinations.data(), verify, deadline_ns,
                 out.parts.data(), out.n_parts.data(), out.outcomes.data());
  return out;
}

// The reader's end.
class Reader {
 public:
  Reader() = default;
  ~Reader() { kvp_conn_free(conn_); }
  Reader(const Reader &) = delete;
  Reader &operator=(const Reader &) = delete;

  int open(uint16_t port, const std::array<uint8_t, 32> &capability, const Id &reader_id = kReaderId,
           const Id &producer_id = kProducerId, uint32_t timeout_ms = kAmpleMs) {
    return kvp_conn_open(kHost, port, capability.data(), reader_id.data(), producer_id.data(), deadline_in_ms(timeout_ms), &conn_);
  }
  int open(Producer &producer) { return open(producer.port(), producer.admit()); }

  Fetched fetch(const std::vector<Location> &locations, int verify = KVP_VERIFY_FULL, uint32_t timeout_ms = kAmpleMs) {
    return fetch_with(kvp_conn_fetch, conn_, locations, verify, deadline_in_ms(timeout_ms));
  }

  kvp_conn *get() const { return conn_; }

 private:
  kvp_conn *conn_ = nullptr;
};

// Waits until it holds, at most kAmpleMs.
template <typename Condition>
::testing::AssertionResult eventually(Condition condition) {
  for (const uint64_t deadline_ns = deadline_in_ms(kAmpleMs); now_ns() < deadline_ns; std::this_thread::yield()) {
    if (condition()) {
      return ::testing::AssertionSuccess();
    }
  }
  return ::testing::AssertionFailure() << "not within " << kAmpleMs << " ms";
}

inline constexpr uint32_t kChurnSlots = 16;
inline constexpr uint32_t kChurnBytes = 64 << 10;
inline constexpr size_t kChurnRepeats = 8;

// Stands between a reader and a producer, and holds the answer to the reader's first request for a moment: after kHeldAfterBytes of
// it, `meanwhile` runs. The request is for pages of one part and these lengths, in one run. A page of kHeldPageBytes does not fit
// into all the buffers of the way, so the producer is in the middle of its send for certain.
class Relay {
 public:
  static constexpr size_t kHeldAfterBytes = 1 << 20;
  static constexpr uint32_t kHeldPageBytes = 48 << 20;

  Relay(uint16_t producer_port, std::function<void()> meanwhile, std::vector<uint32_t> lengths = {kHeldPageBytes})
      : lengths_(std::move(lengths)) {
    SocketAddress address;
    EXPECT_TRUE(parse_address(kHost, 0, address));
    EXPECT_EQ(listen_on(address, 1, listener_, port_), KVP_OK);
    thread_ = std::thread([this, producer_port, meanwhile = std::move(meanwhile)] { run(producer_port, meanwhile); });
  }
  ~Relay() { thread_.join(); }
  Relay(const Relay &) = delete;
  Relay &operator=(const Relay &) = delete;
  uint16_t port() const { return port_; }

 private:
  void run(uint16_t producer_port, const std::function<void()> &meanwhile) {
    const uint64_t deadline_ns = deadline_in_ms(kAmpleMs);
    Socket reader, producer;
    SocketAddress address;
    EXPECT_TRUE(parse_address(kHost, producer_port, address));
    EXPECT_EQ(wait_ready(listener_.fd(), POLLIN, deadline_ns), KVP_OK);
    EXPECT_EQ(accept_waiting(listener_, reader), KVP_OK);
    EXPECT_EQ(connect_to(address, deadline_ns, producer), KVP_OK);
    pass(reader, producer, sizeof(tcp::Hello));
    pass(producer, reader, sizeof(tcp::HelloAnswer));
    pass(reader, producer, sizeof(tcp::RequestHeader) + lengths_.size() * sizeof(tcp::RequestPage));
    pass(producer, reader, kHeldAfterBytes);
    meanwhile();
    size_t n_bytes = 0;
    for (const uint32_t length : lengths_) {
      n_bytes += sizeof(tcp::PagePrefix) + 2 * sizeof(kvp_slot_header) + sizeof(kvp_part) + length;
    }
    pass(producer, reader, n_bytes - kHeldAfterBytes);
  }
  static void pass(const Socket &from, const Socket &to, size_t n_bytes) {
    std::vector<uint8_t> bytes(n_bytes);
    EXPECT_EQ(receive_all(from.fd(), bytes.data(), n_bytes, deadline_in_ms(kAmpleMs)), KVP_OK);
    iovec vector{bytes.data(), n_bytes};
    EXPECT_EQ(send_all(to.fd(), &vector, 1, deadline_in_ms(kAmpleMs)), KVP_OK);
  }

  const std::vector<uint32_t> lengths_;
  Socket listener_;
  uint16_t port_ = 0;
  std::thread thread_;
};

// Reuses the slots of a pool in turn, without a pause and without a lease, in a thread of its own.
class Churn {
 public:
  explicit Churn(PagePool &pool) : pool_(pool), current_(kChurnSlots) {
    for (uint32_t slot = 0; slot < kChurnSlots; ++slot) {
      current_[slot] = pool_.publish(slot, 1);
    }
    thread_ = std::thread([this] { run(); });
  }
  ~Churn() {
    is_stopping_ = true;
    thread_.join();
  }
  Churn(const Churn &) = delete;
  Churn &operator=(const Churn &) = delete;

  // The newest page, and then again and again the one that is reused next, so that its reuse meets one of the sends.
  std::vector<Location> locations() {
    std::lock_guard lock(mutex_);
    std::vector<Location> locations(1 + kChurnRepeats, current_[next_]);
    locations[0] = current_[(next_ + kChurnSlots - 1) % kChurnSlots];
    return locations;
  }

 private:
  void run() {
    while (!is_stopping_) {
      const Location next = pool_.publish(next_, current_[next_].generation + 1);
      std::lock_guard lock(mutex_);
      current_[next_] = next;
      next_ = (next_ + 1) % kChurnSlots;
    }
  }

  PagePool &pool_;
  std::mutex mutex_;  // protects current_ and next_, which only the thread writes
  std::vector<Location> current_;
  uint32_t next_ = 0;
  std::atomic<bool> is_stopping_{false};
  std::thread thread_;
};

}  // namespace kvpeer::testing
