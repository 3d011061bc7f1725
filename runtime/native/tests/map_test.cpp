// Pages go from engine blocks into slots and back unchanged; a page that is not what the reader expects is never a hit.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "pool_fixture.hpp"

namespace {

using kvpeer_test::bytes16;
using kvpeer_test::Bytes16;
using kvpeer_test::kExtentBytes;
using kvpeer_test::kExtents;
using kvpeer_test::kRunId;
using kvpeer_test::PoolTest;

constexpr std::uint32_t kSlotBytes = 256 << 10;
constexpr std::uint32_t kPartBytes = 100000;  // neither aligned nor a multiple of any vector

// Engine memory: three segments of different lengths and strides.
class Engine {
 public:
  explicit Engine(std::uint32_t n_blocks) {
    for (std::size_t idx = 0; idx < length_.size(); ++idx) {
      stride_.push_back(length_[idx] + 40 * idx);
      memory_.emplace_back(stride_[idx] * n_blocks + 64);
      base_.push_back(reinterpret_cast<std::uint64_t>(memory_[idx].data()) + idx);
    }
  }

  kvp_layout layout() const { return {static_cast<std::uint32_t>(length_.size()), base_.data(), stride_.data(), length_.data()}; }

  std::vector<std::uint8_t> block(std::int64_t block) const {
    std::vector<std::uint8_t> bytes;
    for (std::size_t idx = 0; idx < length_.size(); ++idx) {
      const auto *first = reinterpret_cast<const std::uint8_t *>(base_[idx] + block * stride_[idx]);
      bytes.insert(bytes.end(), first, first + length_[idx]);
    }
    return bytes;
  }

  void fill_random(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (std::vector<std::uint8_t> &segment : memory_) {
      std::generate(segment.begin(), segment.end(), [&] { return static_cast<std::uint8_t>(random()); });
    }
  }

 private:
  std::vector<std::uint32_t> length_{64 << 10, 1, kPartBytes - (64 << 10) - 1};
  std::vector<std::uint64_t> stride_;
  std::vector<std::uint64_t> base_;
  std::vector<std::vector<std::uint8_t>> memory_;
};

class MapTest : public PoolTest {
 protected:
  void SetUp() override {
    PoolTest::SetUp();
    for (std::uint32_t extent = 0; extent < kExtents; ++extent) {
      ASSERT_EQ(kvp_pool_assign_extent(pool_, extent, kSlotBytes), KVP_OK);
    }
    ASSERT_EQ(kvp_map_create(payload_fd_, header_fd_, kExtentBytes, kRunId.data(), &map_), KVP_OK);
    engine_.fill_random(5);
    other_.fill_random(6);
  }
  void TearDown() override {
    kvp_map_destroy(map_);
    PoolTest::TearDown();
  }

  static std::uint64_t offset_of(std::uint32_t slot) {
    return slot / KVP_SLOTS_PER_EXTENT * kExtentBytes + slot % KVP_SLOTS_PER_EXTENT * std::uint64_t{kSlotBytes};
  }

  // Publishes a block of `engine_` as a page of one part, committed under the key of `slot`.
  void publish(std::uint32_t slot, std::uint32_t generation, std::int64_t block) {
    const kvp_layout layout = engine_.layout();
    const std::uint64_t offset = offset_of(slot);
    std::uint64_t checksum = 0;
    ASSERT_EQ(mark_writing(slot, generation), KVP_OK);
    ASSERT_EQ(kvp_map_gather(map_, 1, &offset, 0, &layout, &block, &checksum), KVP_OK);
    ASSERT_EQ(mark_committed(slot, generation, bytes16(slot), {{0, kPartBytes, checksum}}), KVP_OK);
  }

  // Fetches one page into block 0 of `other_`.
  int fetch(std::uint32_t slot, std::uint32_t generation, int verify, std::uint32_t part = 0) {
    return fetch_key(slot, generation, bytes16(slot), verify, part);
  }

  int fetch_key(std::uint32_t slot, std::uint32_t generation, const Bytes16 &key, int verify, std::uint32_t part = 0) {
    const kvp_layout layout = other_.layout();
    const std::uint64_t offset = offset_of(slot);
    const std::int64_t block = 0;
    std::uint8_t outcome = 255;
    const int code = kvp_map_scatter(map_, 1, &slot, &generation, &offset, key.data(), part, &layout, &block, verify, &outcome);
    return code == KVP_OK ? outcome : code;
  }

  kvp_map *map_ = nullptr;
  Engine engine_{16};
  Engine other_{16};
};

constexpr int kBothVerifyModes[] = {KVP_VERIFY_GENERATION, KVP_VERIFY_FULL};

TEST_F(MapTest, PagesComeBackUnchangedWithTheChecksumOfTheirBytes) {
  constexpr std::uint64_t kPages = 13;  // more than 1 MiB: streaming stores
  std::vector<std::uint32_t> slots, generations;
  std::vector<std::uint64_t> offsets, checksums(kPages);
  std::vector<std::int64_t> blocks;
  std::vector<std::uint8_t> keys;
  for (std::uint32_t page = 0; page < kPages; ++page) {
    slots.push_back(page / 4 * KVP_SLOTS_PER_EXTENT + page % 4);
    generations.push_back(page + 1);
    offsets.push_back(offset_of(slots.back()));
    blocks.push_back((page * 7 + 2) % 16);
    const Bytes16 key = bytes16(page);
    keys.insert(keys.end(), key.begin(), key.end());
  }
  const kvp_layout layout = engine_.layout(), other_layout = other_.layout();
  ASSERT_EQ(kvp_pool_mark_writing(pool_, kPages, slots.data(), generations.data()), KVP_OK);
  ASSERT_EQ(kvp_map_gather(map_, kPages, offsets.data(), 0, &layout, blocks.data(), checksums.data()), KVP_OK);
  std::vector<kvp_part> parts;
  for (std::uint64_t page = 0; page < kPages; ++page) {
    const std::vector<std::uint8_t> bytes = engine_.block(blocks[page]);
    EXPECT_EQ(checksums[page], kvp_crc64(0, bytes.data(), bytes.size()));
    EXPECT_EQ(std::memcmp(kvp_pool_slot_address(pool_, slots[page]), bytes.data(), bytes.size()), 0);
    parts.push_back({0, kPartBytes, checksums[page]});
  }
  ASSERT_EQ(kvp_pool_mark_committed(pool_, kPages, slots.data(), generations.data(), keys.data(), 1, parts.data()), KVP_OK);
  for (const int verify : kBothVerifyModes) {
    other_.fill_random(99);
    std::vector<std::uint8_t> outcomes(kPages, 255);
    ASSERT_EQ(kvp_map_scatter(map_, kPages, slots.data(), generations.data(), offsets.data(), keys.data(), 0, &other_layout,
                              blocks.data(), verify, outcomes.data()),
              KVP_OK);
    for (std::uint64_t page = 0; page < kPages; ++page) {
      EXPECT_EQ(outcomes[page], KVP_HIT);
      EXPECT_EQ(other_.block(blocks[page]), engine_.block(blocks[page]));
    }
  }
}

TEST_F(MapTest, EachRankReadsItsOwnPart) {
  const kvp_layout layout = engine_.layout();
  const std::uint64_t offset = offset_of(0);
  std::vector<kvp_part> parts;
  ASSERT_EQ(mark_writing(0, 1), KVP_OK);
  for (std::uint32_t part = 0; part < 2; ++part) {
    const std::int64_t block = part;
    std::uint64_t checksum = 0, again = 0;
    ASSERT_EQ(kvp_map_gather(map_, 1, &offset, part * kPartBytes, &layout, &block, &checksum), KVP_OK);
    ASSERT_EQ(kvp_map_checksum(map_, 1, &offset, part * kPartBytes, kPartBytes, &again), KVP_OK);
    EXPECT_EQ(again, checksum);
    parts.push_back({part * kPartBytes, kPartBytes, checksum});
  }
  ASSERT_EQ(mark_committed(0, 1, bytes16(0), parts), KVP_OK);
  for (std::uint32_t part = 0; part < 2; ++part) {
    EXPECT_EQ(fetch(0, 1, KVP_VERIFY_FULL, part), KVP_HIT);
    EXPECT_EQ(other_.block(0), engine_.block(part));
  }
  EXPECT_EQ(fetch(0, 1, KVP_VERIFY_FULL, 2), KVP_STALE) << "a part that the page does not have";
}

TEST_F(MapTest, AnythingButTheExpectedHeaderIsStale) {
  for (const int verify : kBothVerifyModes) {
    const std::uint32_t slot = static_cast<std::uint32_t>(verify);
    EXPECT_EQ(fetch(slot, 1, verify), KVP_STALE) << "never written";
    ASSERT_EQ(mark_writing(slot, 1), KVP_OK);
    EXPECT_EQ(fetch(slot, 1, verify), KVP_STALE) << "being written";
    publish(slot, 2, 3);
    EXPECT_EQ(fetch(slot, 2, verify), KVP_HIT);
    EXPECT_EQ(fetch(slot, 1, verify), KVP_STALE) << "an older generation";
    EXPECT_EQ(fetch_key(slot, 2, bytes16(77), verify), KVP_STALE) << "another key";
    ASSERT_EQ(mark_withdrawn(slot, 2), KVP_OK);
    EXPECT_EQ(fetch(slot, 2, verify), KVP_STALE) << "withdrawn";
  }
}

TEST_F(MapTest, AHeaderOfAnotherRunIsStale) {
  publish(0, 1, 3);
  kvp_map_destroy(map_);
  ASSERT_EQ(kvp_map_create(payload_fd_, header_fd_, kExtentBytes, bytes16(2).data(), &map_), KVP_OK);
  EXPECT_EQ(fetch(0, 1, KVP_VERIFY_FULL), KVP_STALE);
}

TEST_F(MapTest, APartOfAnotherLengthIsStale) {
  ASSERT_EQ(mark_writing(0, 1), KVP_OK);
  ASSERT_EQ(mark_committed(0, 1, bytes16(0), {{0, kPartBytes - 1, 5}}), KVP_OK);
  EXPECT_EQ(fetch(0, 1, KVP_VERIFY_GENERATION), KVP_STALE);
}

TEST_F(MapTest, AChangedPayloadUnderAValidHeaderIsCorrupt) {
  publish(0, 1, 3);
  for (const std::uint32_t at : {0u, kPartBytes / 2, kPartBytes - 1}) {
    auto *payload = static_cast<std::uint8_t *>(kvp_pool_slot_address(pool_, 0));
    payload[at] ^= 4;
    EXPECT_EQ(fetch(0, 1, KVP_VERIFY_FULL), KVP_CORRUPT) << "byte " << at;
    EXPECT_EQ(fetch(0, 1, KVP_VERIFY_GENERATION), KVP_HIT) << "generation trusts the pod's clients with the payload";
    payload[at] ^= 4;
    EXPECT_EQ(fetch(0, 1, KVP_VERIFY_FULL), KVP_HIT);
  }
}

TEST_F(MapTest, RefusesArgumentsThatBreakTheContract) {
  publish(0, 1, 3);
  const kvp_layout layout = engine_.layout();
  const std::int64_t block = 0, negative = -1;
  std::uint64_t checksum = 0;
  const std::uint64_t end = kExtents * kExtentBytes;
  for (const std::uint64_t offset : std::vector<std::uint64_t>{end, end - kPartBytes + 1, ~0ull, kExtentBytes - 1}) {
    EXPECT_EQ(kvp_map_gather(map_, 1, &offset, 0, &layout, &block, &checksum), KVP_EINVAL) << offset;
    EXPECT_EQ(kvp_map_checksum(map_, 1, &offset, 0, kPartBytes, &checksum), KVP_EINVAL) << offset;
  }
  const std::uint64_t offset = 0;
  EXPECT_EQ(kvp_map_gather(map_, 1, &offset, 0xffffffff, &layout, &block, &checksum), KVP_EINVAL);
  EXPECT_EQ(kvp_map_gather(map_, 1, &offset, 0, &layout, &negative, &checksum), KVP_EINVAL);
  EXPECT_EQ(kvp_map_gather(map_, 1, &offset, 0, nullptr, &block, &checksum), KVP_EINVAL);
  kvp_layout no_segments = layout;
  no_segments.n_segments = 0;
  EXPECT_EQ(kvp_map_gather(map_, 1, &offset, 0, &no_segments, &block, &checksum), KVP_EINVAL);
  EXPECT_EQ(kvp_map_gather(nullptr, 1, &offset, 0, &layout, &block, &checksum), KVP_EINVAL);
  EXPECT_EQ(kvp_map_checksum(map_, 1, nullptr, 0, 1, &checksum), KVP_EINVAL);

  EXPECT_EQ(fetch(0, 1, 3), KVP_EINVAL) << "no such verify mode";
  EXPECT_EQ(fetch(0, 1, KVP_VERIFY_FULL, KVP_PARTS_MAX), KVP_EINVAL);
  EXPECT_EQ(fetch(kExtents * KVP_SLOTS_PER_EXTENT, 1, KVP_VERIFY_FULL), KVP_EINVAL) << "no such extent";
  EXPECT_EQ(fetch(0xffffffff, 1, KVP_VERIFY_FULL), KVP_EINVAL);
  const std::uint32_t slot = 0, generation = 1;
  std::uint8_t outcome = 255;
  EXPECT_EQ(kvp_map_scatter(map_, 1, &slot, &generation, &kExtentBytes, bytes16(0).data(), 0, &layout, &block, KVP_VERIFY_FULL,
                            &outcome),
            KVP_EINVAL)
      << "an offset in another extent than the slot's";
  const std::uint64_t late = kExtentBytes - 10;
  EXPECT_EQ(kvp_map_scatter(map_, 1, &slot, &generation, &late, bytes16(0).data(), 0, &layout, &block, KVP_VERIFY_FULL, &outcome),
            KVP_OK);
  EXPECT_EQ(outcome, KVP_STALE) << "the part would cross the end of the extent";
}

TEST_F(MapTest, RefusesFilesThatAreNotAPool) {
  kvp_map *map = nullptr;
  EXPECT_EQ(kvp_map_create(header_fd_, payload_fd_, kExtentBytes, kRunId.data(), &map), KVP_EINVAL);
  EXPECT_EQ(kvp_map_create(payload_fd_, header_fd_, kExtentBytes / 2, kRunId.data(), &map), KVP_EINVAL);
  EXPECT_EQ(kvp_map_create(payload_fd_, header_fd_, 0, kRunId.data(), &map), KVP_EINVAL);
  EXPECT_EQ(kvp_map_create(-1, header_fd_, kExtentBytes, kRunId.data(), &map), KVP_EINVAL);
  EXPECT_EQ(kvp_map_create(payload_fd_, header_fd_, kExtentBytes, nullptr, &map), KVP_EINVAL);
  const int unsealed = ::memfd_create("unsealed", MFD_CLOEXEC);
  ASSERT_EQ(::ftruncate(unsealed, kExtents * kExtentBytes), 0);
  EXPECT_EQ(kvp_map_create(unsealed, header_fd_, kExtentBytes, kRunId.data(), &map), KVP_EINVAL);
  ::close(unsealed);
  EXPECT_EQ(map, nullptr);
}

void spin_for(std::chrono::microseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) {
  }
}

// The agent reuses one slot as soon as a reader begins to fetch it, or a little later.
TEST_F(MapTest, AHitIsNeverBytesOfAnotherGeneration) {
  constexpr std::uint64_t kHitsMin = 200, kStalesMin = 200;
  constexpr std::uint32_t kPatienceMax = 1u << 10;
  for (const int verify : kBothVerifyModes) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(100);
    std::atomic<std::uint32_t> committed{0}, fetching{0};
    std::atomic<bool> is_stopping{false};
    // How long a page stays, in units of (0 to 31) us: found by trying, because a sanitizer makes a copy 10 times slower.
    std::atomic<std::uint32_t> patience{1};
    std::thread agent([&] {
      auto *payload = static_cast<std::uint8_t *>(kvp_pool_slot_address(pool_, static_cast<std::uint32_t>(verify)));
      std::vector<std::uint8_t> page(kPartBytes);
      for (std::uint32_t generation = 1; !is_stopping.load(); ++generation) {
        ASSERT_EQ(mark_writing(verify, generation), KVP_OK);
        std::fill(page.begin(), page.end(), static_cast<std::uint8_t>(generation));
        const std::uint64_t checksum = kvp_copy_crc64(0, payload, page.data(), page.size());
        ASSERT_EQ(mark_committed(verify, generation, bytes16(verify), {{0, kPartBytes, checksum}}), KVP_OK);
        committed.store(generation);
        while (fetching.load() != generation && !is_stopping.load()) {
        }
        spin_for(std::chrono::microseconds(generation % 32 * patience.load()));
      }
    });
    std::uint64_t n_hits = 0, n_stales = 0, n_wrong = 0;
    while ((n_hits < kHitsMin || n_stales < kStalesMin) && std::chrono::steady_clock::now() < deadline) {
      const std::uint32_t generation = committed.load();
      fetching.store(generation);
      const int outcome = fetch(static_cast<std::uint32_t>(verify), generation, verify);
      n_stales += outcome == KVP_STALE ? 1 : 0;
      if (outcome == KVP_HIT) {
        const std::vector<std::uint8_t> bytes = other_.block(0);
        const auto expected = static_cast<std::uint8_t>(generation);
        n_hits += 1;
        n_wrong += std::all_of(bytes.begin(), bytes.end(), [=](std::uint8_t byte) { return byte == expected; }) ? 0 : 1;
      }
      if (n_stales > 4 * n_hits + 8) {
        patience.store(std::min(patience.load() * 2, kPatienceMax));
      } else if (n_hits > 4 * n_stales + 8) {
        patience.store(std::max(patience.load() / 2, 1u));
      }
    }
    is_stopping.store(true);
    agent.join();
    EXPECT_EQ(n_wrong, 0u) << "verify " << verify;
    EXPECT_GE(n_hits, kHitsMin) << "verify " << verify;
    EXPECT_GE(n_stales, kStalesMin) << "verify " << verify;
  }
}

}  // namespace
