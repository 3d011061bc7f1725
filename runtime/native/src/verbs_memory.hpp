// Memory that a device may touch: the extents of the pool, for local writes and remote reads; other memory, for local writes alone.
//
// Extents are registered when somebody first asks for them: registering pins the memory, which is there by then. The headers of an
// extent are registered anew when it is cut into more slots; who has the old key then gets an access error. Thread-safe.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "kvpeer/kvpeer.h"
#include "pool.hpp"
#include "verbs_library.hpp"

namespace kvpeer::verbs {

class Memory {
 public:
  Memory(const Library &library, Pd *pd, const kvp_pool &pool);

  // What readers may be told of an extent; slot_bytes is 0 where there is nothing. KVP_OK, or why it could not be registered.
  int describe(uint32_t extent, kvp_verbs_extent &out);
  // The key for writing [address, address + n_bytes). KVP_EINVAL when it is not within one extent or one piece of added memory.
  int local_key(const void *address, uint64_t n_bytes, uint32_t &key);
  int add(void *address, uint64_t n_bytes);
  int remove(void *address);
  uint64_t registered_bytes() const;

 private:
  struct Extent {
    OwnedRegion payload, headers;
  };

  int register_extent(uint32_t extent, uint32_t n_slots);
  OwnedRegion register_bytes(void *address, uint64_t n_bytes, int access) const;

  const Library &library_;
  Pd *const pd_;
  const kvp_pool &pool_;
  mutable std::mutex mutex_;  // protects everything below
  std::vector<Extent> extents_;
  std::map<std::byte *, OwnedRegion> added_;  // by first byte
};

}  // namespace kvpeer::verbs
