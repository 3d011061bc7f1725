#include "server_admission.hpp"

#include <algorithm>

namespace kvpeer {

namespace {

// Compares without a branch on the bytes, so that the time taken tells a guesser nothing.
bool equal_in_constant_time(const Capability &a, const Capability &b) {
  uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = static_cast<uint8_t>(difference | (a[i] ^ b[i]));
  }
  return difference == 0;
}

}  // namespace

int AdmissionTable::admit(const Capability &capability, const AgentId &reader_id, uint64_t expires_ns, uint64_t now_ns) {
  if (entries_.size() >= kCapabilitiesMax) {
    std::erase_if(entries_, [now_ns](const Entry &entry) { return entry.expires_ns <= now_ns; });
  }
  const auto n_of_reader = std::count_if(entries_.begin(), entries_.end(), [&](const Entry &entry) {
    return entry.reader_id == reader_id && entry.expires_ns > now_ns;
  });
  if (entries_.size() >= kCapabilitiesMax || static_cast<size_t>(n_of_reader) >= kReaderCapabilitiesMax) {
    return KVP_EFULL;
  }
  entries_.push_back({capability, reader_id, expires_ns});
  return KVP_OK;
}

bool AdmissionTable::redeem(const Capability &capability, const AgentId &reader_id, uint64_t now_ns) {
  size_t found = entries_.size();
  for (size_t i = 0; i < entries_.size(); ++i) {
    found = equal_in_constant_time(entries_[i].capability, capability) ? i : found;
  }
  if (found == entries_.size()) {
    return false;
  }
  const Entry entry = entries_[found];
  std::swap(entries_[found], entries_.back());
  entries_.pop_back();
  return entry.reader_id == reader_id && entry.expires_ns > now_ns;
}

void AdmissionTable::forget(const AgentId &reader_id) {
  std::erase_if(entries_, [&reader_id](const Entry &entry) { return entry.reader_id == reader_id; });
}

}  // namespace kvpeer
