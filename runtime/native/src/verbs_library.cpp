#include "verbs_library.hpp"

#include <dlfcn.h>

namespace kvpeer::verbs {
namespace {

// Loads the library and finds all functions in the version that verbs_abi.hpp declares; an earlier one has other structures.
struct Loaded {
  Library functions{};
  std::string reason;

  Loaded() {
    void *file = ::dlopen(kLibraryName, RTLD_NOW | RTLD_LOCAL);
    if (file == nullptr) {
      reason = std::string("install rdma-core: ") + ::dlerror();
      return;
    }
    find(file, "ibv_get_device_list", functions.get_device_list);
    find(file, "ibv_free_device_list", functions.free_device_list);
    find(file, "ibv_get_device_name", functions.get_device_name);
    find(file, "ibv_open_device", functions.open_device);
    find(file, "ibv_close_device", functions.close_device);
    find(file, "ibv_query_device", functions.query_device);
    find(file, "ibv_query_port", functions.query_port);
    find(file, "ibv_query_gid", functions.query_gid);
    find(file, "ibv_alloc_pd", functions.alloc_pd);
    find(file, "ibv_dealloc_pd", functions.dealloc_pd);
    find(file, "ibv_reg_mr", functions.reg_mr);
    find(file, "ibv_dereg_mr", functions.dereg_mr);
    find(file, "ibv_create_comp_channel", functions.create_comp_channel);
    find(file, "ibv_destroy_comp_channel", functions.destroy_comp_channel);
    find(file, "ibv_create_cq", functions.create_cq);
    find(file, "ibv_destroy_cq", functions.destroy_cq);
    find(file, "ibv_get_cq_event", functions.get_cq_event);
    find(file, "ibv_ack_cq_events", functions.ack_cq_events);
    find(file, "ibv_create_qp", functions.create_qp);
    find(file, "ibv_modify_qp", functions.modify_qp);
    find(file, "ibv_destroy_qp", functions.destroy_qp);
    find(file, "ibv_wc_status_str", functions.wc_status_str);
  }

  template <typename Function>
  void find(void *file, const char *name, Function &function) {
    // What did not change between the two versions is there in the first alone.
    void *found = ::dlvsym(file, name, kSymbolVersion);
    found = found != nullptr ? found : ::dlvsym(file, name, kFirstSymbolVersion);
    function = reinterpret_cast<Function>(found);
    if (found == nullptr) {
      reason = std::string(kLibraryName) + " has no " + name + " of " + kSymbolVersion + ": install a newer rdma-core";
    }
  }
};

}  // namespace

const Library *Library::load(std::string &reason) {
  static const Loaded loaded;
  reason = loaded.reason;
  return loaded.reason.empty() ? &loaded.functions : nullptr;
}

}  // namespace kvpeer::verbs
