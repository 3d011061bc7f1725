// libibverbs, loaded at run time, and owners of what it makes.
#pragma once

#include <memory>
#include <string>

#include "verbs_abi.hpp"

namespace kvpeer::verbs {

// The functions of the loaded library. What the library keeps inline (post_send, poll_cq, req_notify_cq) is called through the context.
struct Library {
  Device **(*get_device_list)(int *);
  void (*free_device_list)(Device **);
  const char *(*get_device_name)(Device *);
  Context *(*open_device)(Device *);
  int (*close_device)(Context *);
  int (*query_device)(Context *, DeviceAttributes *);
  int (*query_port)(Context *, uint8_t port, PortAttributes *);
  int (*query_gid)(Context *, uint8_t port, int index, Gid *);
  Pd *(*alloc_pd)(Context *);
  int (*dealloc_pd)(Pd *);
  MemoryRegion *(*reg_mr)(Pd *, void *, size_t, int access);
  int (*dereg_mr)(MemoryRegion *);
  CompletionChannel *(*create_comp_channel)(Context *);
  int (*destroy_comp_channel)(CompletionChannel *);
  CompletionQueue *(*create_cq)(Context *, int n, void *cq_context, CompletionChannel *, int vector);
  int (*destroy_cq)(CompletionQueue *);
  int (*get_cq_event)(CompletionChannel *, CompletionQueue **, void **cq_context);
  void (*ack_cq_events)(CompletionQueue *, unsigned);
  QueuePair *(*create_qp)(Pd *, QpInit *);
  int (*modify_qp)(QueuePair *, QpAttributes *, int mask);
  int (*destroy_qp)(QueuePair *);
  const char *(*wc_status_str)(int);

  // The library, loaded once and never unloaded; null where it cannot be, and `reason` says why.
  static const Library *load(std::string &reason);
};

template <auto Destroy>
struct Destroyer {
  const Library *library = nullptr;
  template <typename Object>
  void operator()(Object *object) const {
    (library->*Destroy)(object);
  }
};

using OwnedContext = std::unique_ptr<Context, Destroyer<&Library::close_device>>;
using OwnedPd = std::unique_ptr<Pd, Destroyer<&Library::dealloc_pd>>;
using OwnedRegion = std::unique_ptr<MemoryRegion, Destroyer<&Library::dereg_mr>>;
using OwnedChannel = std::unique_ptr<CompletionChannel, Destroyer<&Library::destroy_comp_channel>>;
using OwnedQueue = std::unique_ptr<CompletionQueue, Destroyer<&Library::destroy_cq>>;

}  // namespace kvpeer::verbs
