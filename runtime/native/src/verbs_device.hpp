// kvp_verbs: one opened device, the memory that it may touch, and the queue pairs by which readers read from it.
//
// Locks: mutex_ (connections that are served) and that of Memory; never both, and never while a device is asked to transfer.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <string>

#include "kvpeer/kvpeer.h"
#include "pool.hpp"
#include "server_admission.hpp"
#include "verbs_library.hpp"
#include "verbs_memory.hpp"
#include "verbs_queue_pair.hpp"

struct kvp_verbs {
 public:
  using Endpoint = kvpeer::verbs::Endpoint;

  // KVP_OK and a device, or KVP_ENODEVICE and what is missing.
  static int open(const kvp_pool &pool, const kvp_verbs_settings &settings, std::string &reason, std::unique_ptr<kvp_verbs> &out);

  // Out of the READs that a peer offers to start or to serve, so many.
  uint8_t served_reads(uint8_t offered) const;
  uint8_t started_reads(uint8_t offered) const;

  int accept(const kvpeer::AgentId &reader_id, const kvp_verbs_endpoint &reader, kvp_verbs_endpoint &producer_out);
  void revoke(const kvpeer::AgentId &reader_id);
  void stats(kvp_verbs_stats &out) const;

  const kvpeer::verbs::Library &library;
  const std::string name;
  const uint32_t n_extents;

  const kvpeer::verbs::Port &port() const { return port_; }
  const kvpeer::verbs::DeviceAttributes &attributes() const { return attributes_; }
  uint64_t message_bytes_max() const { return message_bytes_max_; }
  kvpeer::verbs::Context *context() const { return context_.get(); }
  kvpeer::verbs::Pd *pd() const { return pd_.get(); }
  kvpeer::verbs::Memory &memory() { return *memory_; }

 private:
  struct Served {
    kvpeer::AgentId reader_id;
    Endpoint endpoint;
    Served(const kvpeer::AgentId &id, const kvpeer::verbs::Library &library, const kvpeer::verbs::Port &port)
        : reader_id(id), endpoint(library, port) {}
  };

  kvp_verbs(const kvpeer::verbs::Library &library, std::string name, const kvp_pool &pool, const kvp_verbs_settings &settings);

  bool set_up(kvpeer::verbs::Device *device, const kvp_pool &pool, std::string &reason);
  bool choose_gid(const kvpeer::verbs::PortAttributes &port, std::string &reason);
  bool make_room(const kvpeer::AgentId &reader_id, std::list<Served> &replaced);

  kvp_verbs_settings settings_;
  kvpeer::verbs::Port port_;
  kvpeer::verbs::DeviceAttributes attributes_{};
  uint64_t message_bytes_max_ = 0;
  // In the order of need: what is last here goes first.
  kvpeer::verbs::OwnedContext context_;
  kvpeer::verbs::OwnedPd pd_;
  kvpeer::verbs::OwnedQueue served_queue_;  // of all queue pairs that are only read from: nothing completes there
  std::unique_ptr<kvpeer::verbs::Memory> memory_;

  mutable std::mutex mutex_;  // protects everything below
  std::list<Served> served_;  // oldest first
  uint64_t n_accepted_ = 0, n_replaced_ = 0;
};
