// One partition of the directory table: records of pages and who holds them.
//
// Records lie densely in an array with their first holder inside; further holders form a list in a second array. An open-addressing
// index of 32-bit positions finds a record by its key. Nothing leaves a tombstone: removal from the index shifts the entries behind
// it back, removal from the arrays moves the last element into the hole. Arrays grow by an eighth and shrink again
// with what is in them.
//
// A record takes one place, and one of its holders, the first in its list, bears it. The records that an agent bears form a circle
// from the one that it has borne for longest to the newest. When there is no place left, this is how room is shared
// (directory_room.cpp): who bears most gives its oldest record up.
//
// Invariants: every record has at least one holder; an agent holds a record at most once; `agents_` has an element exactly for the
// agents that hold something here. Not thread-safe. Throws std::bad_alloc before anything is changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvpeer/kvpeer.h"

namespace kvpeer::directory {

struct Key {
  std::uint64_t low;
  std::uint64_t high;
  bool operator==(const Key &) const = default;
};

// Reads the 16 bytes of a key as two little-endian integers.
Key load_key(const std::uint8_t *bytes);
void store_key(const Key &key, std::uint8_t *bytes);

struct Location {
  std::uint32_t slot;
  std::uint32_t generation;
  std::uint32_t length;
  std::uint8_t tier;
  bool operator==(const Location &) const = default;
};

// The 64-bit mix of one entry. Producer and owner compare XORs of it over the wire, so it is part of the protocol (docs/formats.md).
std::uint64_t entry_digest(const Key &key, const Location &location);

// What one agent holds in a partition.
struct AgentEntries {
  std::uint64_t digest;
  std::uint32_t count;
  std::uint32_t places;  // records that it bears
  std::uint32_t oldest;  // of these, position of the one it has borne for longest; valid if there is one
  std::uint16_t agent;
};

// The agents that lost an entry to make room, once for each entry.
using DroppedAgents = std::vector<std::uint16_t>;

class Partition {
 public:
  // PUT: stores or replaces the agent's holder of the key. A full partition makes room if `dropped` is given, and appends to it.
  kvp_dir_result put(std::uint16_t agent, const Key &key, const Location &location, std::uint32_t records_max,
                     DroppedAgents *dropped);
  // REMOVE: takes the agent's holder away if slot and generation are equal.
  kvp_dir_result remove(std::uint16_t agent, const Key &key, std::uint32_t slot, std::uint32_t generation);
  // Writes the live holders of the key and returns how many there are; 0 when there are more than room.
  std::size_t lookup(const Key &key, const std::uint8_t *alive, std::uint32_t n_alive, kvp_holder *out, std::size_t room) const;
  // Removes everything that the agent holds and returns how much that was.
  std::size_t sweep(std::uint16_t agent);
  void clear();

  AgentEntries entries_of(std::uint16_t agent) const;

  // Calls visit(key, location) for each entry of the agent: first of the records that it bears, from the oldest on.
  template <typename Visit>
  void each_entry(std::uint16_t agent, Visit &&visit) const {
    const AgentEntries entries = entries_of(agent);
    std::uint32_t position = entries.oldest;
    for (std::uint32_t n = 0; n < entries.places; ++n, position = records_[position].newer) {
      visit(records_[position].key, records_[position].first.location());
    }
    if (entries.count == entries.places) return;
    for (const FurtherHolder &further : further_) {
      if (further.holder.agent == agent) visit(records_[further.record].key, further.holder.location());
    }
  }

  std::size_t n_records() const { return records_.size(); }
  std::size_t n_holders() const { return records_.size() + further_.size(); }
  // All memory behind this partition beside the object itself.
  std::size_t allocated_bytes() const;

 private:
  static constexpr std::uint32_t kNone = 0xFFFFFFFFu;

  struct Holder {
    std::uint32_t slot;
    std::uint32_t generation;
    std::uint32_t length;
    std::uint16_t agent;
    std::uint8_t tier;
    std::uint32_t next;  // position of the next holder in further_, or kNone

    Location location() const { return {slot, generation, length, tier}; }
  };
  struct Record {
    Key key;
    Holder first;         // bears the record
    std::uint32_t older;  // neighbours in the circle of records that the same agent bears
    std::uint32_t newer;
  };
  struct FurtherHolder {
    Holder holder;
    std::uint32_t record;  // whose list it is in: lets the last element be moved into a hole
  };
  static_assert(sizeof(Holder) == 20 && sizeof(Record) == 48 && sizeof(FurtherHolder) == 24);

  const Holder *next_of(const Holder &holder) const {
    return holder.next == kNone ? nullptr : &further_[holder.next].holder;
  }
  Holder *next_of(const Holder &holder) { return holder.next == kNone ? nullptr : &further_[holder.next].holder; }

  std::size_t home(const Key &key) const;
  std::size_t find_index(const Key &key) const;  // position in index_ of the key, or of the empty place where it belongs
  std::uint32_t find_record(const Key &key) const;
  void rebuild_index(std::size_t n_places);
  void erase_index(std::size_t place);

  void reserve_record();
  void add_record(const Key &key, const Holder &holder);
  void erase_record(std::uint32_t record);
  // Removes the holder of this agent from the record, and the record when it was the last one.
  void erase_holder(std::uint32_t record, std::uint16_t agent);
  void erase_further(std::uint32_t further);

  std::vector<AgentEntries>::iterator agent_position(std::uint16_t agent);
  void reserve_agent(std::uint16_t agent);
  void add_entry(std::uint16_t agent, std::uint64_t digest);
  void take_entry(std::uint16_t agent, std::uint64_t digest);
  void shrink();

  // directory_room.cpp
  void bear(std::uint32_t record);     // the record's first holder bears it from now on, as its newest
  void release(std::uint32_t record);  // and does so no longer
  void relink(std::uint32_t from, std::uint32_t to);
  void pass_on(std::uint32_t record, Holder &taker);
  Holder *lightest_further(std::uint32_t record);
  bool hand_over(std::uint32_t record);
  std::uint32_t record_to_give(std::uint16_t applicant);
  void drop_record(std::uint32_t record, DroppedAgents &dropped);
  bool make_room(std::uint16_t applicant, DroppedAgents &dropped);

  std::vector<Record> records_;
  std::vector<FurtherHolder> further_;
  std::vector<std::uint32_t> index_;  // position in records_, or kNone; at most three quarters are used
  std::vector<AgentEntries> agents_;  // sorted by agent
};

}  // namespace kvpeer::directory
