// The directory table through its C API: a random walk against std::map, memory within its budget, limits, and bad arguments.
#include <gtest/gtest.h>
#include <malloc.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "kvpeer/kvpeer.h"

namespace {

using PageKey = std::array<std::uint8_t, KVP_KEY_BYTES>;

struct Entry {
  std::uint32_t slot = 0, generation = 0, length = 0;
  std::uint8_t tier = 0;
  auto operator<=>(const Entry &) const = default;
};

struct Destroy {
  void operator()(kvp_dir *dir) const { kvp_dir_destroy(dir); }
};
using Directory = std::unique_ptr<kvp_dir, Destroy>;

Directory make_directory(std::uint32_t partition_records_max = 1u << 20, bool makes_room = true) {
  kvp_dir *dir = nullptr;
  EXPECT_EQ(kvp_dir_create(partition_records_max, makes_room, &dir), KVP_OK);
  return Directory(dir);
}

// Keys are hashes in life; here a number goes through two rounds of a multiplicative mix.
PageKey key_of(std::uint64_t number) {
  PageKey key;
  for (std::size_t i = 0; i < key.size(); i += 8) {
    std::uint64_t word = (number * 2 + i / 8 + 1) * 0x9e3779b97f4a7c15u;
    word = (word ^ word >> 29) * 0xbf58476d1ce4e5b9u;
    word ^= word >> 32;
    std::memcpy(key.data() + i, &word, 8);
  }
  return key;
}

std::uint8_t apply(kvp_dir *dir, std::uint32_t agent, std::uint8_t op, const PageKey &key, std::uint16_t partition, const Entry &entry) {
  std::uint8_t result = 0xFF;
  EXPECT_EQ(kvp_dir_apply(dir, agent, 1, &op, key.data(), &partition, &entry.slot, &entry.generation, &entry.length, &entry.tier,
                          &result),
            KVP_OK);
  return result;
}

std::map<std::uint32_t, Entry> lookup(const kvp_dir *dir, const PageKey &key, std::uint16_t partition, std::vector<std::uint8_t> alive) {
  std::uint8_t count = 0;
  std::array<kvp_holder, KVP_HOLDERS_MAX> holders;
  const std::int64_t n = kvp_dir_lookup(dir, 1, key.data(), &partition, alive.data(), static_cast<std::uint32_t>(alive.size()),
                                        &count, holders.data(), holders.size());
  EXPECT_EQ(n, count);
  std::map<std::uint32_t, Entry> found;
  for (std::int64_t i = 0; i < n; ++i) {
    const kvp_holder &holder = holders[i];
    found[holder.agent] = {holder.slot, holder.generation, holder.length, static_cast<std::uint8_t>(holder.tier)};
  }
  EXPECT_EQ(found.size(), static_cast<std::size_t>(n)) << "an agent appears twice";
  return found;
}

kvp_dir_stats stats_of(const kvp_dir *dir) {
  kvp_dir_stats stats;
  kvp_dir_get_stats(dir, &stats);
  return stats;
}

std::pair<std::uint64_t, std::uint32_t> digest_of(const kvp_dir *dir, std::uint32_t agent, std::uint16_t partition) {
  std::uint64_t digest = 0;
  std::uint32_t count = 0;
  EXPECT_EQ(kvp_dir_digests(dir, agent, 1, &partition, &digest, &count), KVP_OK);
  return {digest, count};
}

void fill(kvp_dir *dir, std::uint32_t agent, std::uint64_t first, std::uint64_t stop) {
  for (std::uint64_t number = first; number < stop; ++number) {
    const PageKey key = key_of(number);
    const auto partition = static_cast<std::uint16_t>((key[0] << 8 | key[1]) >> 4);
    ASSERT_EQ(apply(dir, agent, KVP_DIR_PUT, key, partition, {static_cast<std::uint32_t>(number), 1, 4096, 2}), KVP_DIR_APPLIED);
  }
}

// Bytes that the C library's allocator has handed out, from its arenas and by mapping.
std::size_t allocated_bytes() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

// The model: (partition, key) -> agent -> entry.
using Model = std::map<std::pair<std::uint16_t, PageKey>, std::map<std::uint32_t, Entry>>;

TEST(Directory, EqualsAMapAfterRandomOps) {
  constexpr std::uint32_t kAgents = 20;
  std::mt19937 random(7);
  auto dir = make_directory();
  Model model;
  const std::vector<std::uint8_t> everybody(kAgents, 1);
  auto below = [&](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
  for (int step = 0; step < 60000; ++step) {
    const std::uint32_t agent = below(kAgents);
    // Few keys in three partitions: long holder lists and shared index places. The phases fill, churn and empty the table.
    const auto partition = static_cast<std::uint16_t>(below(3) * 2047);
    const PageKey key = key_of(below(150));
    auto &holders = model[{partition, key}];
    const bool put = below(100) < (step % 20000 < 10000 ? 70u : 20u);
    if (put) {
      const Entry entry{below(3), below(2), 8, 2};
      const bool is_new = !holders.contains(agent);
      const std::uint8_t expected = is_new && holders.size() == KVP_HOLDERS_MAX ? KVP_DIR_HOLDERS_FULL
                                    : !is_new && holders[agent] == entry        ? KVP_DIR_UNCHANGED
                                                                                : KVP_DIR_APPLIED;
      ASSERT_EQ(apply(dir.get(), agent, KVP_DIR_PUT, key, partition, entry), expected);
      if (expected == KVP_DIR_APPLIED) holders[agent] = entry;
    } else if (below(500) == 0) {
      ASSERT_GE(kvp_dir_sweep(dir.get(), agent, partition, 1), 0);
      for (auto &[place, held] : model) {
        if (place.first == partition) held.erase(agent);
      }
    } else {
      const Entry entry{below(3), below(2), 0, 0};
      const auto held = holders.find(agent);
      const bool equal = held != holders.end() && held->second.slot == entry.slot && held->second.generation == entry.generation;
      ASSERT_EQ(apply(dir.get(), agent, KVP_DIR_REMOVE, key, partition, entry), equal ? KVP_DIR_APPLIED : KVP_DIR_UNCHANGED);
      if (equal) holders.erase(agent);
    }
    ASSERT_EQ(lookup(dir.get(), key, partition, everybody), holders);
    if (step % 1000 != 0) continue;
    std::uint64_t n_records = 0, n_holders = 0;
    for (const auto &[place, held] : model) {
      ASSERT_EQ(lookup(dir.get(), place.second, place.first, everybody), held);
      n_records += held.empty() ? 0 : 1;
      n_holders += held.size();
    }
    ASSERT_EQ(stats_of(dir.get()).records, n_records);
    ASSERT_EQ(stats_of(dir.get()).holders, n_holders);
  }
}

// Sanitizers look at every access, not at sizes, and are ten times slower.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::array<std::uint64_t, 1> kManyRecords = {100'000};
#else
constexpr std::array<std::uint64_t, 4> kManyRecords = {100'000, 137'000, 411'000, 1'000'000};
#endif

TEST(Directory, OneHolderTakesAtMost96BytesAndEachFurtherOne32) {
  constexpr std::uint32_t kAgents = 16;
  // The levels lie between growth steps as well as right after one. Everything counts: the fixed partition objects, and the
  // digests, of which each record's producer has its own.
  for (const std::uint64_t n_records : kManyRecords) {
    auto dir = make_directory();
    for (std::uint32_t agent = 0; agent < kAgents; ++agent) {
      fill(dir.get(), agent, n_records * agent / kAgents, n_records * (agent + 1) / kAgents);
    }
    const std::uint64_t single_bytes = stats_of(dir.get()).bytes;
    ASSERT_EQ(stats_of(dir.get()).records, n_records);
    EXPECT_LE(single_bytes, 96 * n_records) << n_records;
    for (std::uint32_t agent = kAgents; agent < kAgents + 3; ++agent) {
      fill(dir.get(), agent, 0, n_records);
      const std::uint64_t n_further = n_records * (agent - kAgents + 1);
      EXPECT_LE(stats_of(dir.get()).bytes - single_bytes, 32 * n_further) << n_records << " records, agent " << agent;
    }
  }
}

TEST(Directory, BytesAreWhatTheAllocatorGave) {
  const std::size_t before = allocated_bytes();
  auto dir = make_directory();
  if (allocated_bytes() == before) GTEST_SKIP() << "this allocator (a sanitizer's) keeps no statistics";
  for (std::uint32_t agent = 0; agent < 3; ++agent) fill(dir.get(), agent, agent * 50'000, 200'000);
  const auto given = static_cast<double>(allocated_bytes() - before);
  EXPECT_NEAR(static_cast<double>(stats_of(dir.get()).bytes), given, 0.02 * given);
}

TEST(Directory, StaysWithinBudgetWhileItEmptiesAndThenGivesAllBack) {
  constexpr std::uint64_t kRecords = 400'000;
  auto dir = make_directory();
  const std::uint64_t empty_bytes = stats_of(dir.get()).bytes;
  fill(dir.get(), 3, 0, kRecords);
  for (std::uint64_t number = 0; number < kRecords; ++number) {
    const PageKey key = key_of(number);
    const auto partition = static_cast<std::uint16_t>((key[0] << 8 | key[1]) >> 4);
    ASSERT_EQ(apply(dir.get(), 3, KVP_DIR_REMOVE, key, partition, {static_cast<std::uint32_t>(number), 1, 0, 0}), KVP_DIR_APPLIED);
    const std::uint64_t left = kRecords - number - 1;
    if (left % 50'000 == 0 && left >= 100'000) {
      EXPECT_LE(stats_of(dir.get()).bytes, 96 * left) << left << " left";
    }
  }
  EXPECT_EQ(stats_of(dir.get()).bytes, empty_bytes);
  EXPECT_EQ(stats_of(dir.get()).records, 0u);
}

TEST(Directory, AgentsThatLeaveGiveTheirDigestsBack) {
  auto dir = make_directory();
  fill(dir.get(), 0, 0, 20'000);
  const std::uint64_t bytes = stats_of(dir.get()).bytes;
  for (std::uint32_t agent = 1; agent <= 100; ++agent) {
    fill(dir.get(), agent, 0, 5'000);
    ASSERT_EQ(kvp_dir_sweep(dir.get(), agent, 0, KVP_PARTITIONS), 5'000);
  }
  EXPECT_LE(stats_of(dir.get()).bytes, bytes + bytes / 4);
}

TEST(Directory, DigestDependsOnTheEntriesAndNotOnTheWayThere) {
  auto one = make_directory(), other = make_directory();
  fill(one.get(), 1, 0, 500);
  fill(one.get(), 9, 200, 700);
  fill(other.get(), 7, 250, 500);
  fill(other.get(), 7, 0, 250);
  bool any = false;
  for (std::uint16_t partition = 0; partition < KVP_PARTITIONS; ++partition) {
    ASSERT_EQ(digest_of(one.get(), 1, partition), digest_of(other.get(), 7, partition));
    any = any || digest_of(one.get(), 1, partition).second > 0;
  }
  EXPECT_TRUE(any);
}

TEST(Directory, DigestSeesEachFieldOfAnEntry) {
  std::set<std::uint64_t> digests;
  for (const Entry &entry : {Entry{1, 2, 3, 4}, Entry{9, 2, 3, 4}, Entry{1, 9, 3, 4}, Entry{1, 2, 9, 4}, Entry{1, 2, 3, 9}}) {
    auto dir = make_directory();
    apply(dir.get(), 0, KVP_DIR_PUT, key_of(1), 5, entry);
    digests.insert(digest_of(dir.get(), 0, 5).first);
  }
  EXPECT_EQ(digests.size(), 5u);
}

TEST(Directory, DigestIsAConstantOfTheProtocol) {
  auto dir = make_directory();
  PageKey key;
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = static_cast<std::uint8_t>(i);
  apply(dir.get(), 0, KVP_DIR_PUT, key, 5, {1, 2, 3, 4});
  EXPECT_EQ(digest_of(dir.get(), 0, 5).first, 0xcaa44ca50ddef20fu);
}

TEST(Directory, DumpAndReplaceMoveAnAgentsEntriesAndNobodyElses) {
  auto dir = make_directory();
  for (std::uint32_t number = 0; number < 100; ++number) {
    apply(dir.get(), 1, KVP_DIR_PUT, key_of(number), 5, {number, 1, 8, 2});
    apply(dir.get(), 2, KVP_DIR_PUT, key_of(number), 5, {number, 2, 8, 2});
  }
  std::vector<std::uint8_t> keys(100 * KVP_KEY_BYTES), tiers(100);
  std::vector<std::uint32_t> slots(100), generations(100), lengths(100);
  ASSERT_EQ(kvp_dir_dump(dir.get(), 1, 5, 40, keys.data(), slots.data(), generations.data(), lengths.data(), tiers.data()), 100);
  ASSERT_EQ(kvp_dir_dump(dir.get(), 1, 5, 100, keys.data(), slots.data(), generations.data(), lengths.data(), tiers.data()), 100);
  const auto before = digest_of(dir.get(), 1, 5);
  const auto others = digest_of(dir.get(), 2, 5);
  ASSERT_EQ(kvp_dir_replace(dir.get(), 1, 5, 60, keys.data(), slots.data(), generations.data(), lengths.data(), tiers.data()), KVP_OK);
  EXPECT_EQ(digest_of(dir.get(), 1, 5).second, 60u);
  ASSERT_EQ(kvp_dir_replace(dir.get(), 1, 5, 100, keys.data(), slots.data(), generations.data(), lengths.data(), tiers.data()), KVP_OK);
  EXPECT_EQ(digest_of(dir.get(), 1, 5), before);
  EXPECT_EQ(digest_of(dir.get(), 2, 5), others);
}

TEST(Directory, FullPartitionThatMakesNoRoomRefusesNewRecordsOnly) {
  auto dir = make_directory(2, false);
  EXPECT_EQ(apply(dir.get(), 1, KVP_DIR_PUT, key_of(1), 5, {1, 1, 8, 2}), KVP_DIR_APPLIED);
  EXPECT_EQ(apply(dir.get(), 1, KVP_DIR_PUT, key_of(2), 5, {2, 1, 8, 2}), KVP_DIR_APPLIED);
  EXPECT_EQ(apply(dir.get(), 1, KVP_DIR_PUT, key_of(3), 5, {3, 1, 8, 2}), KVP_DIR_FULL);
  EXPECT_EQ(apply(dir.get(), 2, KVP_DIR_PUT, key_of(2), 5, {9, 1, 8, 2}), KVP_DIR_APPLIED);
  EXPECT_EQ(apply(dir.get(), 1, KVP_DIR_PUT, key_of(3), 6, {3, 1, 8, 2}), KVP_DIR_APPLIED);
  EXPECT_EQ(stats_of(dir.get()).full_rejections, 1u);
}

// Puts pages first..stop-1 of an agent into partition 5.
void put_all(kvp_dir *dir, std::uint32_t agent, std::uint64_t first, std::uint64_t stop) {
  for (std::uint64_t number = first; number < stop; ++number) {
    ASSERT_EQ(apply(dir, agent, KVP_DIR_PUT, key_of(number), 5, {static_cast<std::uint32_t>(number), 1, 8, 2}), KVP_DIR_APPLIED);
  }
}

std::vector<std::uint16_t> dropped_of(const kvp_dir *dir) {
  std::vector<std::uint16_t> agents(64), partitions(64);
  const std::int64_t n = kvp_dir_dropped(dir, agents.size(), agents.data(), partitions.data());
  EXPECT_LE(n, 64);
  agents.resize(n);
  for (std::int64_t i = 0; i < n; ++i) EXPECT_EQ(partitions[i], 5);
  return agents;
}

// Slots of an agent's entries in partition 5, in the order of the dump.
std::vector<std::uint32_t> slots_of(const kvp_dir *dir, std::uint32_t agent) {
  std::vector<std::uint8_t> keys(64 * KVP_KEY_BYTES), tiers(64);
  std::vector<std::uint32_t> slots(64), generations(64), lengths(64);
  const std::int64_t n = kvp_dir_dump(dir, agent, 5, 64, keys.data(), slots.data(), generations.data(), lengths.data(), tiers.data());
  EXPECT_LE(n, 64);
  slots.resize(n);
  return slots;
}

using Slots = std::vector<std::uint32_t>;
using Agents = std::vector<std::uint16_t>;

TEST(DirectoryRoom, WhoHasMostGivesItsOldestUpUntilAllHaveTheSame) {
  auto dir = make_directory(6);
  put_all(dir.get(), 1, 0, 6);
  put_all(dir.get(), 2, 10, 11);
  EXPECT_EQ(dropped_of(dir.get()), Agents{1});
  EXPECT_EQ(slots_of(dir.get(), 1), (Slots{1, 2, 3, 4, 5}));
  put_all(dir.get(), 2, 11, 13);
  EXPECT_EQ(slots_of(dir.get(), 1), (Slots{3, 4, 5}));
  put_all(dir.get(), 2, 13, 20);
  EXPECT_EQ(dropped_of(dir.get()), Agents{2});
  EXPECT_EQ(slots_of(dir.get(), 1), (Slots{3, 4, 5}));
  EXPECT_EQ(slots_of(dir.get(), 2), (Slots{17, 18, 19}));
  EXPECT_EQ(stats_of(dir.get()).dropped_holders, 10u);
  EXPECT_EQ(stats_of(dir.get()).full_rejections, 0u);
}

TEST(DirectoryRoom, AnAgentAloneKeepsItsNewest) {
  auto dir = make_directory(3);
  put_all(dir.get(), 1, 0, 3);
  EXPECT_EQ(apply(dir.get(), 1, KVP_DIR_PUT, key_of(0), 5, {0, 1, 8, 2}), KVP_DIR_UNCHANGED);  // no newer than before
  EXPECT_EQ(apply(dir.get(), 1, KVP_DIR_PUT, key_of(1), 5, {30, 2, 8, 2}), KVP_DIR_APPLIED);  // published again elsewhere
  put_all(dir.get(), 1, 40, 42);
  EXPECT_EQ(slots_of(dir.get(), 1), (Slots{30, 40, 41}));
}

TEST(DirectoryRoom, MoreAgentsThanPlacesAreRefused) {
  auto dir = make_directory(2);
  put_all(dir.get(), 1, 0, 1);
  put_all(dir.get(), 2, 1, 2);
  EXPECT_EQ(apply(dir.get(), 3, KVP_DIR_PUT, key_of(9), 5, {9, 1, 8, 2}), KVP_DIR_FULL);
  EXPECT_EQ(stats_of(dir.get()).full_rejections, 1u);
  EXPECT_EQ(dropped_of(dir.get()), Agents{});
  put_all(dir.get(), 2, 2, 3);
  EXPECT_EQ(slots_of(dir.get(), 1), Slots{0});
}

TEST(DirectoryRoom, ASharedRecordIsHandedOverBeforeAnythingOfItIsDropped) {
  auto dir = make_directory(4);
  put_all(dir.get(), 1, 0, 4);
  put_all(dir.get(), 2, 0, 2);  // holds 0 and 1 too, and bears nothing
  put_all(dir.get(), 3, 10, 11);
  EXPECT_EQ(dropped_of(dir.get()), Agents{1}) << "2 took record 0 over, then 1 had to give record 1 or 2 up";
  EXPECT_EQ(lookup(dir.get(), key_of(0), 5, {1, 1, 1, 1}).size(), 2u);
  EXPECT_EQ(stats_of(dir.get()).records, 4u);
}

TEST(DirectoryRoom, ASharedRecordThatNobodyCanTakeOverIsDroppedWhole) {
  auto dir = make_directory(2);
  put_all(dir.get(), 1, 0, 1);
  put_all(dir.get(), 2, 1, 2);
  put_all(dir.get(), 2, 0, 1);
  put_all(dir.get(), 1, 5, 6);
  const Agents dropped = dropped_of(dir.get());
  EXPECT_EQ(std::set<std::uint16_t>(dropped.begin(), dropped.end()), (std::set<std::uint16_t>{1, 2}));
  EXPECT_EQ(lookup(dir.get(), key_of(0), 5, {1, 1, 1}).size(), 0u);
  EXPECT_EQ(slots_of(dir.get(), 2), Slots{1});
}

TEST(DirectoryRoom, AReplaceMakesRoomAndSaysWhoPaid) {
  auto dir = make_directory(4);
  put_all(dir.get(), 1, 0, 4);
  std::vector<std::uint8_t> keys, tiers(8, 2);
  const std::vector<std::uint32_t> slots = {20, 21, 22, 23, 24, 25, 26, 27}, same(8, 1);
  for (const std::uint32_t slot : slots) {
    const PageKey key = key_of(slot);
    keys.insert(keys.end(), key.begin(), key.end());
  }
  ASSERT_EQ(kvp_dir_replace(dir.get(), 2, 5, 8, keys.data(), slots.data(), same.data(), same.data(), tiers.data()), KVP_OK);
  EXPECT_EQ(dropped_of(dir.get()), (Agents{1, 1, 2, 2, 2, 2, 2, 2}));
  EXPECT_EQ(slots_of(dir.get(), 1), (Slots{2, 3}));
  EXPECT_EQ(slots_of(dir.get(), 2), (Slots{26, 27}));
}

TEST(DirectoryRoom, KeepsEveryListWholeUnderRandomOps) {
  constexpr std::uint32_t kAgents = 6, kRecords = 24;
  std::mt19937 random(11);
  auto dir = make_directory(kRecords);
  const std::vector<std::uint8_t> everybody(kAgents, 1);
  auto below = [&](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
  std::uint64_t n_dropped = 0;
  for (int step = 0; step < 40000; ++step) {
    // The lower an agent's number, the more it publishes; half of the pages are shared.
    const std::uint32_t agent = std::min(below(kAgents), below(kAgents));
    const PageKey key = key_of(below(2) == 0 ? below(20) : 100 * (agent + 1) + below(40));
    if (below(1000) == 0) {
      ASSERT_GE(kvp_dir_sweep(dir.get(), agent, 5, 1), 0);
    } else if (below(5) == 0) {
      apply(dir.get(), agent, KVP_DIR_REMOVE, key, 5, {below(2), 1, 8, 2});
    } else {
      apply(dir.get(), agent, KVP_DIR_PUT, key, 5, {below(2), 1, 8, 2});
      n_dropped += dropped_of(dir.get()).size();
    }
    std::uint64_t n_holders = 0;
    for (std::uint32_t other = 0; other < kAgents; ++other) {
      ASSERT_EQ(slots_of(dir.get(), other).size(), digest_of(dir.get(), other, 5).second);
      n_holders += digest_of(dir.get(), other, 5).second;
    }
    if (step % 100 != 0) continue;
    ASSERT_EQ(stats_of(dir.get()).holders, n_holders);
    ASSERT_LE(stats_of(dir.get()).records, kRecords);
  }
  EXPECT_EQ(stats_of(dir.get()).dropped_holders, n_dropped);
  EXPECT_GT(n_dropped, 1000u);
}

TEST(Directory, LookupCountsLiveHoldersAndSkipsWhatDoesNotFit) {
  auto dir = make_directory();
  for (std::uint32_t agent = 0; agent < 4; ++agent) apply(dir.get(), agent, KVP_DIR_PUT, key_of(1), 5, {agent, 1, 8, 2});
  apply(dir.get(), 0, KVP_DIR_PUT, key_of(2), 5, {7, 1, 8, 2});
  EXPECT_EQ(lookup(dir.get(), key_of(1), 5, {0, 1, 1}).size(), 2u);
  std::vector<std::uint8_t> keys(2 * KVP_KEY_BYTES);
  std::memcpy(keys.data(), key_of(1).data(), KVP_KEY_BYTES);
  std::memcpy(keys.data() + KVP_KEY_BYTES, key_of(2).data(), KVP_KEY_BYTES);
  const std::uint16_t partitions[] = {5, 5};
  const std::uint8_t alive[] = {1, 1, 1, 1};
  std::uint8_t counts[2];
  std::vector<kvp_holder> holders(3);
  EXPECT_EQ(kvp_dir_lookup(dir.get(), 2, keys.data(), partitions, alive, 4, counts, holders.data(), 3), 1);
  EXPECT_EQ(counts[0], 0);
  EXPECT_EQ(counts[1], 1);
  EXPECT_EQ(holders[0].slot, 7u);
}

TEST(Directory, SweepAndDropFreeWhatTheyName) {
  auto dir = make_directory();
  fill(dir.get(), 1, 0, 3000);
  fill(dir.get(), 2, 1000, 4000);
  EXPECT_EQ(kvp_dir_sweep(dir.get(), 1, 0, 2048) + kvp_dir_sweep(dir.get(), 1, 2048, 2048), 3000);
  EXPECT_EQ(stats_of(dir.get()).holders, 3000u);
  EXPECT_EQ(kvp_dir_sweep(dir.get(), 1, 0, KVP_PARTITIONS), 0);
  std::int64_t dropped = 0;
  for (std::uint16_t partition = 0; partition < KVP_PARTITIONS; ++partition) dropped += kvp_dir_drop_partition(dir.get(), partition);
  EXPECT_EQ(dropped, 3000);
  EXPECT_EQ(stats_of(dir.get()).holders, 0u);
}

TEST(Directory, BadArgumentsChangeNothing) {
  kvp_dir *none = nullptr;
  EXPECT_EQ(kvp_dir_create(0, 1, &none), KVP_EINVAL);
  EXPECT_EQ(kvp_dir_create(1, 1, nullptr), KVP_EINVAL);
  auto dir = make_directory();
  const PageKey key = key_of(1);
  const std::uint8_t ops[] = {KVP_DIR_PUT, 3}, tiers[] = {2, 2};
  const std::uint16_t partitions[] = {5, KVP_PARTITIONS};
  const std::uint32_t numbers[] = {1, 1};
  std::uint8_t keys[2 * KVP_KEY_BYTES] = {}, results[2];
  std::uint64_t digest;
  std::uint32_t count;
  EXPECT_EQ(kvp_dir_apply(dir.get(), 0, 2, ops, keys, partitions, numbers, numbers, numbers, tiers, results), KVP_EINVAL);
  EXPECT_EQ(kvp_dir_apply(dir.get(), 65536, 1, ops, keys, partitions, numbers, numbers, numbers, tiers, results), KVP_EINVAL);
  EXPECT_EQ(kvp_dir_apply(dir.get(), 0, 1, ops, nullptr, partitions, numbers, numbers, numbers, tiers, results), KVP_EINVAL);
  EXPECT_EQ(kvp_dir_lookup(dir.get(), 1, key.data(), partitions + 1, nullptr, 0, results, nullptr, 0), KVP_EINVAL);
  EXPECT_EQ(kvp_dir_digests(dir.get(), 0, 1, partitions + 1, &digest, &count), KVP_EINVAL);
  EXPECT_EQ(kvp_dir_records(dir.get(), 1, partitions + 1, &count), KVP_EINVAL);
  EXPECT_EQ(kvp_dir_dropped(dir.get(), 1, nullptr, nullptr), KVP_EINVAL);
  EXPECT_EQ(kvp_dir_dump(dir.get(), 0, KVP_PARTITIONS, 0, nullptr, nullptr, nullptr, nullptr, nullptr), KVP_EINVAL);
  EXPECT_EQ(kvp_dir_replace(dir.get(), 0, KVP_PARTITIONS, 0, nullptr, nullptr, nullptr, nullptr, nullptr), KVP_EINVAL);
  EXPECT_EQ(kvp_dir_drop_partition(dir.get(), KVP_PARTITIONS), KVP_EINVAL);
  EXPECT_EQ(kvp_dir_sweep(dir.get(), 0, 1, KVP_PARTITIONS), KVP_EINVAL);
  EXPECT_EQ(kvp_dir_sweep(dir.get(), 0, 5000, 0xFFFFFFFFu), KVP_EINVAL);
  EXPECT_EQ(stats_of(dir.get()).records, 0u);
}

}  // namespace
