// What a producer sends to a reader: the answer to the hello, prefixes, slot headers, part tables, payloads, trailers.
//
// An input is one byte and a stream. Bit 0 of the byte: a right answer to the hello comes before the stream. Bit 1: verify full.
// Bit 2: the stream is no stream but fields, from which whole pages with right checksums are built; chance would never find those.
// The reader's code is compiled in once more, with sockets that are connected already.
#define kvp_conn fuzzed_conn
#define kvp_conn_open fuzzed_conn_open
#define kvp_conn_pages_max fuzzed_conn_pages_max
#define kvp_conn_fetch fuzzed_conn_fetch
#define kvp_conn_shutdown fuzzed_conn_shutdown
#define kvp_conn_free fuzzed_conn_free
#define connect_to take_prepared_socket
#include "../src/connection.cpp"

#include "received_stream.hpp"

namespace kvpeer {

static Socket *prepared_socket = nullptr;

int take_prepared_socket(const SocketAddress &, uint64_t, Socket &out) {
  out = std::move(*prepared_socket);
  return KVP_OK;
}

namespace fuzz {
namespace {

constexpr size_t kInputBytesMax = 8192;
constexpr uint8_t kProducerId[KVP_AGENT_ID_BYTES] = {1};
constexpr uint8_t kReaderId[KVP_AGENT_ID_BYTES] = {2};
constexpr uint8_t kCapability[KVP_CAPABILITY_BYTES] = {3};

// What is asked for. The sizes are such that a part table and a payload can be confused.
constexpr uint32_t kNPages = 3;
constexpr uint32_t kSlots[kNPages] = {0, 1, 2};
constexpr uint32_t kGenerations[kNPages] = {1, 1, 2};
constexpr uint32_t kLengths[kNPages] = {16, 100, 1500};
constexpr uint8_t kKeys[kNPages * KVP_KEY_BYTES] = {};

void append(std::vector<uint8_t> &stream, const void *bytes, size_t n_bytes) {
  const auto *first = static_cast<const uint8_t *>(bytes);
  stream.insert(stream.end(), first, first + n_bytes);
}

void append_hello(std::vector<uint8_t> &stream) {
  tcp::HelloAnswer answer{tcp::kAnswerMagic, tcp::kVersion, tcp::HelloStatus::kOk, {}, kNPages, 0};
  std::copy_n(kProducerId, sizeof(kProducerId), answer.producer_id);
  append(stream, &answer, sizeof(answer));
}

// What is sent for the pages, in the order of a run.
struct Run {
  std::vector<uint8_t> fronts, payloads, trailers;
};

// One page as an honest producer sends it, but for what the input says is different.
void append_page(Run &run, Input &input, uint32_t idx) {
  const auto lies = input.take<uint8_t>();
  const auto n_parts = std::max<uint16_t>(1, input.take<uint8_t>() % (KVP_PARTS_MAX + 2));
  tcp::PagePrefix prefix{tcp::kPageMagic, tcp::PageStatus::kSent, n_parts, 1, idx};
  std::vector<uint8_t> payload(kLengths[idx], input.take<uint8_t>());
  std::vector<kvp_part> parts(std::max<size_t>(n_parts, KVP_PARTS_MAX));
  uint32_t end = 0;
  for (uint16_t part = 0; part < n_parts; ++part) {
    const uint32_t left = kLengths[idx] - end;
    const uint32_t length = part + 1 == n_parts ? left : std::min<uint32_t>(left, 1 + input.take<uint8_t>());
    parts[part] = {end, length, kvp_crc64(0, payload.data() + end, length)};
    end += length;
  }
  kvp_slot_header header{};
  header.state = KVP_SLOT_COMMITTED;
  header.n_parts = n_parts;
  header.generation = kGenerations[idx];
  header.length = kLengths[idx];
  header.checksum_algorithm = KVP_CRC64_NVME;
  std::copy_n(kProducerId, sizeof(kProducerId), header.run_id);
  if ((lies & 1) != 0) {
    parts[input.take<uint8_t>() % n_parts] = input.take<kvp_part>();
  }
  if ((lies & 2) != 0) {
    reinterpret_cast<uint8_t *>(&header)[input.take<uint8_t>() % sizeof(header)] ^= input.take<uint8_t>();
  }
  if ((lies & 4) != 0) {
    prefix.n_parts = input.take<uint16_t>();
  }
  if (header.n_parts <= KVP_PARTS_MAX) {
    seal_header(header, parts.data());
  }
  kvp_slot_header trailer = header;
  if ((lies & 8) != 0) {
    reinterpret_cast<uint8_t *>(&trailer)[input.take<uint8_t>() % sizeof(trailer)] ^= input.take<uint8_t>();
  }
  append(run.fronts, &prefix, sizeof(prefix));
  append(run.fronts, &header, sizeof(header));
  append(run.fronts, parts.data(), std::min<size_t>(prefix.n_parts, parts.size()) * sizeof(kvp_part));
  append(run.payloads, payload.data(), payload.size());
  append(run.trailers, &trailer, sizeof(trailer));
}

void append_run(std::vector<uint8_t> &stream, Input &input) {
  Run run;
  for (uint32_t idx = 0; idx < kNPages; ++idx) {
    append_page(run, input, idx);
  }
  for (const std::vector<uint8_t> *bytes : {&run.fronts, &run.payloads, &run.trailers}) {
    append(stream, bytes->data(), bytes->size());
  }
}

// Each page has an outcome, and a hit has a part table that covers it and fits to its bytes.
void check_outcomes(int verify, const uint8_t *outcomes, const uint16_t *n_parts, const kvp_part *parts,
                    const std::vector<uint8_t> *pages) {
  for (uint32_t idx = 0; idx < kNPages; ++idx) {
    KVP_PROMISE(outcomes[idx] <= KVP_REFUSED);
    if (outcomes[idx] != KVP_HIT) {
      continue;
    }
    uint64_t end = 0;
    for (uint16_t part = 0; part < n_parts[idx]; ++part) {
      const kvp_part &entry = parts[idx * KVP_PARTS_MAX + part];
      KVP_PROMISE(entry.offset == end && entry.length <= kLengths[idx] - end);
      KVP_PROMISE(verify != KVP_VERIFY_FULL || kvp_crc64(0, pages[idx].data() + end, entry.length) == entry.checksum);
      end += entry.length;
    }
    KVP_PROMISE(end == kLengths[idx]);
  }
}

void fetch(int verify, kvp_conn *conn) {
  std::vector<uint8_t> pages[kNPages];
  void *destinations[kNPages];
  for (uint32_t idx = 0; idx < kNPages; ++idx) {
    pages[idx].resize(kLengths[idx]);
    destinations[idx] = pages[idx].data();
  }
  std::vector<kvp_part> parts(kNPages * KVP_PARTS_MAX);
  uint16_t n_parts[kNPages];
  uint8_t outcomes[kNPages];
  const uint64_t n = std::min(kNPages, kvp_conn_pages_max(conn));
  std::fill_n(outcomes, kNPages, KVP_MISS);
  std::fill_n(n_parts, kNPages, uint16_t{0});
  const int rc = kvp_conn_fetch(conn, n, kSlots, kGenerations, kKeys, kLengths, destinations, verify, deadline_in_ms(kAmpleMs),
                                parts.data(), n_parts, outcomes);
  KVP_PROMISE(rc != KVP_ETIMEOUT && rc != KVP_EINVAL);
  check_outcomes(verify, outcomes, n_parts, parts.data(), pages);
}

}  // namespace
}  // namespace fuzz
}  // namespace kvpeer

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes) {
  if (n_bytes == 0 || n_bytes > fuzz::kInputBytesMax) {
    return 0;
  }
  const uint8_t mode = bytes[0];
  fuzz::Input input(bytes + 1, n_bytes - 1);
  std::vector<uint8_t> sent;
  if ((mode & 5) != 0) {
    fuzz::append_hello(sent);
  }
  if ((mode & 4) != 0) {
    fuzz::append_run(sent, input);
  }
  sent.insert(sent.end(), input.rest(), input.rest() + input.left());
  fuzz::ReceivedStream stream(sent.data(), sent.size());
  prepared_socket = &stream.near();
  kvp_conn *conn = nullptr;
  const int rc = kvp_conn_open("127.0.0.1", 1, fuzz::kCapability, fuzz::kReaderId, fuzz::kProducerId,
                               deadline_in_ms(fuzz::kAmpleMs), &conn);
  if (rc == KVP_OK) {
    fuzz::fetch((mode & 2) != 0 ? KVP_VERIFY_FULL : KVP_VERIFY_GENERATION, conn);
  }
  kvp_conn_free(conn);
  return 0;
}
