#include "verbs_chain.hpp"

#include <algorithm>

#include "errors.hpp"

namespace kvpeer::verbs {

Chain::Chain(uint32_t reads_max) : reads_max_(reads_max), room_(std::make_unique<Room>()) {
  pages_.reserve(kPagesMax);
  requests_.reserve(reads_max);
  segments_.reserve(reads_max);
}

int Chain::set_up(const Library &library, Pd *pd) {
  region_ = {library.reg_mr(pd, room_.get(), sizeof(Room), kAccessLocalWrite), {&library}};
  return region_ == nullptr ? failed_system_call() : KVP_OK;
}

bool Chain::add(const RemotePage &page) {
  const uint32_t n_reads = 2 + (page.length - 1) / kReadBytes + 1;
  if (pages_.size() == kPagesMax || n_reads_ + n_reads > reads_max_) {
    return false;
  }
  pages_.push_back(page);
  n_reads_ += n_reads;
  return true;
}

SendRequest *Chain::link(uint64_t first_id) {
  requests_.clear();
  segments_.clear();
  const uint32_t room_key = region_->local_key;
  for (size_t i = 0; i < pages_.size(); ++i) {
    append({reinterpret_cast<uintptr_t>(&room_->fronts[i]), sizeof(PageFront), room_key}, pages_[i].header_address,
           pages_[i].header_key, 0);
  }
  for (size_t i = 0; i < pages_.size(); ++i) {
    append_payload(pages_[i], i == 0 ? kSendFence : 0);
  }
  for (size_t i = 0; i < pages_.size(); ++i) {
    append({reinterpret_cast<uintptr_t>(&room_->trailers[i]), sizeof(kvp_slot_header), room_key}, pages_[i].header_address,
           pages_[i].header_key, i == 0 ? kSendFence : 0);
  }
  for (size_t i = 0; i < requests_.size(); ++i) {
    requests_[i].id = first_id + i;
    requests_[i].segments = &segments_[i];
    requests_[i].next = i + 1 < requests_.size() ? &requests_[i + 1] : nullptr;
  }
  requests_.back().flags |= kSendSignaled;
  return requests_.data();
}

SendRequest *Chain::link_header(uint64_t id, uint64_t address, uint32_t key) {
  requests_.clear();
  segments_.clear();
  append({reinterpret_cast<uintptr_t>(&room_->fronts[0]), sizeof(kvp_slot_header), region_->local_key}, address, key, kSendSignaled);
  requests_[0].id = id;
  requests_[0].segments = segments_.data();
  return requests_.data();
}

void Chain::append_payload(const RemotePage &page, unsigned flags) {
  for (uint32_t n_done = 0; n_done < page.length;) {
    const uint32_t n = std::min(page.length - n_done, kReadBytes);
    append({reinterpret_cast<uintptr_t>(page.destination) + n_done, n, page.local_key}, page.payload_address + n_done,
           page.payload_key, flags);
    n_done += n;
    flags = 0;
  }
}

void Chain::append(const Segment &into, uint64_t address, uint32_t key, unsigned flags) {
  segments_.push_back(into);
  SendRequest &request = requests_.emplace_back();
  request.n_segments = 1;
  request.opcode = kOpcodeRead;
  request.flags = flags;
  request.remote_address = address;
  request.remote_key = key;
}

}  // namespace kvpeer::verbs
