#include "directory_partition.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace kvpeer::directory {

static_assert(std::endian::native == std::endian::little, "keys and digests are defined on little-endian integers");

namespace {

// An eighth of slack keeps a record within its 96 bytes at every fill level; four more keep tiny partitions from growing by ones.
constexpr std::size_t kGrowthDivisor = 8;
constexpr std::size_t kGrowthMin = 4;
// What the allocator keeps beside each block (glibc: a 8-byte header, sizes rounded up to 16).
constexpr std::size_t kAllocationOverheadBytes = 16;

// The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
constexpr std::uint64_t scramble(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

constexpr std::size_t grown(std::size_t size) { return size + size / kGrowthDivisor + kGrowthMin; }

constexpr std::size_t index_places(std::size_t n_records) { return n_records + n_records / 3 + 1; }

// More than a quarter beyond what growth would have given: worth moving to a smaller place.
constexpr bool is_slack(std::size_t capacity, std::size_t size) { return 4 * capacity > 5 * grown(size); }

template <typename T>
void reserve_one_more(std::vector<T> &array) {
  if (array.size() == array.capacity()) array.reserve(grown(array.size()));
}

template <typename T>
void shrink_array(std::vector<T> &array) {
  if (!is_slack(array.capacity(), array.size())) return;
  std::vector<T> smaller;
  smaller.reserve(grown(array.size()));
  smaller.assign(array.begin(), array.end());
  array.swap(smaller);
}

template <typename T>
std::size_t array_bytes(const std::vector<T> &array) {
  return array.capacity() == 0 ? 0 : array.capacity() * sizeof(T) + kAllocationOverheadBytes;
}

}  // namespace

Key load_key(const std::uint8_t *bytes) {
  Key key;
  std::memcpy(&key, bytes, sizeof key);
  return key;
}

void store_key(const Key &key, std::uint8_t *bytes) { std::memcpy(bytes, &key, sizeof key); }

std::uint64_t entry_digest(const Key &key, const Location &location) {
  std::uint64_t mixed = scramble(key.low ^ 0x9e3779b97f4a7c15u);
  mixed = scramble(mixed ^ key.high);
  mixed = scramble(mixed ^ (location.slot | std::uint64_t{location.generation} << 32));
  return scramble(mixed ^ (location.length | std::uint64_t{location.tier} << 32));
}

// ---- ops ---------------------------------------------------------------------------------------------------------------

kvp_dir_result Partition::put(std::uint16_t agent, const Key &key, const Location &location, std::uint32_t records_max,
                              DroppedAgents *dropped) {
  Holder fresh{location.slot, location.generation, location.length, agent, location.tier, kNone};
  const std::uint32_t position = find_record(key);
  if (position == kNone) {
    reserve_agent(agent);
    if (records_.size() < records_max) {
      reserve_record();
    } else if (dropped == nullptr || !make_room(agent, *dropped)) {
      return KVP_DIR_FULL;
    }
    add_entry(agent, entry_digest(key, location));
    add_record(key, fresh);
    return KVP_DIR_APPLIED;
  }
  std::size_t n_holders = 0;
  for (Holder *holder = &records_[position].first; holder != nullptr; holder = next_of(*holder)) {
    ++n_holders;
    if (holder->agent != agent) continue;
    if (holder->location() == location) return KVP_DIR_UNCHANGED;
    agent_position(agent)->digest ^= entry_digest(key, holder->location()) ^ entry_digest(key, location);
    fresh.next = holder->next;
    *holder = fresh;
    if (holder == &records_[position].first) {
      release(position);
      bear(position);
    }
    return KVP_DIR_APPLIED;
  }
  if (n_holders >= KVP_HOLDERS_MAX) return KVP_DIR_HOLDERS_FULL;
  reserve_agent(agent);
  reserve_one_more(further_);
  Holder &first = records_[position].first;
  fresh.next = first.next;
  first.next = static_cast<std::uint32_t>(further_.size());
  further_.push_back({fresh, position});
  add_entry(agent, entry_digest(key, location));
  return KVP_DIR_APPLIED;
}

kvp_dir_result Partition::remove(std::uint16_t agent, const Key &key, std::uint32_t slot, std::uint32_t generation) {
  const std::uint32_t position = find_record(key);
  if (position == kNone) return KVP_DIR_UNCHANGED;
  for (const Holder *holder = &records_[position].first; holder != nullptr; holder = next_of(*holder)) {
    if (holder->agent != agent) continue;
    if (holder->slot != slot || holder->generation != generation) return KVP_DIR_UNCHANGED;
    erase_holder(position, agent);
    shrink();
    return KVP_DIR_APPLIED;
  }
  return KVP_DIR_UNCHANGED;
}

std::size_t Partition::lookup(const Key &key, const std::uint8_t *alive, std::uint32_t n_alive, kvp_holder *out,
                              std::size_t room) const {
  const std::uint32_t position = find_record(key);
  if (position == kNone) return 0;
  std::size_t n = 0;
  for (const Holder *holder = &records_[position].first; holder != nullptr; holder = next_of(*holder)) {
    if (holder->agent >= n_alive || alive[holder->agent] == 0) continue;
    if (n == room) return 0;
    out[n++] = {holder->agent, holder->slot, holder->generation, holder->length, holder->tier};
  }
  return n;
}

std::size_t Partition::sweep(std::uint16_t agent) {
  const std::size_t n = entries_of(agent).count;
  while (entries_of(agent).places > 0) erase_holder(entries_of(agent).oldest, agent);
  // From the end, so that the element which fills a hole has been looked at.
  for (std::size_t left = further_.size(); left-- > 0 && entries_of(agent).count > 0;) {
    if (further_[left].holder.agent == agent) erase_holder(further_[left].record, agent);
  }
  if (n > 0) shrink();
  return n;
}

void Partition::clear() { *this = Partition(); }

std::size_t Partition::allocated_bytes() const {
  return array_bytes(records_) + array_bytes(further_) + array_bytes(index_) + array_bytes(agents_);
}

// ---- records and holders -----------------------------------------------------------------------------------------------

void Partition::reserve_record() {
  reserve_one_more(records_);
  if (index_places(records_.size() + 1) > index_.size()) rebuild_index(index_places(records_.capacity()));
}

// There is room for it, and its holder is counted already.
void Partition::add_record(const Key &key, const Holder &holder) {
  const auto record = static_cast<std::uint32_t>(records_.size());
  index_[find_index(key)] = record;
  records_.push_back({key, holder, kNone, kNone});
  bear(record);
}

void Partition::erase_holder(std::uint32_t record, std::uint16_t agent) {
  Record &owner = records_[record];
  if (owner.first.agent == agent && owner.first.next != kNone) pass_on(record, *lightest_further(record));
  if (owner.first.agent == agent) {
    release(record);
    take_entry(agent, entry_digest(owner.key, owner.first.location()));
    erase_record(record);
    return;
  }
  Holder *before = &owner.first;
  while (further_[before->next].holder.agent != agent) before = next_of(*before);
  const std::uint32_t erased = before->next;
  take_entry(agent, entry_digest(owner.key, further_[erased].holder.location()));
  before->next = further_[erased].holder.next;
  erase_further(erased);
}

// The element is in no list any more: the last one moves into its place and the link that led to the last one follows.
void Partition::erase_further(std::uint32_t further) {
  const auto last = static_cast<std::uint32_t>(further_.size() - 1);
  if (further != last) {
    Holder *link = &records_[further_[last].record].first;
    while (link->next != last) link = next_of(*link);
    link->next = further;
    further_[further] = further_[last];
  }
  further_.pop_back();
}

// Nobody bears the record any more.
void Partition::erase_record(std::uint32_t record) {
  erase_index(find_index(records_[record].key));
  const auto last = static_cast<std::uint32_t>(records_.size() - 1);
  if (record != last) {
    index_[find_index(records_[last].key)] = record;
    relink(last, record);
    records_[record] = records_[last];
    for (Holder *holder = &records_[record].first; holder->next != kNone; holder = next_of(*holder)) {
      further_[holder->next].record = record;
    }
  }
  records_.pop_back();
}

// ---- index -------------------------------------------------------------------------------------------------------------

std::size_t Partition::home(const Key &key) const {
  // Keys are hashes already; not the low half, because an anchor's begins with the number of its partition. Scaled by a multiplication
  // instead of cut by a mask, so that the index need not be a power of two in size.
  return static_cast<std::size_t>((key.high >> 32) * index_.size() >> 32);
}

std::size_t Partition::find_index(const Key &key) const {
  std::size_t place = home(key);
  while (index_[place] != kNone && !(records_[index_[place]].key == key)) place = place + 1 == index_.size() ? 0 : place + 1;
  return place;
}

std::uint32_t Partition::find_record(const Key &key) const { return index_.empty() ? kNone : index_[find_index(key)]; }

void Partition::rebuild_index(std::size_t n_places) {
  std::vector<std::uint32_t> fresh(n_places, kNone);
  index_.swap(fresh);
  for (std::size_t position = 0; position < records_.size(); ++position) {
    index_[find_index(records_[position].key)] = static_cast<std::uint32_t>(position);
  }
}

// Empties a place and moves back each follower that a search would no longer reach (Knuth, TAOCP 3, 6.4, algorithm R).
void Partition::erase_index(std::size_t place) {
  const std::size_t n_places = index_.size();
  std::size_t hole = place;
  for (std::size_t next = (place + 1) % n_places; index_[next] != kNone; next = (next + 1) % n_places) {
    const std::size_t wanted = home(records_[index_[next]].key);
    const std::size_t from_wanted_to_next = (next + n_places - wanted) % n_places;
    const std::size_t from_hole_to_next = (next + n_places - hole) % n_places;
    if (from_wanted_to_next >= from_hole_to_next) {
      index_[hole] = index_[next];
      hole = next;
    }
  }
  index_[hole] = kNone;
}

// ---- agents ------------------------------------------------------------------------------------------------------------

AgentEntries Partition::entries_of(std::uint16_t agent) const {
  const auto position = std::lower_bound(agents_.begin(), agents_.end(), agent,
                                         [](const AgentEntries &entries, std::uint16_t wanted) { return entries.agent < wanted; });
  return position != agents_.end() && position->agent == agent ? *position : AgentEntries{0, 0, 0, kNone, agent};
}

std::vector<AgentEntries>::iterator Partition::agent_position(std::uint16_t agent) {
  return std::lower_bound(agents_.begin(), agents_.end(), agent,
                          [](const AgentEntries &entries, std::uint16_t wanted) { return entries.agent < wanted; });
}

void Partition::reserve_agent(std::uint16_t agent) {
  if (entries_of(agent).count == 0) reserve_one_more(agents_);
}

void Partition::add_entry(std::uint16_t agent, std::uint64_t digest) {
  auto position = agent_position(agent);
  if (position == agents_.end() || position->agent != agent) position = agents_.insert(position, {0, 0, 0, kNone, agent});
  position->digest ^= digest;
  ++position->count;
}

void Partition::take_entry(std::uint16_t agent, std::uint64_t digest) {
  const auto position = agent_position(agent);
  position->digest ^= digest;
  if (--position->count == 0) agents_.erase(position);
}

// Gives back what is no longer needed. Running out of memory here is no failure: the arrays simply stay as they are.
void Partition::shrink() {
  if (records_.empty()) {
    clear();
    return;
  }
  try {
    shrink_array(records_);
    shrink_array(further_);
    shrink_array(agents_);
    if (index_.size() > index_places(records_.capacity())) rebuild_index(index_places(records_.capacity()));
  } catch (const std::bad_alloc &) {
    return;
  }
}

}  // namespace kvpeer::directory
