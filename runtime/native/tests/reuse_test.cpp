// Never wrong bytes: slots are reused under the reads, without a lease.
#include "tcp_fixture.hpp"

namespace kvpeer::testing {
namespace {

class Reuse : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(, Reuse, ::testing::Values(KVP_VERIFY_GENERATION, KVP_VERIFY_FULL));

TEST_P(Reuse, InTheMiddleOfASendMakesThePageStale) {
  PagePool pool(1, Relay::kHeldPageBytes);
  Producer producer(pool);
  const Location page = pool.publish(0, 1);
  Relay relay(producer.port(), [&pool] { pool.publish(0, 2); });
  Reader reader;
  ASSERT_EQ(reader.open(relay.port(), producer.admit()), KVP_OK);
  const Fetched fetched = reader.fetch({page}, GetParam());
  EXPECT_EQ(fetched.rc, KVP_OK);
  EXPECT_EQ(fetched.outcomes[0], KVP_STALE);
  EXPECT_FALSE(holds_page(page.key, fetched.pages[0])) << "the reuse came too late to prove anything";
}

// The trailers of a run come after all its payloads: what was reused while a later page left the pool is noticed too.
TEST_P(Reuse, InTheMiddleOfARunMakesStaleWhatWasReusedAndNothingElse) {
  constexpr uint32_t kSmallBytes = 256 << 10;
  PagePool pool(3, Relay::kHeldPageBytes);
  Producer producer(pool);
  const Location sent = pool.publish(0, 1, 1, kSmallBytes), kept = pool.publish(1, 1, 1, kSmallBytes), held = pool.publish(2, 1);
  Relay relay(
      producer.port(),
      [&pool] {
        pool.publish(0, 2, 1, kSmallBytes);
        pool.publish(2, 2);
      },
      {sent.length, kept.length, held.length});
  Reader reader;
  ASSERT_EQ(reader.open(relay.port(), producer.admit()), KVP_OK);
  const Fetched fetched = reader.fetch({sent, kept, held}, GetParam());
  EXPECT_EQ(fetched.rc, KVP_OK);
  EXPECT_EQ(fetched.outcomes, (std::vector<uint8_t>{KVP_STALE, KVP_HIT, KVP_STALE}));
  EXPECT_TRUE(holds_page(kept.key, fetched.pages[1]));
  EXPECT_FALSE(holds_page(held.key, fetched.pages[2])) << "the reuse came too late to prove anything";
}

class Churning : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(, Churning, ::testing::Values(KVP_VERIFY_GENERATION, KVP_VERIFY_FULL));

TEST_P(Churning, HitsOnlyWithTheRightBytesWhileSlotsAreReusedUnderThreeReaders) {
  constexpr int kNFetches = 150;
  PagePool pool(kChurnSlots, kChurnBytes);
  Producer producer(pool);
  std::atomic<uint64_t> n_hits{0}, n_stale{0}, n_wrong{0};
  {
    Churn churn(pool);
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&] {
        Reader reader;
        ASSERT_EQ(reader.open(producer), KVP_OK);
        for (int turn = 0; turn < kNFetches; ++turn) {
          const std::vector<Location> locations = churn.locations();
          const Fetched fetched = reader.fetch(locations, GetParam());
          ASSERT_EQ(fetched.rc, KVP_OK);
          for (size_t page = 0; page < locations.size(); ++page) {
            n_hits += fetched.outcomes[page] == KVP_HIT;
            n_stale += fetched.outcomes[page] == KVP_STALE;
            n_wrong += fetched.outcomes[page] == KVP_HIT && !holds_page(locations[page].key, fetched.pages[page]);
          }
        }
      });
    }
    for (std::thread &thread : threads) {
      thread.join();
    }
  }
  EXPECT_EQ(n_wrong, 0u);
  EXPECT_EQ(n_hits + n_stale, 3u * kNFetches * (1 + kChurnRepeats)) << "an honest producer's pages are never corrupt";
  EXPECT_GT(n_hits, 0u);
  EXPECT_GE(n_stale * 100, n_hits + n_stale) << "fewer than 1 % stale: the churn proves nothing";
}

}  // namespace
}  // namespace kvpeer::testing
