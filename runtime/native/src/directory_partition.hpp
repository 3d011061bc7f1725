// One partition of the directory table: records of pages and who holds them.
//
// Records lie densely in an array with their first holder inside; further holders form a list in a second array. An open-addressing
// index of 32-bit positions finds a record by its key. Nothing leaves a tombstone: removal from the index shifts the entries behind
// it back, removal from the arrays moves the last element into the hole. Arrays grow by an eighth and shrink again
// with what is in them.
//
// Invariants: every record has at least one holder; an agent holds a record at most once; `digests` has an entry exactly for the
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

struct AgentDigest {
  std::uint64_t digest;
  std::uint32_t count;
  std::uint16_t agent;
};

class Partition {
 public:
  // PUT: stores or replaces the agent's holder of the key.
  kvp_dir_result put(std::uint16_t agent, const Key &key, const Location &location, std::uint32_t records_max);
  // REMOVE: takes the agent's holder away if slot and generation are equal.
  kvp_dir_result remove(std::uint16_t agent, const Key &key, std::uint32_t slot, std::uint32_t generation);
  // Writes the live holders of the key and returns how many there are; 0 when there are more than room.
  std::size_t lookup(const Key &key, const std::uint8_t *alive, std::uint32_t n_alive, kvp_holder *out, std::size_t room) const;
  // Removes everything that the agent holds and returns how much that was.
  std::size_t sweep(std::uint16_t agent);
  void clear();

  AgentDigest digest_of(std::uint16_t agent) const;

  // Calls visit(key, location) for each entry of the agent.
  template <typename Visit>
  void each_entry(std::uint16_t agent, Visit &&visit) const {
    if (digest_of(agent).count == 0) return;
    for (const Record &record : records_) {
      for (const Holder *holder = &record.first; holder != nullptr; holder = next_of(*holder)) {
        if (holder->agent == agent) visit(record.key, holder->location());
      }
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
    Holder first;
  };
  struct FurtherHolder {
    Holder holder;
    std::uint32_t record;  // whose list it is in: lets the last element be moved into a hole
  };
  static_assert(sizeof(Holder) == 20 && sizeof(Record) == 40 && sizeof(FurtherHolder) == 24);

  const Holder *next_of(const Holder &holder) const {
    return holder.next == kNone ? nullptr : &further_[holder.next].holder;
  }
  Holder *next_of(const Holder &holder) { return holder.next == kNone ? nullptr : &further_[holder.next].holder; }

  std::size_t home(const Key &key) const;
  std::size_t find_index(const Key &key) const;  // position in index_ of the key, or of the empty place where it belongs
  std::uint32_t find_record(const Key &key) const;
  void rebuild_index(std::size_t n_places);
  void erase_index(std::size_t place);

  void add_record(const Key &key, const Holder &holder);
  void erase_record(std::uint32_t record);
  // Removes the holder of this agent from the record, and the record when it was the last one.
  void erase_holder(std::uint32_t record, std::uint16_t agent);
  void erase_further(std::uint32_t further);

  std::vector<AgentDigest>::iterator digest_position(std::uint16_t agent);
  void reserve_digest(std::uint16_t agent);
  void add_to_digest(std::uint16_t agent, std::uint64_t entry);
  void take_from_digest(std::uint16_t agent, std::uint64_t entry);
  void shrink();

  std::vector<Record> records_;
  std::vector<FurtherHolder> further_;
  std::vector<std::uint32_t> index_;  // position in records_, or kNone; at most three quarters are used
  std::vector<AgentDigest> digests_;  // sorted by agent
};

}  // namespace kvpeer::directory
