// What a reader sends to the data server: hello, capability, requests. An input is one byte and a stream; bit 0 of the byte says
// that a right hello comes before the stream, so that the requests behind it are reached too.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include "pool.hpp"
#include "received_stream.hpp"
#include "server_admission.hpp"
#include "server_session.hpp"
#include "slot_header.hpp"

namespace kvpeer::fuzz {
namespace {

constexpr uint64_t kExtentBytes = 1 << 20;
constexpr uint32_t kSlotBytes = 64 << 10;
constexpr uint32_t kNPages = 3;
constexpr kvp_server_limits kLimits{1, 8, kAmpleMs, kAmpleMs, kAmpleMs};
constexpr size_t kInputBytesMax = 2048;  // as many answers as the socket's buffer has room for

constexpr AgentId kProducerId{1};
constexpr AgentId kReaderId{2};
constexpr Capability kCapability{3};

uint32_t length_of(uint32_t slot) { return 64 + 100 * slot; }
uint8_t filling_of(uint32_t slot) { return static_cast<uint8_t>(0xa0 + slot); }
std::array<uint8_t, KVP_KEY_BYTES> key_of(uint32_t slot) { return {static_cast<uint8_t>(slot + 1)}; }

// A pool whose first slots hold pages of generation 1; the slot behind them is being written, one more was withdrawn.
kvp_pool &pool() {
  static const std::unique_ptr<kvp_pool> pool = [] {
    std::unique_ptr<kvp_pool> out;
    KVP_PROMISE(kvp_pool::create(kExtentBytes, kExtentBytes, 0, kProducerId.data(), out) == KVP_OK);
    KVP_PROMISE(out->touch_extent(0) == KVP_OK && out->assign_extent(0, kSlotBytes) == KVP_OK);
    for (uint32_t slot = 0; slot < kNPages + 2; ++slot) {
      const uint32_t generation = 1;
      std::memset(out->slot_address(slot), filling_of(slot), kSlotBytes);
      KVP_PROMISE(out->mark_writing(1, &slot, &generation) == KVP_OK);
      if (slot < kNPages) {
        const kvp_part part{0, length_of(slot), 0};
        KVP_PROMISE(out->mark_committed(1, &slot, &generation, key_of(slot).data(), 1, &part) == KVP_OK);
      }
    }
    const uint32_t withdrawn = kNPages + 1, generation = 1;
    KVP_PROMISE(out->mark_withdrawn(1, &withdrawn, &generation) == KVP_OK);
    return out;
  }();
  return *pool;
}

tcp::Hello right_hello() {
  tcp::Hello hello{tcp::kHelloMagic, tcp::kVersion, 0, {}, {}, {}};
  std::copy(kCapability.begin(), kCapability.end(), hello.capability);
  std::copy(kReaderId.begin(), kReaderId.end(), hello.reader_id);
  std::copy(kProducerId.begin(), kProducerId.end(), hello.producer_id);
  return hello;
}

// The fronts of one run, up to the page that fills it or the last one of its request: the headers of the pages that are sent.
std::vector<kvp_slot_header> take_fronts(Input &input, uint32_t n_pages, uint32_t &next) {
  std::vector<kvp_slot_header> headers;
  uint64_t n_bytes = 0;
  for (; next < n_pages && !tcp::is_run_full(headers.size(), n_bytes); ++next) {
    const auto prefix = input.take<tcp::PagePrefix>();
    KVP_PROMISE(prefix.magic == tcp::kPageMagic && prefix.page_idx == next);
    if (prefix.status == tcp::PageStatus::kSent) {
      headers.push_back(input.take<kvp_slot_header>());
      input.take<kvp_part>();
      n_bytes += headers.back().length;
    }
  }
  return headers;
}

// Only bytes of committed pages leave the pool, each with the header that says so.
void check_answers(const std::vector<uint32_t> &requests, const std::vector<uint8_t> &answers) {
  Input input(answers.data(), answers.size());
  if (input.left() == 0) {
    return;
  }
  const auto hello = input.take<tcp::HelloAnswer>();
  KVP_PROMISE(hello.magic == tcp::kAnswerMagic);
  KVP_PROMISE(hello.status == tcp::HelloStatus::kOk || input.left() == 0);
  for (const uint32_t n_pages : requests) {
    for (uint32_t next = 0; next < n_pages && input.left() > 0;) {
      const std::vector<kvp_slot_header> headers = take_fronts(input, n_pages, next);
      for (const kvp_slot_header &header : headers) {
        const uint32_t slot = header.key[0] - 1u;
        KVP_PROMISE(slot < kNPages && header.state == KVP_SLOT_COMMITTED && header.length == length_of(slot));
        for (uint32_t idx = 0; idx < header.length; ++idx) {
          KVP_PROMISE(input.take<uint8_t>() == filling_of(slot));
        }
      }
      for (const kvp_slot_header &header : headers) {
        KVP_PROMISE(same_header(header, input.take<kvp_slot_header>()));
      }
    }
  }
  KVP_PROMISE(input.left() == 0);
}

// How many pages each whole request of a stream asks for, as far as the server follows it.
std::vector<uint32_t> requests_of(const std::vector<uint8_t> &sent) {
  std::vector<uint32_t> requests;
  Input input(sent.data(), sent.size());
  input.take<tcp::Hello>();
  while (input.left() >= sizeof(tcp::RequestHeader)) {
    const auto request = input.take<tcp::RequestHeader>();
    const bool is_followed = request.magic == tcp::kRequestMagic && request.n_pages > 0 && request.n_pages <= kLimits.pages_max;
    if (!is_followed || input.left() < request.n_pages * sizeof(tcp::RequestPage)) {
      break;
    }
    requests.push_back(request.n_pages);
    for (uint32_t idx = 0; idx < request.n_pages; ++idx) {
      input.take<tcp::RequestPage>();
    }
  }
  return requests;
}

}  // namespace
}  // namespace kvpeer::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes) {
  using namespace kvpeer;
  if (n_bytes == 0 || n_bytes > fuzz::kInputBytesMax) {
    return 0;
  }
  std::vector<uint8_t> sent;
  if ((bytes[0] & 1) != 0) {
    const tcp::Hello hello = fuzz::right_hello();
    sent.assign(reinterpret_cast<const uint8_t *>(&hello), reinterpret_cast<const uint8_t *>(&hello + 1));
  }
  sent.insert(sent.end(), bytes + 1, bytes + n_bytes);
  fuzz::ReceivedStream stream(sent.data(), sent.size());
  AdmissionTable admissions;
  KVP_PROMISE(admissions.admit(fuzz::kCapability, fuzz::kReaderId, UINT64_MAX, 0) == KVP_OK);
  ServerCounters counters;
  ServerSession session(stream.near().fd(), fuzz::pool(), fuzz::kLimits, counters);
  session.run([&admissions](const tcp::Hello &hello) {
    Capability capability;
    AgentId reader_id;
    std::copy_n(hello.capability, capability.size(), capability.begin());
    std::copy_n(hello.reader_id, reader_id.size(), reader_id.begin());
    const bool is_admitted = admissions.redeem(capability, reader_id, 0);
    KVP_PROMISE(!is_admitted || (capability == fuzz::kCapability && reader_id == fuzz::kReaderId));
    return is_admitted;
  });
  fuzz::check_answers(fuzz::requests_of(sent), stream.answered());
  return 0;
}
