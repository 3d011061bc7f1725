// One-sided READs: what holds without a device, and under reuse of slots with one.
#include "verbs_fixture.hpp"

namespace kvpeer::testing {
namespace {

constexpr uint32_t kPages = 40;  // twice these are more than a chain of 64 pages
constexpr uint32_t kPageBytes = 64 << 10;

TEST(Verbs, AMachineWithoutTheDeviceSaysWhatIsMissing) {
  PagePool pool(1, kPageBytes);
  const kvp_verbs_settings settings{"no_such_device", -1, 4, 4};
  std::array<char, 256> reason{};
  kvp_verbs *opened = nullptr;
  EXPECT_EQ(kvp_verbs_open(pool.get(), &settings, reason.data(), reason.size(), &opened), KVP_ENODEVICE);
  EXPECT_EQ(opened, nullptr);
  const std::string said = reason.data();
  EXPECT_TRUE(said.find("no_such_device") != said.npos || said.find("rdma-core") != said.npos) << said;
}

TEST(Verbs, AReasonIsCutToTheRoomForIt) {
  PagePool pool(1, kPageBytes);
  const kvp_verbs_settings settings{"no_such_device", -1, 4, 4};
  std::array<char, 8> reason{};
  reason.fill('x');
  kvp_verbs *opened = nullptr;
  EXPECT_EQ(kvp_verbs_open(pool.get(), &settings, reason.data(), reason.size(), &opened), KVP_ENODEVICE);
  EXPECT_EQ(std::string(reason.data()).size(), reason.size() - 1);
}

class VerbsReads : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (rdma_device().empty()) {
      GTEST_SKIP() << "needs an RDMA device: make test-rdma";
    }
  }
};

INSTANTIATE_TEST_SUITE_P(, VerbsReads, ::testing::Values(KVP_VERIFY_GENERATION, KVP_VERIFY_FULL));

TEST_P(VerbsReads, BringPagesOfSeveralChainsWithTheirPartTables) {
  PagePool pool(kPages, kPageBytes);
  std::vector<Location> pages;
  for (uint32_t slot = 0; slot < kPages; ++slot) {
    pages.push_back(pool.publish(slot, 1, 4));
  }
  pages.insert(pages.end(), pages.begin(), pages.end());
  VerbsReader reader(pool);
  const Fetched fetched = reader.fetch(pages, GetParam());
  EXPECT_EQ(fetched.rc, KVP_OK);
  for (size_t i = 0; i < pages.size(); ++i) {
    EXPECT_EQ(fetched.outcomes[i], KVP_HIT);
    EXPECT_EQ(fetched.n_parts[i], 4);
    EXPECT_TRUE(holds_page(pages[i].key, fetched.pages[i]));
  }
}

TEST_P(VerbsReads, AreShutDownFromAnotherThread) {
  PagePool pool(1, kPageBytes);
  const Location page = pool.publish(0, 1);
  VerbsReader reader(pool);
  kvp_verbs_conn_shutdown(reader.get());
  const Fetched fetched = reader.fetch(std::vector<Location>(20, page), GetParam());
  EXPECT_TRUE(fetched.rc == KVP_ECLOSED || fetched.rc == KVP_OK);
  EXPECT_EQ(reader.fetch({page}, GetParam()).rc == KVP_OK, fetched.rc == KVP_OK);
}

TEST_P(VerbsReads, HitOnlyWithTheRightBytesWhileSlotsAreReused) {
  constexpr int kNFetches = 40;
  PagePool pool(kChurnSlots, kChurnBytes);
  VerbsReader reader(pool);
  Churn churn(pool);
  uint64_t n_hits = 0, n_stale = 0, n_wrong = 0;
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
  EXPECT_EQ(n_wrong, 0u);
  EXPECT_EQ(n_hits + n_stale, uint64_t{kNFetches} * (1 + kChurnRepeats)) << "an honest producer's pages are never corrupt";
  EXPECT_GT(n_hits, 0u);
  EXPECT_GE(n_stale * 100, n_hits + n_stale) << "fewer than 1 % stale: the churn proves nothing";
}

}  // namespace
}  // namespace kvpeer::testing
