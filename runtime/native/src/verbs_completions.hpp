// The completions of one queue pair's requests: counted, waited for, drained.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "kvpeer/kvpeer.h"
#include "verbs_library.hpp"

namespace kvpeer::verbs {

// Requests have ids that count from 1 without a gap; they complete in order, but only signalled and failed ones say so. Not
// thread-safe, but for `shutdown`.
class Completions {
 public:
  Completions(const Library &library, Context *context) : library_(library), context_(context) {}
  ~Completions();
  Completions(const Completions &) = delete;
  Completions &operator=(const Completions &) = delete;

  // requests_max: outstanding at a time. In the error state every request completes, signalled or not: there is room for all.
  int create(uint32_t requests_max);
  CompletionQueue *queue() const { return queue_.get(); }

  // The id of the next request that is posted.
  uint64_t next_id() const { return next_id_; }
  // Requests with ids below this one are posted.
  void posted(uint64_t next_id) { next_id_ = next_id; }

  // What `poll` says while requests are under way and nothing is wrong.
  static constexpr int kPending = 1;
  // KVP_OK once all that was posted is complete and right, kPending before that. KVP_ECLOSED after a shutdown and when the peer or the
  // way to it failed, KVP_ESYS for what else went wrong. Never blocks.
  int poll();
  // Sleeps until something completes at one of them (KVP_RAILS_MAX at most), one is shut down, or the time has come; it may return
  // for less.
  static void sleep(std::span<Completions *const> all, uint64_t until_ns);
  // Waits until all that was posted is complete, however; for a queue pair in the error state. Gives up after a while.
  void drain();
  // The first bad status of a completion.
  int fault() const { return fault_; }
  // Makes `poll` say KVP_ECLOSED from now on, and wakes who sleeps. Thread-safe.
  void shutdown();

 private:
  bool is_all_done() const { return done_id_ + 1 == next_id_; }
  void collect();
  bool arm();
  void take_event();

  const Library &library_;
  Context *const context_;
  OwnedChannel channel_;
  OwnedQueue queue_;
  uint64_t next_id_ = 1;
  uint64_t done_id_ = 0;  // of the newest request that is complete
  int fault_ = kSuccess;
  int error_ = 0;  // errno of the first call of the device that failed
  int bell_ = -1;  // rung by shutdown
  std::atomic<bool> is_shut_down_{false};
};

}  // namespace kvpeer::verbs
