#include "verbs_queue_pair.hpp"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>

#include "errors.hpp"

namespace kvpeer::verbs {
namespace {

constexpr uint32_t kPsnMask = 0xffffff;  // packet and queue pair numbers have 24 bits

// An unanswered packet is sent again after 4.096 us * 2^14 = 67 ms, six times: a peer that is gone is given up after half a second
// at least (devices may take four times as long). Deadlines end a fetch before that. Seven would mean for ever to soft-RoCE.
constexpr uint8_t kTimeout = 14;
constexpr uint8_t kRetries = 6;
constexpr uint8_t kRnrTimer = 12;
constexpr uint8_t kHopLimit = 64;

int failed(int error) { return error == 0 ? KVP_OK : failed_with(error > 0 ? error : errno); }

}  // namespace

bool is_valid(const kvp_verbs_endpoint &endpoint) {
  return endpoint.qp_number <= kPsnMask && endpoint.psn <= kPsnMask && endpoint.mtu >= 1 && endpoint.mtu <= kMtu4096 &&
         endpoint.reads_max >= 1;
}

int Endpoint::create(Pd *pd, CompletionQueue *queue, uint32_t max_send_wr, bool is_readable) {
  if (::getrandom(&psn_, sizeof(psn_), 0) != sizeof(psn_)) {
    return failed_system_call();
  }
  psn_ &= kPsnMask;
  QpInit init{};
  init.send_cq = init.recv_cq = queue;
  init.capacities = {max_send_wr, 1, 1, 1, 0};
  init.type = kQpTypeReliable;
  pair_ = library_.create_qp(pd, &init);
  if (pair_ == nullptr) {
    return failed_system_call();
  }
  QpAttributes attributes{};
  attributes.state = kQpInit;
  attributes.port = Port::kNumber;
  attributes.access_flags = is_readable ? kAccessRemoteRead : 0;
  return failed(library_.modify_qp(pair_, &attributes, kQpStateMask | kQpPkeyMask | kQpPortMask | kQpAccessMask));
}

kvp_verbs_endpoint Endpoint::describe(uint8_t reads_max) const {
  kvp_verbs_endpoint end{};
  std::copy(port_.gid.begin(), port_.gid.end(), end.gid);
  end.qp_number = pair_->number;
  end.psn = psn_;
  end.lid = port_.lid;
  end.mtu = port_.mtu;
  end.reads_max = reads_max;
  return end;
}

int Endpoint::serve(const kvp_verbs_endpoint &peer, uint8_t reads_max) {
  QpAttributes attributes{};
  attributes.state = kQpReadyToReceive;
  attributes.path_mtu = std::min(port_.mtu, peer.mtu);
  attributes.peer_number = peer.qp_number;
  attributes.receive_psn = peer.psn;
  attributes.served_reads_max = reads_max;
  attributes.min_rnr_timer = kRnrTimer;
  AddressHandle &address = attributes.address;
  std::copy_n(peer.gid, address.gid.size(), address.gid.begin());
  address.sgid_index = port_.gid_index;
  address.hop_limit = kHopLimit;
  address.lid = peer.lid;
  address.is_global = 1;
  address.port = Port::kNumber;
  return failed(library_.modify_qp(pair_, &attributes,
                                   kQpStateMask | kQpAddressMask | kQpMtuMask | kQpPeerNumberMask | kQpReceivePsnMask |
                                       kQpServedReadsMask | kQpRnrTimerMask));
}

int Endpoint::send(uint8_t reads_max) {
  QpAttributes attributes{};
  attributes.state = kQpReadyToSend;
  attributes.send_psn = psn_;
  attributes.timeout = kTimeout;
  attributes.retry_count = kRetries;
  attributes.rnr_retry = kRetries;
  attributes.reads_max = reads_max;
  return failed(library_.modify_qp(pair_, &attributes,
                                   kQpStateMask | kQpSendPsnMask | kQpTimeoutMask | kQpRetryMask | kQpRnrRetryMask | kQpReadsMask));
}

void Endpoint::stop() {
  QpAttributes attributes{};
  attributes.state = kQpError;
  library_.modify_qp(pair_, &attributes, kQpStateMask);
}

bool Endpoint::destroy() {
  if (pair_ != nullptr && library_.destroy_qp(pair_) != 0) {
    return false;
  }
  pair_ = nullptr;
  return true;
}

}  // namespace kvpeer::verbs
