// One post of READs for some pages: their headers and tables, then their payloads, then their headers again.
//
// A device may carry out READs in another order than they were posted in, so the first request of the payloads and the first of the
// second headers carry a fence: the device begins them when all before them are complete. Only the last request is signalled; its
// completion says that everything is there. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "fetched_pages.hpp"
#include "verbs_library.hpp"

namespace kvpeer::verbs {

// A page as it is at the producer, and where it goes.
struct RemotePage {
  uint64_t header_address;
  uint64_t payload_address;
  uint32_t header_key;
  uint32_t payload_key;
  uint32_t length;
  uint32_t local_key;
  std::byte *destination;
};

class Chain {
 public:
  // Pages in one post: their fronts and trailers are 74 KB, and 64 pages of 128 KiB are what one call of Python asks for.
  static constexpr uint32_t kPagesMax = 64;
  // Bytes of one READ: what every device takes (max_msg_sz is at least 1 GiB). Larger pages take several.
  static constexpr uint32_t kReadBytes = 1u << 30;
  // READs of the largest page: header, four pieces of payload, header.
  static constexpr uint32_t kPageReadsMax = 2 + (UINT32_MAX / kReadBytes + 1);

  // reads_max: requests that the queue pair takes, at least kPageReadsMax.
  explicit Chain(uint32_t reads_max);

  // Registers the room for headers. KVP_OK or a negative code.
  int set_up(const Library &library, Pd *pd);
  void clear() { pages_.clear(), n_reads_ = 0; }
  // False when the chain is full: post it first.
  bool add(const RemotePage &page);
  bool is_empty() const { return pages_.empty(); }
  // Makes the requests; ids count from first_id, the last one has first_id + n_reads() - 1.
  SendRequest *link(uint64_t first_id);
  uint32_t n_reads() const { return n_reads_; }
  // Makes one request instead: for a header, into the room of the first page.
  SendRequest *link_header(uint64_t id, uint64_t address, uint32_t key);

  // What arrived for the i-th page of the chain.
  const PageFront &front(uint32_t i) const { return room_->fronts[i]; }
  const kvp_slot_header &trailer(uint32_t i) const { return room_->trailers[i]; }

 private:
  struct Room {
    PageFront fronts[kPagesMax];
    kvp_slot_header trailers[kPagesMax];
  };

  void append(const Segment &into, uint64_t address, uint32_t key, unsigned flags);
  void append_payload(const RemotePage &page, unsigned flags);

  const uint32_t reads_max_;
  std::vector<RemotePage> pages_;
  std::vector<SendRequest> requests_;
  std::vector<Segment> segments_;
  uint32_t n_reads_ = 0;  // that the pages take
  std::unique_ptr<Room> room_;
  OwnedRegion region_;
};

}  // namespace kvpeer::verbs
