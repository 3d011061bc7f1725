// The data server answers admitted readers with committed pages, and holds its limits against everybody else.
#include <poll.h>

#include "tcp_fixture.hpp"
#include "tcp_protocol.hpp"

namespace kvpeer::testing {
namespace {

constexpr uint32_t kSlotBytes = 64 << 10;
constexpr uint32_t kShortMs = 100;

class Serving : public ::testing::Test {
 protected:
  PagePool pool_{8, kSlotBytes};
};

class ServingInEachVerifyMode : public Serving, public ::testing::WithParamInterface<int> {};

INSTANTIATE_TEST_SUITE_P(, ServingInEachVerifyMode, ::testing::Values(KVP_VERIFY_GENERATION, KVP_VERIFY_FULL));

TEST_P(ServingInEachVerifyMode, DeliversTheBytesAndThePartTableOfEveryPage) {
  Producer producer(pool_);
  Reader reader;
  ASSERT_EQ(reader.open(producer), KVP_OK);
  const std::vector<Location> locations{pool_.publish(0, 1), pool_.publish(3, 9, 4), pool_.publish(5, 2, 64),
                                        pool_.publish(7, 1, 1, 4096)};
  const Fetched fetched = reader.fetch(locations, GetParam());
  ASSERT_EQ(fetched.rc, KVP_OK);
  const uint16_t n_parts[] = {1, 4, 64, 1};
  for (size_t i = 0; i < locations.size(); ++i) {
    EXPECT_EQ(fetched.outcomes[i], KVP_HIT) << i;
    EXPECT_TRUE(holds_page(locations[i].key, fetched.pages[i])) << i;
    ASSERT_EQ(fetched.n_parts[i], n_parts[i]);
    const kvp_part &last = fetched.parts[i * KVP_PARTS_MAX + n_parts[i] - 1];
    EXPECT_EQ(last.offset + last.length, locations[i].length);
    EXPECT_EQ(last.checksum, kvp_crc64(0, pool_.payload(locations[i].slot) + last.offset, last.length));
  }
  EXPECT_TRUE(eventually([&] { return producer.stats().pages_sent == locations.size(); }));
}

TEST_P(ServingInEachVerifyMode, AnswersStaleForWhatASlotDoesNotHoldAndGoesOn) {
  Producer producer(pool_);
  Reader reader;
  ASSERT_EQ(reader.open(producer), KVP_OK);
  const Location good = pool_.publish(0, 5);
  const Location withdrawn = pool_.publish(1, 5);
  pool_.withdraw(withdrawn);
  Location older = good, other_key = good, shorter = good, beyond = good, other_extent = good, longer = good;
  older.generation = 4;
  other_key.key[0] ^= 1;
  shorter.length -= 8;
  longer.length += 8;
  beyond.slot = 8;
  other_extent.slot = 0xffffffffu;
  const Location empty{2, 0, {}, kSlotBytes};
  const std::vector<Location> locations{withdrawn, good, older, other_key, shorter, longer, beyond, other_extent, empty, good};
  const Fetched fetched = reader.fetch(locations, GetParam());
  ASSERT_EQ(fetched.rc, KVP_OK);
  for (size_t i = 0; i < locations.size(); ++i) {
    EXPECT_EQ(fetched.outcomes[i], i == 1 || i == 9 ? KVP_HIT : KVP_STALE) << i;
  }
  EXPECT_TRUE(holds_page(good.key, fetched.pages[9]));
  EXPECT_EQ(reader.fetch({good}, GetParam()).outcomes[0], KVP_HIT);
}

TEST_P(ServingInEachVerifyMode, DeliversAnswersOfManyRunsWithStalePagesAnywhere) {
  Producer producer(pool_);
  Reader reader;
  ASSERT_EQ(reader.open(producer), KVP_OK);
  std::vector<Location> here;
  for (uint32_t slot = 0; slot < 8; ++slot) {
    here.push_back(pool_.publish(slot, 1, 1u << (slot % 4), kSlotBytes - 1024 * slot));
  }
  // Around the places where runs end, and whole stretches.
  for (const uint64_t stale_mask : {0x0ull, 0x1ull, 0x8000ull, 0x18000ull, 0xffffull, 0x5555555555555555ull, ~0ull}) {
    std::vector<Location> locations;
    for (uint32_t i = 0; i < kAmpleLimits.pages_max; ++i) {
      locations.push_back(here[i % here.size()]);
      locations.back().generation += (stale_mask >> i) & 1;
    }
    const Fetched fetched = reader.fetch(locations, GetParam());
    ASSERT_EQ(fetched.rc, KVP_OK) << stale_mask;
    for (uint32_t i = 0; i < locations.size(); ++i) {
      const bool is_stale = ((stale_mask >> i) & 1) != 0;
      ASSERT_EQ(fetched.outcomes[i], is_stale ? KVP_STALE : KVP_HIT) << stale_mask << " " << i;
      ASSERT_TRUE(is_stale || holds_page(locations[i].key, fetched.pages[i])) << stale_mask << " " << i;
    }
  }
}

TEST_F(Serving, SendsAnEmptyFetchNowhere) {
  Producer producer(pool_);
  Reader reader;
  ASSERT_EQ(reader.open(producer), KVP_OK);
  EXPECT_EQ(reader.fetch({}).rc, KVP_OK);
  EXPECT_EQ(producer.stats().requests, 0u);
}

TEST_F(Serving, RefusesACapabilityThatIsUnknownUsedExpiredOrAnothersOrForAnotherRun) {
  Producer producer(pool_);
  const auto used = producer.admit();
  Reader first, again, unknown, expired, another, misdirected, after;
  EXPECT_EQ(first.open(producer.port(), used), KVP_OK);
  EXPECT_EQ(again.open(producer.port(), used), KVP_EREFUSED);
  auto guess = producer.admit();
  guess[31] ^= 1;
  EXPECT_EQ(unknown.open(producer.port(), guess), KVP_EREFUSED);
  EXPECT_EQ(expired.open(producer.port(), producer.admit(0)), KVP_EREFUSED);
  const auto stolen = producer.admit();
  EXPECT_EQ(another.open(producer.port(), stolen, id_of(3)), KVP_EREFUSED);
  EXPECT_EQ(after.open(producer.port(), stolen), KVP_EREFUSED) << "presenting a capability uses it up";
  EXPECT_EQ(misdirected.open(producer.port(), producer.admit(), kReaderId, id_of(9)), KVP_EREFUSED);
  EXPECT_EQ(producer.stats().connections_refused, 6u);
}

TEST_F(Serving, KeepsABoundedNumberOfCapabilitiesAndDropsExpiredOnesFirst) {
  Producer producer(pool_);
  std::array<uint8_t, 32> capability{};
  const auto admit = [&](uint64_t number, uint64_t expires_ns) {
    std::memcpy(capability.data(), &number, sizeof(number));
    const Id reader_id = id_of(number % 100);
    return kvp_server_admit(producer.get(), capability.data(), reader_id.data(), expires_ns);
  };
  uint64_t n_expiring = 0;
  const uint64_t soon_ns = now_ns();
  for (; n_expiring < 100; ++n_expiring) {
    ASSERT_EQ(admit(n_expiring, soon_ns), KVP_OK);
  }
  uint64_t n_kept = 0;
  while (admit(1000 + n_kept, deadline_in_ms(kAmpleMs)) == KVP_OK) {
    ASSERT_LT(++n_kept, 100'000u);
  }
  EXPECT_EQ(n_kept, 4096u);
  EXPECT_EQ(admit(0, deadline_in_ms(kAmpleMs)), KVP_EFULL);
}

TEST_F(Serving, KeepsAFewCapabilitiesForOneReaderAndStillAdmitsTheOthers) {
  Producer producer(pool_);
  std::array<uint8_t, 32> capability{};
  const auto admit = [&](uint64_t reader, uint64_t expires_ns) {
    ++capability[0];
    return kvp_server_admit(producer.get(), capability.data(), id_of(reader).data(), expires_ns);
  };
  for (int i = 0; i < 10; ++i) {
    ASSERT_EQ(admit(1, now_ns()), KVP_OK) << "expires at once, and does not count";
  }
  for (int i = 0; i < 64; ++i) {
    ASSERT_EQ(admit(1, deadline_in_ms(kAmpleMs)), KVP_OK) << i;
  }
  EXPECT_EQ(admit(1, deadline_in_ms(kAmpleMs)), KVP_EFULL);
  EXPECT_EQ(admit(2, deadline_in_ms(kAmpleMs)), KVP_OK);
}

TEST_F(Serving, ClosesConnectionsBeyondTheLimitAndTakesNewOnesWhenOneLeft) {
  kvp_server_limits limits = kAmpleLimits;
  limits.connections_max = 2;
  Producer producer(pool_, limits);
  const Location page = pool_.publish(0, 1);
  auto first = std::make_unique<Reader>();
  Reader second, third, fourth;
  ASSERT_EQ(first->open(producer), KVP_OK);
  ASSERT_EQ(second.open(producer), KVP_OK);
  EXPECT_EQ(third.open(producer), KVP_ECLOSED);
  EXPECT_EQ(producer.stats().connections_refused, 1u);
  first.reset();
  ASSERT_TRUE(eventually([&] { return producer.stats().connections_open == 1; }));
  ASSERT_TRUE(eventually([&] { return fourth.get() != nullptr || fourth.open(producer) == KVP_OK; }));
  EXPECT_EQ(fourth.fetch({page}).outcomes[0], KVP_HIT);
  EXPECT_EQ(second.fetch({page}).outcomes[0], KVP_HIT);
}

TEST_F(Serving, RevokingAReaderClosesItsConnectionsAndForgetsItsCapabilities) {
  Producer producer(pool_);
  const Location page = pool_.publish(0, 1);
  const Id other_id = id_of(7);
  Reader revoked, other, late;
  const auto unused = producer.admit();
  ASSERT_EQ(revoked.open(producer), KVP_OK);
  ASSERT_EQ(other.open(producer.port(), producer.admit(kAmpleMs, other_id), other_id), KVP_OK);
  ASSERT_EQ(kvp_server_revoke(producer.get(), kReaderId.data()), KVP_OK);
  EXPECT_EQ(revoked.fetch({page}).rc, KVP_ECLOSED);
  EXPECT_EQ(late.open(producer.port(), unused), KVP_EREFUSED);
  EXPECT_EQ(other.fetch({page}).outcomes[0], KVP_HIT);
}

// A peer that speaks bytes instead of the protocol.
class RawPeer {
 public:
  explicit RawPeer(uint16_t port) {
    SocketAddress address;
    EXPECT_TRUE(parse_address(kHost, port, address));
    EXPECT_EQ(connect_to(address, deadline_in_ms(kAmpleMs), socket_), KVP_OK);
  }
  template <typename Frame>
  void send(const Frame &frame) {
    Frame copy = frame;
    iovec vector{&copy, sizeof(copy)};
    EXPECT_EQ(send_all(socket_.fd(), &vector, 1, deadline_in_ms(kAmpleMs)), KVP_OK);
  }
  void greet(Producer &producer) {
    tcp::Hello hello{tcp::kHelloMagic, tcp::kVersion, 0, {}, {}, {}};
    const auto capability = producer.admit();
    std::copy(capability.begin(), capability.end(), hello.capability);
    std::copy(kReaderId.begin(), kReaderId.end(), hello.reader_id);
    std::copy(kProducerId.begin(), kProducerId.end(), hello.producer_id);
    send(hello);
    tcp::HelloAnswer answer{};
    EXPECT_EQ(receive_all(socket_.fd(), &answer, sizeof(answer), deadline_in_ms(kAmpleMs)), KVP_OK);
    EXPECT_EQ(answer.status, tcp::HelloStatus::kOk);
  }
  void ask(const Location &location, uint32_t n_pages) {
    send(tcp::RequestHeader{tcp::kRequestMagic, 1, n_pages, 0});
    tcp::RequestPage page{location.slot, location.generation, {}, location.length, 0};
    std::copy(location.key.begin(), location.key.end(), page.key);
    for (uint32_t i = 0; i < n_pages; ++i) {
      send(page);
    }
  }
  // True when the server ends the connection before it sends anything more.
  bool is_closed() {
    uint8_t byte;
    return receive_all(socket_.fd(), &byte, 1, deadline_in_ms(kAmpleMs)) == KVP_ECLOSED;
  }

 private:
  Socket socket_;
};

TEST_F(Serving, EndsAConnectionThatBreaksTheProtocol) {
  Producer producer(pool_);
  RawPeer stranger(producer.port());
  stranger.send(std::array<char, sizeof(tcp::Hello)>{'G', 'E', 'T', ' ', '/'});
  EXPECT_TRUE(stranger.is_closed());
  RawPeer other_version(producer.port());
  other_version.send(tcp::Hello{tcp::kHelloMagic, tcp::kVersion + 1, 0, {}, {}, {}});
  EXPECT_TRUE(other_version.is_closed());
  const uint32_t bad_counts[] = {0, kAmpleLimits.pages_max + 1, 0xffffffffu};
  for (const uint32_t n_pages : bad_counts) {
    RawPeer peer(producer.port());
    peer.greet(producer);
    peer.send(tcp::RequestHeader{tcp::kRequestMagic, 1, n_pages, 0});
    EXPECT_TRUE(peer.is_closed()) << n_pages;
  }
  RawPeer bad_magic(producer.port());
  bad_magic.greet(producer);
  bad_magic.send(tcp::RequestHeader{0, 1, 1, 0});
  EXPECT_TRUE(bad_magic.is_closed());
  EXPECT_EQ(producer.stats().protocol_errors, 6u);
}

TEST_F(Serving, DropsAPeerThatNeverSaysHello) {
  kvp_server_limits limits = kAmpleLimits;
  limits.handshake_timeout_ms = kShortMs;
  Producer producer(pool_, limits);
  const uint64_t start_ns = now_ns();
  RawPeer silent(producer.port());
  EXPECT_TRUE(silent.is_closed());
  EXPECT_GE(now_ns() - start_ns, kShortMs * 1'000'000ull / 2);
}

TEST_F(Serving, SilentStrangersTakeNoPlaceFromReaders) {
  Producer producer(pool_);  // takes 8 connections, so that 4 may be silent
  const Location page = pool_.publish(0, 1);
  Reader before, after;
  ASSERT_EQ(before.open(producer), KVP_OK);
  std::vector<std::unique_ptr<RawPeer>> strangers;
  for (int i = 0; i < 20; ++i) {
    strangers.push_back(std::make_unique<RawPeer>(producer.port()));
  }
  EXPECT_TRUE(strangers.front()->is_closed()) << "who is silent for longest makes room";
  ASSERT_TRUE(eventually([&] { return producer.stats().connections_open <= 5; }));
  ASSERT_EQ(after.open(producer), KVP_OK);
  EXPECT_EQ(after.fetch({page}).outcomes[0], KVP_HIT);
  EXPECT_EQ(before.fetch({page}).outcomes[0], KVP_HIT);
  EXPECT_GE(producer.stats().connections_refused, 16u);
}

TEST_F(Serving, DropsAReaderThatAsksForNothingAndOneThatStopsInTheMiddleOfARequest) {
  kvp_server_limits limits = kAmpleLimits;
  limits.idle_timeout_ms = kShortMs;
  limits.io_timeout_ms = kShortMs;
  Producer producer(pool_, limits);
  RawPeer idle(producer.port());
  idle.greet(producer);
  EXPECT_TRUE(idle.is_closed());
  EXPECT_EQ(producer.stats().io_timeouts, 0u);
  RawPeer halting(producer.port());
  halting.greet(producer);
  halting.send(tcp::RequestHeader{tcp::kRequestMagic, 1, 2, 0});
  EXPECT_TRUE(halting.is_closed());
  EXPECT_EQ(producer.stats().io_timeouts, 1u);
}

TEST_F(Serving, DropsAReaderThatDoesNotTakeItsAnswer) {
  PagePool large(1, 64 << 20);  // more than all socket buffers of the way
  kvp_server_limits limits = kAmpleLimits;
  limits.io_timeout_ms = kShortMs;
  Producer producer(large, limits);
  RawPeer stuck(producer.port());
  stuck.greet(producer);
  stuck.ask(large.publish(0, 1), 1);
  EXPECT_TRUE(eventually([&] { return producer.stats().io_timeouts == 1 && producer.stats().connections_open == 0; }));
}

TEST_F(Serving, StopsAtOnceAlthoughReadersAreStuckIdleOrSilent) {
  PagePool large(1, 64 << 20);
  auto producer = std::make_unique<Producer>(large);
  RawPeer stuck(producer->port()), idle(producer->port()), silent(producer->port());
  stuck.greet(*producer);
  idle.greet(*producer);
  stuck.ask(large.publish(0, 1), 1);
  ASSERT_TRUE(eventually([&] { return producer->stats().requests == 1 && producer->stats().connections_open == 3; }));
  const uint64_t start_ns = now_ns();
  producer->stop();
  EXPECT_LT(now_ns() - start_ns, 2'000'000'000u) << "far below the io and idle timeouts";
  EXPECT_TRUE(idle.is_closed());
}

TEST_F(Serving, RefusesToStartWithLimitsThatLimitNothingOrAnAddressThatIsNone) {
  kvp_server *server = nullptr;
  uint16_t port = 0;
  for (uint32_t kvp_server_limits::*field :
       {&kvp_server_limits::connections_max, &kvp_server_limits::pages_max, &kvp_server_limits::idle_timeout_ms,
        &kvp_server_limits::io_timeout_ms, &kvp_server_limits::handshake_timeout_ms}) {
    kvp_server_limits limits = kAmpleLimits;
    limits.*field = 0;
    EXPECT_EQ(kvp_server_start(pool_.get(), kHost, 0, &limits, &server, &port), KVP_EINVAL);
  }
  EXPECT_EQ(kvp_server_start(pool_.get(), "localhost", 0, &kAmpleLimits, &server, &port), KVP_EINVAL);
  EXPECT_EQ(kvp_server_start(pool_.get(), "192.0.2.1", 0, &kAmpleLimits, &server, &port), KVP_ESYS);
  EXPECT_EQ(kvp_last_errno(), EADDRNOTAVAIL);
}

}  // namespace
}  // namespace kvpeer::testing
