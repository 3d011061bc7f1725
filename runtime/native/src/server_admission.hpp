// One-time capabilities that admit data connections. Not thread-safe: the server's lock protects it, so that redeeming a
// capability and registering the connection are one step for whoever revokes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvpeer/kvpeer.h"

namespace kvpeer {

using AgentId = std::array<uint8_t, KVP_AGENT_ID_BYTES>;
using Capability = std::array<uint8_t, KVP_CAPABILITY_BYTES>;

// Unused capabilities kept at a time: 1,000 peers that each ask for a few connections. A reader that never comes cannot fill the
// memory: what has expired is dropped before anything is refused.
inline constexpr size_t kCapabilitiesMax = 4096;
// Of these, for one reader: four times what it gets at once. One reader cannot keep the others out.
inline constexpr size_t kReaderCapabilitiesMax = 64;

class AdmissionTable {
 public:
  // KVP_EFULL when kCapabilitiesMax unexpired ones wait, or kReaderCapabilitiesMax of this reader.
  int admit(const Capability &capability, const AgentId &reader_id, uint64_t expires_ns, uint64_t now_ns);
  // True when the capability was given to this reader and has not expired. Presenting a capability uses it up, whatever comes
  // out. Takes the same time for every capability that is not there.
  bool redeem(const Capability &capability, const AgentId &reader_id, uint64_t now_ns);
  void forget(const AgentId &reader_id);

 private:
  struct Entry {
    Capability capability;
    AgentId reader_id;
    uint64_t expires_ns;
  };

  std::vector<Entry> entries_;
};

}  // namespace kvpeer
