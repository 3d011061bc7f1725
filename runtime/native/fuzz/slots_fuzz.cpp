// What an agent wrote into shared memory: slot headers and part tables, as a client reads them.
//
// An input is one byte, 64 bytes of header, and entries of the part table. Bit 0 of the byte: magic, version and checksums are made
// right, so that the fields behind them are looked at. Bit 1: verify full. Bits 2 to 4: which part the client wants. Bit 5: that
// part lies at the end of the extent, give or take what the first byte of its entry says. Bits 6 and 7: where the slot lies.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "extent.hpp"
#include "mapping.hpp"
#include "received_stream.hpp"
#include "slot_header.hpp"

namespace kvpeer::fuzz {
namespace {

constexpr uint64_t kExtentBytes = 1 << 20;
constexpr uint64_t kOffsets[] = {0, 4096, kExtentBytes - 4096, kExtentBytes - 1};  // the last one no agent gives out
constexpr uint32_t kPieceBytes[] = {40, 24};  // two segments, as keys and values
constexpr uint32_t kPartBytes = 64;
constexpr uint8_t kRunId[KVP_AGENT_ID_BYTES] = {1};
constexpr uint8_t kKey[KVP_KEY_BYTES] = {2};
constexpr uint32_t kGeneration = 3;

// The two files of an agent's pool with one extent, and a client's map of them.
class SharedPool {
 public:
  SharedPool() {
    KVP_PROMISE(payload_file_.create("fuzz payload", kExtentBytes, 0) == KVP_OK);
    KVP_PROMISE(header_file_.create("fuzz headers", kHeaderExtentBytes, 0) == KVP_OK);
    KVP_PROMISE(payload_file_.seal(F_SEAL_SHRINK) == KVP_OK && header_file_.seal(F_SEAL_SHRINK) == KVP_OK);
    KVP_PROMISE(headers_.map(header_file_.fd(), kHeaderExtentBytes, PROT_READ | PROT_WRITE) == KVP_OK);
    KVP_PROMISE(kvp_map_create(payload_file_.fd(), header_file_.fd(), kExtentBytes, kRunId, &map_) == KVP_OK);
  }
  ~SharedPool() { kvp_map_destroy(map_); }
  SharedPool(const SharedPool &) = delete;
  SharedPool &operator=(const SharedPool &) = delete;

  kvp_map *map() const { return map_; }
  // The first slot's header with its part table behind it.
  std::byte *header() const { return headers_.data(); }
  const std::byte *payload() const {
    uint64_t n_bytes;
    return static_cast<const std::byte *>(kvp_map_payload(map_, &n_bytes));
  }

 private:
  MemoryFile payload_file_;
  MemoryFile header_file_;
  Mapping headers_;
  kvp_map *map_ = nullptr;
};

struct Slot {
  kvp_slot_header header;
  kvp_part parts[KVP_PARTS_MAX];
};
static_assert(sizeof(Slot) == KVP_HEADER_STRIDE);

// A hit is the page that was asked for, and with full verification its bytes have the checksum of their part.
void check_hit(const Slot &slot, uint32_t part, int verify, uint64_t offset, const std::byte *payload) {
  KVP_PROMISE(header_matches(slot.header, kKey, kRunId, kGeneration, slot.header.length));
  KVP_PROMISE(part < slot.header.n_parts && slot.parts[part].length == kPartBytes);
  const uint64_t first = offset + slot.parts[part].offset;
  KVP_PROMISE(first + kPartBytes <= kExtentBytes);
  KVP_PROMISE(verify != KVP_VERIFY_FULL || kvp_crc64(0, payload + first, kPartBytes) == slot.parts[part].checksum);
}

}  // namespace
}  // namespace kvpeer::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes) {
  using namespace kvpeer;
  using namespace kvpeer::fuzz;
  static const SharedPool pool;
  if (n_bytes == 0) {
    return 0;
  }
  const uint8_t mode = bytes[0];
  const uint32_t part = (mode >> 2) & 7;
  const uint64_t offset = kOffsets[mode >> 6];
  Slot slot{};
  std::memcpy(static_cast<void *>(&slot), bytes + 1, std::min(n_bytes - 1, sizeof(slot)));
  if ((mode & 32) != 0) {
    const auto off_by = static_cast<int8_t>(slot.parts[part].offset);
    slot.parts[part].offset = static_cast<uint32_t>(kExtentBytes - offset - kPartBytes + static_cast<uint64_t>(off_by));
    slot.parts[part].length = kPartBytes;
  }
  if ((mode & 1) != 0 && slot.header.n_parts <= KVP_PARTS_MAX) {
    seal_header(slot.header, slot.parts);
  }
  std::memcpy(pool.header(), &slot, sizeof(slot));

  const int verify = (mode & 2) != 0 ? KVP_VERIFY_FULL : KVP_VERIFY_GENERATION;
  std::vector<uint8_t> keys_of_engine(kPieceBytes[0]), values_of_engine(kPieceBytes[1]);
  const uint64_t base[] = {reinterpret_cast<uint64_t>(keys_of_engine.data()), reinterpret_cast<uint64_t>(values_of_engine.data())};
  const uint64_t stride[] = {kPieceBytes[0], kPieceBytes[1]};
  const kvp_layout layout{2, base, stride, kPieceBytes};
  const uint32_t slot_id = 0;
  const int64_t block = 0;
  uint8_t outcome = 0xff;
  const int rc = kvp_map_scatter(pool.map(), 1, &slot_id, &kGeneration, &offset, kKey, part, &layout, &block, verify, &outcome);
  KVP_PROMISE(rc == KVP_OK && (outcome == KVP_HIT || outcome == KVP_STALE || outcome == KVP_CORRUPT));
  if (outcome == KVP_HIT) {
    check_hit(slot, part, verify, offset, pool.payload());
  }
  return 0;
}
