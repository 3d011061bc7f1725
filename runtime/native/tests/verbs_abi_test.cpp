// What verbs_abi.hpp declares is what the system's header declares, where there is one: checked by the compiler.
#include <gtest/gtest.h>

#include "verbs_abi.hpp"

#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>

namespace v = kvpeer::verbs;

#define SAME_PLACE(ours, field, theirs, their_field)                                                         \
  static_assert(offsetof(v::ours, field) == offsetof(theirs, their_field) &&                                 \
                sizeof(static_cast<v::ours *>(nullptr)->field) == sizeof(static_cast<theirs *>(nullptr)->their_field))
#define SAME_SIZE(ours, theirs) static_assert(sizeof(v::ours) == sizeof(theirs) && alignof(v::ours) == alignof(theirs))

SAME_SIZE(ContextOps, ibv_context_ops);
SAME_PLACE(ContextOps, poll_cq, ibv_context_ops, poll_cq);
SAME_PLACE(ContextOps, req_notify_cq, ibv_context_ops, req_notify_cq);
SAME_PLACE(ContextOps, post_send, ibv_context_ops, post_send);
SAME_PLACE(Context, ops, ibv_context, ops);
SAME_PLACE(CompletionChannel, fd, ibv_comp_channel, fd);
SAME_PLACE(CompletionQueue, context, ibv_cq, context);
SAME_PLACE(MemoryRegion, address, ibv_mr, addr);
SAME_PLACE(MemoryRegion, length, ibv_mr, length);
SAME_PLACE(MemoryRegion, local_key, ibv_mr, lkey);
SAME_PLACE(MemoryRegion, remote_key, ibv_mr, rkey);
SAME_PLACE(QueuePair, number, ibv_qp, qp_num);

SAME_SIZE(DeviceAttributes, ibv_device_attr);
SAME_PLACE(DeviceAttributes, max_mr_size, ibv_device_attr, max_mr_size);
SAME_PLACE(DeviceAttributes, max_qp_wr, ibv_device_attr, max_qp_wr);
SAME_PLACE(DeviceAttributes, max_cqe, ibv_device_attr, max_cqe);
SAME_PLACE(DeviceAttributes, max_qp_rd_atom, ibv_device_attr, max_qp_rd_atom);
SAME_PLACE(DeviceAttributes, max_qp_init_rd_atom, ibv_device_attr, max_qp_init_rd_atom);
SAME_SIZE(PortAttributes, ibv_port_attr);
SAME_PLACE(PortAttributes, state, ibv_port_attr, state);
SAME_PLACE(PortAttributes, active_mtu, ibv_port_attr, active_mtu);
SAME_PLACE(PortAttributes, gid_tbl_len, ibv_port_attr, gid_tbl_len);
SAME_PLACE(PortAttributes, lid, ibv_port_attr, lid);
SAME_PLACE(PortAttributes, link_layer, ibv_port_attr, link_layer);

SAME_SIZE(QpInit, ibv_qp_init_attr);
SAME_PLACE(QpInit, send_cq, ibv_qp_init_attr, send_cq);
SAME_PLACE(QpInit, recv_cq, ibv_qp_init_attr, recv_cq);
SAME_PLACE(QpInit, capacities, ibv_qp_init_attr, cap);
SAME_PLACE(QpInit, type, ibv_qp_init_attr, qp_type);
SAME_PLACE(QpInit, signals_all, ibv_qp_init_attr, sq_sig_all);
SAME_SIZE(AddressHandle, ibv_ah_attr);
SAME_PLACE(AddressHandle, gid, ibv_ah_attr, grh.dgid);
SAME_PLACE(AddressHandle, sgid_index, ibv_ah_attr, grh.sgid_index);
SAME_PLACE(AddressHandle, hop_limit, ibv_ah_attr, grh.hop_limit);
SAME_PLACE(AddressHandle, lid, ibv_ah_attr, dlid);
SAME_PLACE(AddressHandle, is_global, ibv_ah_attr, is_global);
SAME_PLACE(AddressHandle, port, ibv_ah_attr, port_num);
SAME_SIZE(QpAttributes, ibv_qp_attr);
SAME_PLACE(QpAttributes, state, ibv_qp_attr, qp_state);
SAME_PLACE(QpAttributes, path_mtu, ibv_qp_attr, path_mtu);
SAME_PLACE(QpAttributes, receive_psn, ibv_qp_attr, rq_psn);
SAME_PLACE(QpAttributes, send_psn, ibv_qp_attr, sq_psn);
SAME_PLACE(QpAttributes, peer_number, ibv_qp_attr, dest_qp_num);
SAME_PLACE(QpAttributes, access_flags, ibv_qp_attr, qp_access_flags);
SAME_PLACE(QpAttributes, address, ibv_qp_attr, ah_attr);
SAME_PLACE(QpAttributes, reads_max, ibv_qp_attr, max_rd_atomic);
SAME_PLACE(QpAttributes, served_reads_max, ibv_qp_attr, max_dest_rd_atomic);
SAME_PLACE(QpAttributes, min_rnr_timer, ibv_qp_attr, min_rnr_timer);
SAME_PLACE(QpAttributes, port, ibv_qp_attr, port_num);
SAME_PLACE(QpAttributes, timeout, ibv_qp_attr, timeout);
SAME_PLACE(QpAttributes, retry_count, ibv_qp_attr, retry_cnt);
SAME_PLACE(QpAttributes, rnr_retry, ibv_qp_attr, rnr_retry);

SAME_SIZE(Segment, ibv_sge);
SAME_PLACE(Segment, address, ibv_sge, addr);
SAME_PLACE(Segment, length, ibv_sge, length);
SAME_PLACE(Segment, local_key, ibv_sge, lkey);
SAME_SIZE(SendRequest, ibv_send_wr);
SAME_PLACE(SendRequest, id, ibv_send_wr, wr_id);
SAME_PLACE(SendRequest, next, ibv_send_wr, next);
SAME_PLACE(SendRequest, segments, ibv_send_wr, sg_list);
SAME_PLACE(SendRequest, n_segments, ibv_send_wr, num_sge);
SAME_PLACE(SendRequest, opcode, ibv_send_wr, opcode);
SAME_PLACE(SendRequest, flags, ibv_send_wr, send_flags);
SAME_PLACE(SendRequest, remote_address, ibv_send_wr, wr.rdma.remote_addr);
SAME_PLACE(SendRequest, remote_key, ibv_send_wr, wr.rdma.rkey);
SAME_SIZE(Completion, ibv_wc);
SAME_PLACE(Completion, id, ibv_wc, wr_id);
SAME_PLACE(Completion, status, ibv_wc, status);

static_assert(v::kPortActive == IBV_PORT_ACTIVE && v::kLinkEthernet == IBV_LINK_LAYER_ETHERNET);
static_assert(v::kMtu1024 == IBV_MTU_1024 && v::kMtu4096 == IBV_MTU_4096);
static_assert(v::kAccessLocalWrite == IBV_ACCESS_LOCAL_WRITE && v::kAccessRemoteRead == IBV_ACCESS_REMOTE_READ);
static_assert(v::kQpTypeReliable == IBV_QPT_RC && v::kOpcodeRead == IBV_WR_RDMA_READ);
static_assert(v::kQpInit == IBV_QPS_INIT && v::kQpReadyToReceive == IBV_QPS_RTR && v::kQpReadyToSend == IBV_QPS_RTS &&
              v::kQpError == IBV_QPS_ERR);
static_assert(v::kQpStateMask == IBV_QP_STATE && v::kQpAccessMask == IBV_QP_ACCESS_FLAGS && v::kQpPkeyMask == IBV_QP_PKEY_INDEX &&
              v::kQpPortMask == IBV_QP_PORT && v::kQpAddressMask == IBV_QP_AV && v::kQpMtuMask == IBV_QP_PATH_MTU &&
              v::kQpTimeoutMask == IBV_QP_TIMEOUT && v::kQpRetryMask == IBV_QP_RETRY_CNT &&
              v::kQpRnrRetryMask == IBV_QP_RNR_RETRY && v::kQpReceivePsnMask == IBV_QP_RQ_PSN &&
              v::kQpReadsMask == IBV_QP_MAX_QP_RD_ATOMIC && v::kQpRnrTimerMask == IBV_QP_MIN_RNR_TIMER &&
              v::kQpSendPsnMask == IBV_QP_SQ_PSN && v::kQpServedReadsMask == IBV_QP_MAX_DEST_RD_ATOMIC &&
              v::kQpPeerNumberMask == IBV_QP_DEST_QPN);
static_assert(v::kSendFence == IBV_SEND_FENCE && v::kSendSignaled == IBV_SEND_SIGNALED);
static_assert(v::kSuccess == IBV_WC_SUCCESS && v::kLocalLength == IBV_WC_LOC_LEN_ERR && v::kLocalQp == IBV_WC_LOC_QP_OP_ERR &&
              v::kLocalProtection == IBV_WC_LOC_PROT_ERR);

TEST(VerbsAbi, IsThatOfTheSystemsHeader) {
  SUCCEED() << "the compiler said so";
}
#else
TEST(VerbsAbi, IsThatOfTheSystemsHeader) { GTEST_SKIP() << "there is no infiniband/verbs.h here; `make test-rdma` installs it"; }
#endif
