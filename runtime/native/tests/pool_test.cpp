// The pool's files are sealed, its slots resolve, and its headers are only ever seen whole.
#include "pool.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <string>
#include <thread>

#include "pool_fixture.hpp"
#include "slot_header.hpp"

namespace {

using kvpeer_test::bytes16;
using kvpeer_test::Bytes16;
using kvpeer_test::kExtentBytes;
using kvpeer_test::kExtents;
using kvpeer_test::kRunId;
using kvpeer_test::PoolTest;

constexpr std::uint32_t kSlotBytes = 64 << 10;
constexpr std::uint32_t kSlotsPerExtent = kExtentBytes / kSlotBytes;

TEST(PoolCreation, RoundsDownToWholeExtents) {
  kvp_pool *pool = nullptr;
  ASSERT_EQ(kvp_pool_create(3 * kExtentBytes - 1, kExtentBytes, 0, kRunId.data(), &pool), KVP_OK);
  EXPECT_EQ(kvp_pool_n_extents(pool), 2u);
  kvp_pool_destroy(pool);
}

TEST(PoolCreation, RefusesSizesThatDoNotFit) {
  kvp_pool *pool = nullptr;
  EXPECT_EQ(kvp_pool_create(kExtentBytes - 1, kExtentBytes, 0, kRunId.data(), &pool), KVP_EINVAL);
  EXPECT_EQ(kvp_pool_create(kExtentBytes, 0, 0, kRunId.data(), &pool), KVP_EINVAL);
  EXPECT_EQ(kvp_pool_create(kExtentBytes, 5000, 0, kRunId.data(), &pool), KVP_EINVAL);
  EXPECT_EQ(kvp_pool_create(kExtentBytes, kExtentBytes, 4096, kRunId.data(), &pool), KVP_EINVAL);
  EXPECT_EQ(kvp_pool_create(kExtentBytes, kExtentBytes, 2 << 20, kRunId.data(), &pool), KVP_EINVAL);
  EXPECT_EQ(kvp_pool_create(1ull << 62, 4096, 0, kRunId.data(), &pool), KVP_EINVAL);
  EXPECT_EQ(kvp_pool_create(kExtentBytes, kExtentBytes, 0, nullptr, &pool), KVP_EINVAL);
  EXPECT_EQ(kvp_pool_create(kExtentBytes, kExtentBytes, 0, kRunId.data(), nullptr), KVP_EINVAL);
  EXPECT_EQ(pool, nullptr);
}

TEST(PoolCreation, FindsNoSuchHugePageReservation) {
  constexpr std::uint64_t kGibibyte = 1ull << 30;
  kvp_pool *pool = nullptr;
  // Far more than any machine that runs tests has reserved: an error now instead of a SIGBUS at the first write.
  EXPECT_NE(kvp_pool_create(4096 * kGibibyte, kGibibyte, kGibibyte, kRunId.data(), &pool), KVP_OK);
  EXPECT_EQ(pool, nullptr);
  EXPECT_NE(kvp_last_errno(), 0);
}

TEST_F(PoolTest, FilesCanNeverChangeSize) {
  for (const int fd : {payload_fd_, header_fd_}) {
    const off_t size = ::lseek(fd, 0, SEEK_END);
    EXPECT_EQ(::ftruncate(fd, size / 2), -1);
    EXPECT_EQ(::ftruncate(fd, size * 2), -1);
    EXPECT_EQ(::fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1) << "somebody else could seal the file further";
  }
}

TEST_F(PoolTest, HeadersCannotBeMappedOrWrittenByAnybodyElse) {
  EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, header_fd_, 0), MAP_FAILED);
  EXPECT_EQ(::pwrite(header_fd_, "x", 1, 0), -1);
  void *readable = ::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, header_fd_, 0);
  ASSERT_NE(readable, MAP_FAILED);
  EXPECT_EQ(::mprotect(readable, 4096, PROT_READ | PROT_WRITE), -1);
  ::munmap(readable, 4096);
}

// Mappings of this process whose file is a pool's.
int count_pool_mappings() {
  std::ifstream maps("/proc/self/maps");
  int n = 0;
  for (std::string line; std::getline(maps, line);) {
    n += line.find("memfd:kvpeer-") != std::string::npos ? 1 : 0;
  }
  return n;
}

TEST_F(PoolTest, AForkedChildDoesNotInheritTheMappings) {
  ASSERT_EQ(count_pool_mappings(), 2);
  const pid_t child = ::fork();
  if (child == 0) {
    ::_exit(count_pool_mappings());
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(PoolTest, TouchingKeepsTheBytesAndBacksTheExtent) {
  std::uint64_t n_bytes = 0;
  auto *payload = static_cast<std::uint8_t *>(kvp_pool_payload(pool_, &n_bytes));
  payload[kExtentBytes + 5] = 77;
  EXPECT_EQ(kvp_pool_touch_extent(pool_, 1), KVP_OK);
  EXPECT_EQ(payload[kExtentBytes + 5], 77);
  std::vector<unsigned char> resident(kExtentBytes / 4096);
  ASSERT_EQ(::mincore(payload + kExtentBytes, kExtentBytes, resident.data()), 0);
  for (const unsigned char page : resident) {
    ASSERT_EQ(page & 1, 1);
  }
  EXPECT_EQ(kvp_pool_touch_extent(pool_, kExtents), KVP_EINVAL);
}

TEST_F(PoolTest, SlotsResolveByTheirExtentsSizeClass) {
  ASSERT_EQ(kvp_pool_assign_extent(pool_, 2, kSlotBytes), KVP_OK);
  std::uint64_t n_bytes = 0;
  auto *payload = static_cast<std::byte *>(kvp_pool_payload(pool_, &n_bytes));
  const std::uint32_t first = 2 * KVP_SLOTS_PER_EXTENT;
  for (std::uint32_t idx = 0; idx < kSlotsPerExtent; ++idx) {
    EXPECT_EQ(kvp_pool_slot_address(pool_, first + idx), payload + 2 * kExtentBytes + idx * kSlotBytes);
    EXPECT_EQ(pool_->slot_bytes(first + idx), kSlotBytes);
    EXPECT_NE(pool_->header(first + idx), nullptr);
  }
  EXPECT_NE(pool_->slot_payload(first, kSlotBytes), nullptr);
  EXPECT_EQ(pool_->slot_payload(first, kSlotBytes + 1), nullptr);
  for (const std::uint32_t missing : {0u, first - 1, first + kSlotsPerExtent, 3u * KVP_SLOTS_PER_EXTENT, 0xffffffffu}) {
    EXPECT_EQ(kvp_pool_slot_address(pool_, missing), nullptr) << "slot " << missing;
    EXPECT_EQ(pool_->slot_bytes(missing), 0u);
    EXPECT_EQ(pool_->header(missing), nullptr);
    EXPECT_EQ(pool_->slot_payload(missing, 1), nullptr);
  }
}

TEST_F(PoolTest, RefusesSizeClassesThatDoNotFit) {
  EXPECT_EQ(kvp_pool_assign_extent(pool_, 0, 0), KVP_EINVAL);
  EXPECT_EQ(kvp_pool_assign_extent(pool_, 0, 4095), KVP_EINVAL);
  EXPECT_EQ(kvp_pool_assign_extent(pool_, 0, kExtentBytes + 4096), KVP_EINVAL);
  EXPECT_EQ(kvp_pool_assign_extent(pool_, kExtents, kSlotBytes), KVP_EINVAL);
}

TEST_F(PoolTest, AnExtentChangesItsSizeClassOnlyWhenNoSlotIsInUse) {
  ASSERT_EQ(kvp_pool_assign_extent(pool_, 0, kSlotBytes), KVP_OK);
  ASSERT_EQ(mark_writing(3, 1), KVP_OK);
  EXPECT_EQ(kvp_pool_assign_extent(pool_, 0, 4096), KVP_EINVAL);
  ASSERT_EQ(mark_committed(3, 1, bytes16(3), {{0, 100, 5}}), KVP_OK);
  EXPECT_EQ(kvp_pool_assign_extent(pool_, 0, 4096), KVP_EINVAL);
  ASSERT_EQ(mark_withdrawn(3, 1), KVP_OK);
  EXPECT_EQ(kvp_pool_assign_extent(pool_, 0, 4096), KVP_OK);
  EXPECT_EQ(pool_->slot_bytes(200), 4096u);
  EXPECT_EQ(mark_writing(3, 1), KVP_EINVAL) << "a change of size class must not bring a generation back";
  EXPECT_EQ(mark_writing(3, 2), KVP_OK);
}

TEST_F(PoolTest, HeadersFollowTheLifeOfASlot) {
  ASSERT_EQ(kvp_pool_assign_extent(pool_, 1, kSlotBytes), KVP_OK);
  const std::uint32_t slot = KVP_SLOTS_PER_EXTENT + 2;
  const Bytes16 key = bytes16(9);
  kvp_slot_header header;
  kvp_part parts[KVP_PARTS_MAX];
  EXPECT_FALSE(kvpeer::copy_header(pool_->header(slot), header, parts)) << "never written";

  ASSERT_EQ(mark_writing(slot, 5), KVP_OK);
  ASSERT_TRUE(kvpeer::copy_header(pool_->header(slot), header, parts));
  EXPECT_EQ(header.state, KVP_SLOT_WRITING);
  EXPECT_EQ(header.n_parts, 0);

  ASSERT_EQ(mark_committed(slot, 5, key, {{0, 1000, 11}, {1000, 500, 12}}), KVP_OK);
  ASSERT_TRUE(kvpeer::copy_header(pool_->header(slot), header, parts));
  EXPECT_TRUE(kvpeer::header_matches(header, key.data(), kRunId.data(), 5, 1500));
  EXPECT_EQ(header.n_parts, 2);
  EXPECT_EQ(parts[1].offset, 1000u);
  EXPECT_EQ(parts[1].length, 500u);
  EXPECT_EQ(parts[1].checksum, 12u);
  EXPECT_FALSE(kvpeer::header_matches(header, bytes16(8).data(), kRunId.data(), 5, 1500));
  EXPECT_FALSE(kvpeer::header_matches(header, key.data(), bytes16(2).data(), 5, 1500));
  EXPECT_FALSE(kvpeer::header_matches(header, key.data(), kRunId.data(), 6, 1500));
  EXPECT_FALSE(kvpeer::header_matches(header, key.data(), kRunId.data(), 5, 1501));

  ASSERT_EQ(mark_withdrawn(slot, 5), KVP_OK);
  ASSERT_TRUE(kvpeer::copy_header(pool_->header(slot), header, parts));
  EXPECT_EQ(header.state, KVP_SLOT_WITHDRAWN);
  EXPECT_FALSE(kvpeer::header_matches(header, key.data(), kRunId.data(), 5, 1500));
}

TEST_F(PoolTest, AFlippedBitAnywhereInHeaderOrTableIsSeen) {
  ASSERT_EQ(kvp_pool_assign_extent(pool_, 0, kSlotBytes), KVP_OK);
  ASSERT_EQ(mark_writing(0, 1), KVP_OK);
  ASSERT_EQ(mark_committed(0, 1, bytes16(3), {{0, 100, 5}, {100, 28, 6}}), KVP_OK);
  constexpr std::size_t kUsedBytes = KVP_HEADER_BYTES + 2 * KVP_PART_ENTRY_BYTES;
  alignas(8) std::array<std::uint8_t, KVP_HEADER_STRIDE> copy;
  std::memcpy(copy.data(), pool_->header(0), copy.size());
  kvp_slot_header header;
  kvp_part parts[KVP_PARTS_MAX];
  const auto *live = reinterpret_cast<const kvp_slot_header *>(copy.data());
  ASSERT_TRUE(kvpeer::copy_header(live, header, parts));
  for (std::size_t bit = 0; bit < 8 * kUsedBytes; ++bit) {
    copy[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
    EXPECT_FALSE(kvpeer::copy_header(live, header, parts)) << "bit " << bit;
    copy[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
  }
}

TEST_F(PoolTest, RefusesABatchWithAnyWrongStepAndMarksNothing) {
  ASSERT_EQ(kvp_pool_assign_extent(pool_, 0, kSlotBytes), KVP_OK);
  EXPECT_EQ(mark_writing(0, 0), KVP_EINVAL) << "generation 0";
  EXPECT_EQ(mark_writing(kSlotsPerExtent, 1), KVP_EINVAL) << "no such slot";
  EXPECT_EQ(mark_withdrawn(0, 1), KVP_EINVAL) << "never in use";
  EXPECT_EQ(mark_committed(0, 1, bytes16(1), {{0, 100, 5}}), KVP_EINVAL) << "not being written";

  const std::uint32_t slots[] = {0, kSlotsPerExtent};
  const std::uint32_t generations[] = {7, 7};
  EXPECT_EQ(kvp_pool_mark_writing(pool_, 2, slots, generations), KVP_EINVAL);
  kvp_slot_header header;
  EXPECT_FALSE(kvpeer::copy_header(pool_->header(0), header, nullptr)) << "the good half of a bad batch was written";

  ASSERT_EQ(mark_writing(0, 7), KVP_OK);
  EXPECT_EQ(mark_writing(0, 7), KVP_EINVAL) << "same generation again";
  EXPECT_EQ(mark_committed(0, 8, bytes16(1), {{0, 100, 5}}), KVP_EINVAL) << "another generation";
  EXPECT_EQ(mark_committed(0, 7, bytes16(1), {}), KVP_EINVAL) << "no parts";
  EXPECT_EQ(mark_committed(0, 7, bytes16(1), {{0, 0, 5}}), KVP_EINVAL) << "empty part";
  EXPECT_EQ(mark_committed(0, 7, bytes16(1), {{1, kSlotBytes, 5}}), KVP_EINVAL) << "part beyond the slot";
  EXPECT_EQ(mark_committed(0, 7, bytes16(1), {{0xffffffff, 2, 5}}), KVP_EINVAL) << "overflow";
  EXPECT_EQ(mark_committed(0, 7, bytes16(1), {{0, kSlotBytes, 5}, {0, 1, 5}}), KVP_EINVAL) << "more than the slot";
  EXPECT_EQ(mark_committed(0, 7, bytes16(1), std::vector<kvp_part>(65, {0, 1, 0})), KVP_EINVAL) << "too many parts";
  EXPECT_EQ(mark_withdrawn(0, 6), KVP_EINVAL);
  EXPECT_EQ(mark_committed(0, 7, bytes16(1), {{0, kSlotBytes, 5}}), KVP_OK);
  EXPECT_EQ(mark_withdrawn(0, 7), KVP_OK);
  EXPECT_EQ(mark_withdrawn(0, 7), KVP_OK) << "withdrawing is idempotent";
}

TEST_F(PoolTest, ACheckSeesAFlippedBitInEachPartAndNothingElse) {
  ASSERT_EQ(kvp_pool_assign_extent(pool_, 0, kSlotBytes), KVP_OK);
  const std::uint32_t slot = 3;
  const Bytes16 key = bytes16(9);
  auto *payload = static_cast<std::uint8_t *>(kvp_pool_slot_address(pool_, slot));
  for (std::uint32_t idx = 0; idx < kSlotBytes; ++idx) payload[idx] = static_cast<std::uint8_t>(idx * 7);
  const std::vector<kvp_part> parts = {{0, 1000, kvp_crc64(0, payload, 1000)}, {1000, 501, kvp_crc64(0, payload + 1000, 501)}};
  const auto check = [&](std::uint32_t generation, const Bytes16 &asked) {
    return kvp_pool_check(pool_, slot, generation, asked.data());
  };
  EXPECT_EQ(check(5, key), KVP_STALE) << "never written";
  ASSERT_EQ(mark_writing(slot, 5), KVP_OK);
  EXPECT_EQ(check(5, key), KVP_STALE) << "being written";
  ASSERT_EQ(mark_committed(slot, 5, key, parts), KVP_OK);
  EXPECT_EQ(check(5, key), KVP_HIT);
  EXPECT_EQ(check(4, key), KVP_STALE);
  EXPECT_EQ(check(5, bytes16(8)), KVP_STALE);
  for (const std::uint32_t at : {0u, 999u, 1000u, 1500u}) {
    payload[at] ^= 16;
    EXPECT_EQ(check(5, key), KVP_CORRUPT) << "byte " << at;
    payload[at] ^= 16;
  }
  payload[1501] ^= 16;
  EXPECT_EQ(check(5, key), KVP_HIT) << "behind the page";
  ASSERT_EQ(mark_withdrawn(slot, 5), KVP_OK);
  EXPECT_EQ(check(5, key), KVP_STALE);
  EXPECT_EQ(kvp_pool_check(pool_, 0xFFFFFFFFu, 5, key.data()), KVP_STALE) << "no such slot";
}

TEST_F(PoolTest, NullArgumentsAreRefused) {
  const std::uint32_t one = 1;
  EXPECT_EQ(kvp_pool_fds(nullptr, nullptr, nullptr), KVP_EINVAL);
  EXPECT_EQ(kvp_pool_mark_writing(pool_, 1, nullptr, &one), KVP_EINVAL);
  EXPECT_EQ(kvp_pool_mark_committed(pool_, 1, &one, &one, nullptr, 1, nullptr), KVP_EINVAL);
  EXPECT_EQ(kvp_pool_mark_withdrawn(nullptr, 1, &one, &one), KVP_EINVAL);
  EXPECT_EQ(kvp_pool_slot_address(nullptr, 0), nullptr);
  EXPECT_EQ(kvp_pool_touch_extent(nullptr, 0), KVP_EINVAL);
  EXPECT_EQ(kvp_pool_assign_extent(nullptr, 0, 4096), KVP_EINVAL);
  EXPECT_EQ(kvp_pool_check(nullptr, 0, 1, kRunId.data()), KVP_EINVAL);
  EXPECT_EQ(kvp_pool_check(pool_, 0, 1, nullptr), KVP_EINVAL);
}

// Everything in a committed header and its table follows from the generation.
std::vector<kvp_part> parts_of(std::uint32_t generation) {
  std::vector<kvp_part> parts(1 + generation % KVP_PARTS_MAX);
  for (kvp_part &part : parts) {
    part = {0, 1 + generation % 16, generation * 0x100000001ull};
  }
  return parts;
}

bool is_of_one_generation(const kvp_slot_header &header, const kvp_part *parts) {
  const std::vector<kvp_part> expected = parts_of(header.generation);
  const Bytes16 key = bytes16(header.generation);
  return header.n_parts == expected.size() && std::memcmp(header.key, key.data(), key.size()) == 0 &&
         std::memcmp(parts, expected.data(), expected.size() * sizeof(kvp_part)) == 0;
}

TEST_F(PoolTest, AReaderNeverSeesAMixtureOfTwoHeaders) {
  constexpr int kReaders = 2;
  constexpr std::uint64_t kSeenMin = 2000;  // committed headers that each reader must have seen
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  ASSERT_EQ(kvp_pool_assign_extent(pool_, 0, kSlotBytes), KVP_OK);
  std::atomic<std::uint64_t> n_mixed{0}, n_torn{0};
  std::atomic<int> n_reading{kReaders};

  const auto read = [&] {
    kvp_slot_header header;
    kvp_part parts[KVP_PARTS_MAX];
    std::uint64_t n_seen = 0;
    while (n_seen < kSeenMin && std::chrono::steady_clock::now() < deadline) {
      if (!kvpeer::copy_header(pool_->header(0), header, parts)) {
        n_torn.fetch_add(1, std::memory_order_relaxed);
      } else if (header.state == KVP_SLOT_COMMITTED) {
        ++n_seen;
        n_mixed.fetch_add(is_of_one_generation(header, parts) ? 0 : 1, std::memory_order_relaxed);
      }
    }
    EXPECT_GE(n_seen, kSeenMin);
    n_reading.fetch_sub(1);
  };
  std::vector<std::thread> readers;
  for (int idx = 0; idx < kReaders; ++idx) {
    readers.emplace_back(read);
  }
  for (std::uint32_t generation = 1; n_reading.load() > 0; ++generation) {
    ASSERT_EQ(mark_writing(0, generation), KVP_OK);
    ASSERT_EQ(mark_committed(0, generation, bytes16(generation), parts_of(generation)), KVP_OK);
  }
  for (std::thread &reader : readers) {
    reader.join();
  }
  EXPECT_EQ(n_mixed.load(), 0u);
  RecordProperty("torn", std::to_string(n_torn.load()));
}

}  // namespace
