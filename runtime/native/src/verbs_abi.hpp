// The part of libibverbs' binary interface that we use, declared here so that the library builds without its headers and runs without
// its file (docs/adr/0006). What is declared belongs to symbol version IBVERBS_1.1, which has not changed since 2008; verbs_abi_test
// compares every offset and constant with the system's header where there is one.
//
// Structures that the library makes are declared up to the last field that we read, and never by us allocated or copied. Those that
// we give to it are complete.
#pragma once

#include <pthread.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvpeer::verbs {

using Gid = std::array<uint8_t, 16>;

inline constexpr const char *kLibraryName = "libibverbs.so.1";
inline constexpr const char *kSymbolVersion = "IBVERBS_1.1", *kFirstSymbolVersion = "IBVERBS_1.0";

inline constexpr int kPortActive = 4;
inline constexpr uint8_t kLinkEthernet = 2;
inline constexpr int kMtu1024 = 3, kMtu4096 = 5;

inline constexpr int kAccessLocalWrite = 1 << 0, kAccessRemoteRead = 1 << 2;

inline constexpr int kQpTypeReliable = 2;
inline constexpr int kQpInit = 1, kQpReadyToReceive = 2, kQpReadyToSend = 3, kQpError = 6;
inline constexpr int kQpStateMask = 1 << 0, kQpAccessMask = 1 << 3, kQpPkeyMask = 1 << 4, kQpPortMask = 1 << 5, kQpAddressMask = 1 << 7,
                     kQpMtuMask = 1 << 8, kQpTimeoutMask = 1 << 9, kQpRetryMask = 1 << 10, kQpRnrRetryMask = 1 << 11,
                     kQpReceivePsnMask = 1 << 12, kQpReadsMask = 1 << 13, kQpRnrTimerMask = 1 << 15, kQpSendPsnMask = 1 << 16,
                     kQpServedReadsMask = 1 << 17, kQpPeerNumberMask = 1 << 20;

inline constexpr int kOpcodeRead = 4;
inline constexpr unsigned kSendFence = 1 << 0, kSendSignaled = 1 << 1;

// Statuses of a completion that say that a request was wrong by itself; all others are about the peer or the way to it.
inline constexpr int kSuccess = 0, kLocalLength = 1, kLocalQp = 2, kLocalProtection = 4;

struct Device;  // by name only
struct Pd;
struct CompletionQueue;
struct QueuePair;

struct SendRequest;
struct Completion;

struct ContextOps {
  void *first[11];
  int (*poll_cq)(CompletionQueue *, int, Completion *);
  int (*req_notify_cq)(CompletionQueue *, int solicited_only);
  void *between[12];
  int (*post_send)(QueuePair *, SendRequest *, SendRequest **bad);
  void *last[6];
};

struct Context {
  Device *device;
  ContextOps ops;
};

struct CompletionChannel {
  Context *context;
  int fd;
};

struct CompletionQueue {
  Context *context;
};

struct MemoryRegion {
  Context *context;
  Pd *pd;
  void *address;
  size_t length;
  uint32_t handle;
  uint32_t local_key;
  uint32_t remote_key;
};

struct QueuePair {
  Context *context;
  void *qp_context;
  Pd *pd;
  CompletionQueue *send_cq;
  CompletionQueue *recv_cq;
  void *srq;
  uint32_t handle;
  uint32_t number;
};

struct DeviceAttributes {
  char firmware[64];
  uint64_t node_guid, sys_image_guid, max_mr_size, page_size_cap;
  uint32_t vendor_id, vendor_part_id, hw_ver;
  int max_qp, max_qp_wr;
  unsigned device_cap_flags;
  int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom;
  int rest[16];
  uint16_t max_pkeys;
  uint8_t local_ca_ack_delay, phys_port_cnt;
};

struct PortAttributes {
  int state, max_mtu, active_mtu, gid_tbl_len;
  uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
  uint16_t pkey_tbl_len, lid, sm_lid;
  uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state, link_layer, flags;
  uint16_t port_cap_flags2;
};

struct QpCapacities {
  uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
};

struct QpInit {
  void *qp_context;
  CompletionQueue *send_cq, *recv_cq;
  void *srq;
  QpCapacities capacities;
  int type;
  int signals_all;
};

struct alignas(8) AddressHandle {
  Gid gid;
  uint32_t flow_label;
  uint8_t sgid_index, hop_limit, traffic_class;
  uint16_t lid;
  uint8_t sl, src_path_bits, static_rate, is_global, port;
};

struct QpAttributes {
  int state, current_state, path_mtu, path_mig_state;
  uint32_t qkey, receive_psn, send_psn, peer_number;
  unsigned access_flags;
  QpCapacities capacities;
  AddressHandle address, alternative;
  uint16_t pkey_index, alt_pkey_index;
  uint8_t en_sqd_async_notify, sq_draining, reads_max, served_reads_max, min_rnr_timer, port, timeout, retry_count, rnr_retry;
  uint8_t alt_port, alt_timeout;
  uint32_t rate_limit;
};

struct Segment {
  uint64_t address;
  uint32_t length;
  uint32_t local_key;
};

struct SendRequest {
  uint64_t id;
  SendRequest *next;
  Segment *segments;
  int n_segments;
  int opcode;
  unsigned flags;
  uint32_t immediate;
  uint64_t remote_address;
  uint32_t remote_key;
  uint64_t rest[9];  // of other opcodes
};

struct Completion {
  uint64_t id;
  int status;
  int opcode;
  uint32_t vendor_error, n_bytes, immediate, qp_number, src_qp;
  unsigned flags;
  uint16_t pkey_index, slid;
  uint8_t sl, dlid_path_bits;
};

}  // namespace kvpeer::verbs
