// The directory table's C API: checks arguments, turns columns into calls on partitions, and keeps exceptions inside.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "directory_partition.hpp"
#include "kvpeer/kvpeer.h"

using kvpeer::directory::AgentEntries;
using kvpeer::directory::DroppedAgents;
using kvpeer::directory::Key;
using kvpeer::directory::load_key;
using kvpeer::directory::Location;
using kvpeer::directory::Partition;
using kvpeer::directory::store_key;

struct kvp_dir {
  std::uint32_t partition_records_max;
  bool makes_room;
  std::uint64_t full_rejections;
  std::uint64_t dropped_holders;
  // Of the latest apply or replace: whose entries were dropped, and in which partitions.
  DroppedAgents dropped_agents;
  std::vector<std::uint16_t> dropped_partitions;
  std::array<Partition, KVP_PARTITIONS> partitions;
};

namespace {

constexpr std::uint32_t kAgentsMax = 65536;
// Positions within a partition are 32 bits, with one value and the index's spare places set aside.
constexpr std::uint32_t kPartitionRecordsLimit = 1u << 30;

bool partitions_exist(std::uint64_t n, const std::uint16_t *partitions) {
  return std::all_of(partitions, partitions + n, [](std::uint16_t partition) { return partition < KVP_PARTITIONS; });
}

bool ops_exist(std::uint64_t n, const std::uint8_t *ops) {
  return std::all_of(ops, ops + n, [](std::uint8_t op) { return op == KVP_DIR_PUT || op == KVP_DIR_REMOVE; });
}

template <typename... Pointers>
bool all_given(std::uint64_t n, const Pointers *...pointers) {
  return n == 0 || ((pointers != nullptr) && ...);
}

kvp_dir_result put(kvp_dir *dir, std::uint16_t agent, std::uint16_t partition, const Key &key, const Location &location) {
  DroppedAgents *dropped = dir->makes_room ? &dir->dropped_agents : nullptr;
  const kvp_dir_result result = dir->partitions[partition].put(agent, key, location, dir->partition_records_max, dropped);
  if (result == KVP_DIR_FULL || result == KVP_DIR_HOLDERS_FULL) ++dir->full_rejections;
  dir->dropped_holders += dir->dropped_agents.size() - dir->dropped_partitions.size();
  dir->dropped_partitions.resize(dir->dropped_agents.size(), partition);
  return result;
}

void forget_dropped(kvp_dir *dir) {
  dir->dropped_agents.clear();
  dir->dropped_partitions.clear();
}

}  // namespace

extern "C" {

int kvp_dir_create(uint32_t partition_records_max, int makes_room, kvp_dir **out) {
  if (out == nullptr || partition_records_max == 0 || partition_records_max > kPartitionRecordsLimit) return KVP_EINVAL;
  *out = new (std::nothrow) kvp_dir{partition_records_max, makes_room != 0, 0, 0, {}, {}, {}};
  return *out == nullptr ? KVP_ENOMEM : KVP_OK;
}

void kvp_dir_destroy(kvp_dir *dir) { delete dir; }

int kvp_dir_apply(kvp_dir *dir, uint32_t agent, uint64_t n, const uint8_t *ops, const uint8_t *keys, const uint16_t *partitions,
                  const uint32_t *slots, const uint32_t *generations, const uint32_t *lengths, const uint8_t *tiers,
                  uint8_t *results) {
  if (dir == nullptr || agent >= kAgentsMax) return KVP_EINVAL;
  if (!all_given(n, ops, keys, partitions, slots, generations, lengths, tiers, results)) return KVP_EINVAL;
  if (!ops_exist(n, ops) || !partitions_exist(n, partitions)) return KVP_EINVAL;
  const auto holder = static_cast<std::uint16_t>(agent);
  forget_dropped(dir);
  try {
    for (std::uint64_t i = 0; i < n; ++i) {
      const Key key = load_key(keys + i * KVP_KEY_BYTES);
      results[i] = ops[i] == KVP_DIR_PUT
                       ? put(dir, holder, partitions[i], key, {slots[i], generations[i], lengths[i], tiers[i]})
                       : dir->partitions[partitions[i]].remove(holder, key, slots[i], generations[i]);
    }
  } catch (const std::bad_alloc &) {
    return KVP_ENOMEM;
  }
  return KVP_OK;
}

int64_t kvp_dir_lookup(const kvp_dir *dir, uint64_t n, const uint8_t *keys, const uint16_t *partitions, const uint8_t *alive,
                       uint32_t n_alive, uint8_t *counts, kvp_holder *holders_out, uint64_t holders_max) {
  if (dir == nullptr || !all_given(n, keys, partitions, counts) || !all_given(n_alive, alive)) return KVP_EINVAL;
  if (!all_given(holders_max, holders_out) || !partitions_exist(n, partitions)) return KVP_EINVAL;
  std::uint64_t n_written = 0;
  for (std::uint64_t i = 0; i < n; ++i) {
    const Partition &partition = dir->partitions[partitions[i]];
    const std::size_t count = partition.lookup(load_key(keys + i * KVP_KEY_BYTES), alive, n_alive, holders_out + n_written,
                                               holders_max - n_written);
    counts[i] = static_cast<std::uint8_t>(count);
    n_written += count;
  }
  return static_cast<std::int64_t>(n_written);
}

int kvp_dir_digests(const kvp_dir *dir, uint32_t agent, uint64_t n, const uint16_t *partitions, uint64_t *digests,
                    uint32_t *counts) {
  if (dir == nullptr || agent >= kAgentsMax || !all_given(n, partitions, digests, counts)) return KVP_EINVAL;
  if (!partitions_exist(n, partitions)) return KVP_EINVAL;
  for (std::uint64_t i = 0; i < n; ++i) {
    const AgentEntries entries = dir->partitions[partitions[i]].entries_of(static_cast<std::uint16_t>(agent));
    digests[i] = entries.digest;
    counts[i] = entries.count;
  }
  return KVP_OK;
}

int64_t kvp_dir_dropped(const kvp_dir *dir, uint64_t room, uint16_t *agents, uint16_t *partitions) {
  if (dir == nullptr || !all_given(room, agents, partitions)) return KVP_EINVAL;
  const std::size_t n = dir->dropped_partitions.size();
  const std::size_t n_written = std::min<std::size_t>(n, room);
  std::copy_n(dir->dropped_agents.begin(), n_written, agents);
  std::copy_n(dir->dropped_partitions.begin(), n_written, partitions);
  return static_cast<std::int64_t>(n);
}

int kvp_dir_records(const kvp_dir *dir, uint64_t n, const uint16_t *partitions, uint32_t *records) {
  if (dir == nullptr || !all_given(n, partitions, records) || !partitions_exist(n, partitions)) return KVP_EINVAL;
  for (std::uint64_t i = 0; i < n; ++i) records[i] = static_cast<std::uint32_t>(dir->partitions[partitions[i]].n_records());
  return KVP_OK;
}

int64_t kvp_dir_dump(const kvp_dir *dir, uint32_t agent, uint16_t partition, uint64_t room, uint8_t *keys, uint32_t *slots,
                     uint32_t *generations, uint32_t *lengths, uint8_t *tiers) {
  if (dir == nullptr || agent >= kAgentsMax || partition >= KVP_PARTITIONS) return KVP_EINVAL;
  if (!all_given(room, keys, slots, generations, lengths, tiers)) return KVP_EINVAL;
  std::uint64_t n = 0;
  dir->partitions[partition].each_entry(static_cast<std::uint16_t>(agent), [&](const Key &key, const Location &location) {
    if (n < room) {
      store_key(key, keys + n * KVP_KEY_BYTES);
      slots[n] = location.slot;
      generations[n] = location.generation;
      lengths[n] = location.length;
      tiers[n] = location.tier;
    }
    ++n;
  });
  return static_cast<std::int64_t>(n);
}

int kvp_dir_replace(kvp_dir *dir, uint32_t agent, uint16_t partition, uint64_t n, const uint8_t *keys, const uint32_t *slots,
                    const uint32_t *generations, const uint32_t *lengths, const uint8_t *tiers) {
  if (dir == nullptr || agent >= kAgentsMax || partition >= KVP_PARTITIONS) return KVP_EINVAL;
  if (!all_given(n, keys, slots, generations, lengths, tiers)) return KVP_EINVAL;
  const auto holder = static_cast<std::uint16_t>(agent);
  forget_dropped(dir);
  try {
    dir->partitions[partition].sweep(holder);
    for (std::uint64_t i = 0; i < n; ++i) {
      put(dir, holder, partition, load_key(keys + i * KVP_KEY_BYTES), {slots[i], generations[i], lengths[i], tiers[i]});
    }
  } catch (const std::bad_alloc &) {
    return KVP_ENOMEM;
  }
  return KVP_OK;
}

int64_t kvp_dir_drop_partition(kvp_dir *dir, uint16_t partition) {
  if (dir == nullptr || partition >= KVP_PARTITIONS) return KVP_EINVAL;
  const auto n = static_cast<std::int64_t>(dir->partitions[partition].n_records());
  dir->partitions[partition].clear();
  return n;
}

int64_t kvp_dir_sweep(kvp_dir *dir, uint32_t agent, uint32_t first_partition, uint32_t n_partitions) {
  if (dir == nullptr || agent >= kAgentsMax) return KVP_EINVAL;
  if (first_partition > KVP_PARTITIONS || n_partitions > KVP_PARTITIONS - first_partition) return KVP_EINVAL;
  std::int64_t n = 0;
  for (std::uint32_t partition = first_partition; partition < first_partition + n_partitions; ++partition) {
    n += static_cast<std::int64_t>(dir->partitions[partition].sweep(static_cast<std::uint16_t>(agent)));
  }
  return n;
}

void kvp_dir_get_stats(const kvp_dir *dir, kvp_dir_stats *out) {
  const std::size_t dropped_bytes = 2 * sizeof(std::uint16_t) * dir->dropped_agents.capacity();
  *out = {0, 0, sizeof *dir + dropped_bytes, dir->full_rejections, dir->dropped_holders};
  for (const Partition &partition : dir->partitions) {
    out->records += partition.n_records();
    out->holders += partition.n_holders();
    out->bytes += partition.allocated_bytes();
  }
}

}  // extern "C"
