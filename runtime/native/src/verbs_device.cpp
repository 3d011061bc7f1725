#include "verbs_device.hpp"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <new>

#include "errors.hpp"

using namespace kvpeer;
using namespace kvpeer::verbs;

namespace {

// READs under way at a time on one queue pair, where the devices allow more: enough for 400 Gb/s over 10 us with pages of 64 KiB.
constexpr int kReadsMax = 16;

bool is_zero(const Gid &gid) { return gid == Gid{}; }
bool is_link_local(const Gid &gid) { return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80; }
bool is_ipv4(const Gid &gid) {
  constexpr uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::equal(std::begin(kMapped), std::end(kMapped), gid.begin());
}

// Whether packets with this GID can be routed, as the kernel says. Where it does not say, they are taken to be.
bool is_routable_type(const std::string &device, int index) {
  std::ifstream file("/sys/class/infiniband/" + device + "/ports/1/gid_attrs/types/" + std::to_string(index));
  std::string type;
  return !std::getline(file, type) || type == "RoCE v2";
}

// The devices of this machine; freed with the list, which opened ones outlive.
class DeviceList {
 public:
  explicit DeviceList(const Library &library) : library_(library), first_(library.get_device_list(&n_)) {}
  ~DeviceList() {
    if (first_ != nullptr) {
      library_.free_device_list(first_);
    }
  }
  DeviceList(const DeviceList &) = delete;
  DeviceList &operator=(const DeviceList &) = delete;

  Device **begin() const { return first_; }
  Device **end() const { return first_ == nullptr ? nullptr : first_ + n_; }

 private:
  const Library &library_;
  int n_ = 0;
  Device **first_;
};

}  // namespace

kvp_verbs::kvp_verbs(const Library &loaded, std::string device, const kvp_pool &pool, const kvp_verbs_settings &settings)
    : library(loaded), name(std::move(device)), n_extents(pool.n_extents), settings_(settings) {
  settings_.device = nullptr;  // the caller's, and used up
}

int kvp_verbs::open(const kvp_pool &pool, const kvp_verbs_settings &settings, std::string &reason,
                    std::unique_ptr<kvp_verbs> &out) {
  const Library *library = Library::load(reason);
  if (library == nullptr) {
    return KVP_ENODEVICE;
  }
  const std::string wanted = settings.device == nullptr ? "" : settings.device;
  reason = wanted.empty() ? "there is no RDMA device: is its driver loaded, and /dev/infiniband in this container?"
                          : "there is no RDMA device " + wanted;
  const DeviceList devices(*library);
  for (Device *device : devices) {
    const std::string name = library->get_device_name(device);
    if (!wanted.empty() && name != wanted) {
      continue;
    }
    std::unique_ptr<kvp_verbs> opened(new kvp_verbs(*library, name, pool, settings));
    if (opened->set_up(device, pool, reason)) {
      out = std::move(opened);
      return KVP_OK;
    }
  }
  return KVP_ENODEVICE;
}

bool kvp_verbs::set_up(Device *device, const kvp_pool &pool, std::string &reason) {
  const auto fails = [&](const std::string &what) {
    reason = name + ": " + what;
    return false;
  };
  context_ = {library.open_device(device), {&library}};
  if (context_ == nullptr) {
    return fails(std::string("cannot be opened: ") + std::strerror(errno));
  }
  PortAttributes port{};
  if (library.query_device(context_.get(), &attributes_) != 0 || library.query_port(context_.get(), Port::kNumber, &port) != 0) {
    return fails("does not answer");
  }
  if (port.state != kPortActive) {
    return fails("its port is not active: check the link");
  }
  if (!choose_gid(port, reason)) {
    return false;
  }
  port_.lid = port.lid;
  port_.mtu = static_cast<uint8_t>(port.active_mtu);
  port_.link_layer = port.link_layer;
  message_bytes_max_ = port.max_msg_sz;
  pd_ = {library.alloc_pd(context_.get()), {&library}};
  served_queue_ = {library.create_cq(context_.get(), 1, nullptr, nullptr, 0), {&library}};
  if (pd_ == nullptr || served_queue_ == nullptr) {
    return fails(std::string("makes no queues: ") + std::strerror(errno));
  }
  memory_ = std::make_unique<Memory>(library, pd_.get(), pool);
  return true;
}

bool kvp_verbs::choose_gid(const PortAttributes &port, std::string &reason) {
  int chosen = -1;
  for (int index = 0; index < port.gid_tbl_len && index <= UINT8_MAX; ++index) {
    Gid gid{};
    if (library.query_gid(context_.get(), Port::kNumber, index, &gid) != 0 || is_zero(gid)) {
      continue;
    }
    const bool is_usable = port.link_layer != kLinkEthernet || (!is_link_local(gid) && is_routable_type(name, index));
    const bool is_given = index == settings_.gid_index;
    if (is_given || (settings_.gid_index < 0 && is_usable && (chosen < 0 || (is_ipv4(gid) && !is_ipv4(port_.gid))))) {
      chosen = index;
      port_.gid = gid;
      port_.gid_index = static_cast<uint8_t>(index);
    }
  }
  if (chosen < 0) {
    reason = settings_.gid_index < 0 ? name + ": its port has no routable RoCE v2 address: give its network interface one"
                                     : name + ": its port has no GID of index " + std::to_string(settings_.gid_index);
  }
  return chosen >= 0;
}

uint8_t kvp_verbs::served_reads(uint8_t offered) const {
  return static_cast<uint8_t>(std::clamp(std::min<int>(attributes_.max_qp_rd_atom, offered), 1, kReadsMax));
}

uint8_t kvp_verbs::started_reads(uint8_t offered) const {
  return static_cast<uint8_t>(std::clamp(std::min<int>(attributes_.max_qp_init_rd_atom, offered), 1, kReadsMax));
}

int kvp_verbs::accept(const AgentId &reader_id, const kvp_verbs_endpoint &reader, kvp_verbs_endpoint &producer_out) {
  std::list<Served> made;
  Endpoint &endpoint = made.emplace_back(reader_id, library, port_).endpoint;
  const uint8_t reads_max = served_reads(reader.reads_max);
  int rc = endpoint.create(pd_.get(), served_queue_.get(), 1, true);
  if (rc == KVP_OK) {
    rc = endpoint.serve(reader, reads_max);
  }
  if (rc != KVP_OK) {
    return rc;
  }
  producer_out = endpoint.describe(reads_max);
  std::list<Served> replaced;
  std::lock_guard lock(mutex_);
  if (!make_room(reader_id, replaced)) {
    return KVP_EFULL;
  }
  served_.splice(served_.end(), made);
  ++n_accepted_;
  return KVP_OK;
}

// A reader that lost its queue pairs says nothing of them: one more than it may have takes the place of its oldest, and so does one of
// another reader that has fewer than it by two, when all places are taken.
bool kvp_verbs::make_room(const AgentId &reader_id, std::list<Served> &replaced) {
  const auto is_readers = [&](const Served &served) { return served.reader_id == reader_id; };
  const auto n_of_reader = static_cast<uint64_t>(std::count_if(served_.begin(), served_.end(), is_readers));
  if (n_of_reader >= settings_.reader_connections_max) {
    replaced.splice(replaced.end(), served_, std::find_if(served_.begin(), served_.end(), is_readers));
    ++n_replaced_;
  } else if (served_.size() >= settings_.connections_max) {
    std::map<AgentId, uint64_t> counts;
    for (const Served &served : served_) {
      ++counts[served.reader_id];
    }
    const auto most = std::max_element(counts.begin(), counts.end(), [](const auto &a, const auto &b) { return a.second < b.second; });
    if (most->second >= n_of_reader + 2) {
      const auto is_its = [&](const Served &served) { return served.reader_id == most->first; };
      replaced.splice(replaced.end(), served_, std::find_if(served_.begin(), served_.end(), is_its));
      ++n_replaced_;
    }
  }
  return served_.size() < settings_.connections_max;
}

void kvp_verbs::revoke(const AgentId &reader_id) {
  std::list<Served> ended;
  std::lock_guard lock(mutex_);
  for (auto next = served_.begin(); next != served_.end();) {
    auto each = next++;
    if (each->reader_id == reader_id) {
      ended.splice(ended.end(), served_, each);
    }
  }
}

void kvp_verbs::stats(kvp_verbs_stats &out) const {
  out.registered_bytes = memory_->registered_bytes();
  std::lock_guard lock(mutex_);
  out.connections_open = served_.size();
  out.connections_accepted = n_accepted_;
  out.connections_replaced = n_replaced_;
}

extern "C" {

int kvp_verbs_open(kvp_pool *pool, const kvp_verbs_settings *settings, char *reason, uint64_t reason_bytes, kvp_verbs **out) {
  if (pool == nullptr || settings == nullptr || reason == nullptr || reason_bytes == 0 || out == nullptr ||
      settings->connections_max == 0 || settings->reader_connections_max == 0) {
    return KVP_EINVAL;
  }
  try {
    std::string why;
    std::unique_ptr<kvp_verbs> verbs;
    const int rc = kvp_verbs::open(*pool, *settings, why, verbs);
    const size_t n = std::min<size_t>(why.size(), reason_bytes - 1);
    std::copy_n(why.begin(), n, reason);
    reason[n] = '\0';
    *out = verbs.release();
    return rc;
  } catch (const std::bad_alloc &) {
    return KVP_ENOMEM;
  }
}

void kvp_verbs_close(kvp_verbs *verbs) { delete verbs; }

const char *kvp_verbs_device(const kvp_verbs *verbs) { return verbs == nullptr ? "" : verbs->name.c_str(); }

int kvp_verbs_register(kvp_verbs *verbs, void *address, uint64_t n_bytes) {
  if (verbs == nullptr || address == nullptr || n_bytes == 0) {
    return KVP_EINVAL;
  }
  try {
    return verbs->memory().add(address, n_bytes);
  } catch (const std::bad_alloc &) {
    return KVP_ENOMEM;
  }
}

int kvp_verbs_unregister(kvp_verbs *verbs, void *address) {
  return verbs == nullptr ? KVP_EINVAL : verbs->memory().remove(address);
}

int64_t kvp_verbs_extents(kvp_verbs *verbs, uint32_t first, uint64_t n, kvp_verbs_extent *out) {
  if (verbs == nullptr || out == nullptr) {
    return KVP_EINVAL;
  }
  const uint64_t n_told = first < verbs->n_extents ? std::min<uint64_t>(n, verbs->n_extents - first) : 0;
  for (uint64_t i = 0; i < n_told; ++i) {
    if (int rc = verbs->memory().describe(first + static_cast<uint32_t>(i), out[i]); rc != KVP_OK) {
      return rc;
    }
  }
  return static_cast<int64_t>(n_told);
}

int kvp_verbs_accept(kvp_verbs *verbs, const uint8_t reader_id[16], const kvp_verbs_endpoint *reader,
                     kvp_verbs_endpoint *producer_out) {
  if (verbs == nullptr || reader_id == nullptr || reader == nullptr || producer_out == nullptr || !is_valid(*reader)) {
    return KVP_EINVAL;
  }
  AgentId id;
  std::copy_n(reader_id, id.size(), id.begin());
  try {
    return verbs->accept(id, *reader, *producer_out);
  } catch (const std::bad_alloc &) {
    return KVP_ENOMEM;
  }
}

int kvp_verbs_revoke(kvp_verbs *verbs, const uint8_t reader_id[16]) {
  if (verbs == nullptr || reader_id == nullptr) {
    return KVP_EINVAL;
  }
  AgentId id;
  std::copy_n(reader_id, id.size(), id.begin());
  verbs->revoke(id);
  return KVP_OK;
}

void kvp_verbs_get_stats(const kvp_verbs *verbs, kvp_verbs_stats *out) {
  if (verbs != nullptr && out != nullptr) {
    verbs->stats(*out);
  }
}

}  // extern "C"
