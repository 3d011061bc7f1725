// One end of a reliable queue pair, from its creation to its end. Not thread-safe.
#pragma once

#include "kvpeer/kvpeer.h"
#include "verbs_library.hpp"

namespace kvpeer::verbs {

// What an end needs to know of the port that it goes through.
struct Port {
  static constexpr uint8_t kNumber = 1;  // of a device with several ports the first: the others are devices of their own

  Gid gid{};
  uint8_t gid_index = 0;
  uint16_t lid = 0;
  uint8_t mtu = kMtu1024;
  uint8_t link_layer = 0;
};

class Endpoint {
 public:
  Endpoint(const Library &library, const Port &port) : library_(library), port_(port) {}
  ~Endpoint() { destroy(); }
  Endpoint(const Endpoint &) = delete;
  Endpoint &operator=(const Endpoint &) = delete;

  // Makes the queue pair and brings it to where it waits for its peer. max_send_wr: at most so many requests are outstanding.
  // is_readable: the peer may READ through it. KVP_OK or a negative code.
  int create(Pd *pd, CompletionQueue *queue, uint32_t max_send_wr, bool is_readable);
  // This end, for the other one. reads_max: what this device can do.
  kvp_verbs_endpoint describe(uint8_t reads_max) const;
  // From now on the peer's READs are served, reads_max at a time.
  int serve(const kvp_verbs_endpoint &peer, uint8_t reads_max);
  // From now on requests may be posted, of which reads_max are under way at a time. After `serve`.
  int send(uint8_t reads_max);
  // Moves it into the error state: nothing new is begun, and all that was posted completes.
  void stop();
  // False where the device refuses. Once it is true, no request that was posted touches memory any more.
  bool destroy();

  QueuePair *get() const { return pair_; }

 private:
  const Library &library_;
  const Port &port_;
  QueuePair *pair_ = nullptr;
  uint32_t psn_ = 0;
};

// True when a description from the other side can be used at all.
bool is_valid(const kvp_verbs_endpoint &endpoint);

}  // namespace kvpeer::verbs
