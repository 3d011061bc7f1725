// The byte layout of the data connection (docs/formats.md has the byte tables). Integers are little endian, structs have no
// padding, and every size is fixed here: a receiver always knows how many bytes come next before it reads them.
//
//   reader                                             producer
//   Hello                                         ->
//                                                 <-   HelloAnswer            (refused: the producer closes)
//   RequestHeader, n_pages x RequestPage          ->
//                                                 <-   the pages in the order asked, cut into runs; per run:
//                                                        fronts: PagePrefix; when it says SENT also slot header (64)
//                                                        and part table (n_parts x 16)
//                                                        payloads of the SENT pages (the lengths asked for)
//                                                        trailers: their slot headers again (64 each)
//
// One request is in flight on a connection. Anything unexpected ends the connection: there is no resynchronisation.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "kvpeer/kvpeer.h"

namespace kvpeer::tcp {

static_assert(std::endian::native == std::endian::little, "structs are sent as they lie in memory");

inline constexpr uint32_t kHelloMagic = 0x4850564bu;    // "KVPH"
inline constexpr uint32_t kAnswerMagic = 0x4150564bu;   // "KVPA"
inline constexpr uint32_t kRequestMagic = 0x5250564bu;  // "KVPR"
inline constexpr uint32_t kPageMagic = 0x5050564bu;     // "KVPP"
inline constexpr uint16_t kVersion = 1;

// Pages of one request, whatever the limits of a server say: 32 bytes each, so 2 MiB of request at most.
inline constexpr uint32_t kRequestPagesMax = 65536;

// The payloads of a run go out in one system call and are received by few. A run ends with the page that makes it full, or with the
// request: both sides see from lengths and statuses where. Large pages make a run each, so that none waits long for its trailer.
inline constexpr uint32_t kRunPagesMax = 16;
inline constexpr uint64_t kRunBytes = 1 << 20;

// True when no further page belongs to a run of n_sent pages with n_bytes of payload.
constexpr bool is_run_full(uint32_t n_sent, uint64_t n_bytes) { return n_sent >= kRunPagesMax || n_bytes >= kRunBytes; }

enum class HelloStatus : uint16_t { kOk = 0, kRefused = 1 };

enum class PageStatus : uint16_t {
  kSent = 0,     // header and part table follow, and later in the run payload and trailer
  kStale = 1,    // the slot does not hold this page (any more); nothing follows
  kRefused = 2,  // the producer declines; nothing follows
};

struct Hello {
  uint32_t magic;
  uint16_t version;
  uint16_t reserved;
  uint8_t capability[KVP_CAPABILITY_BYTES];
  uint8_t reader_id[KVP_AGENT_ID_BYTES];
  uint8_t producer_id[KVP_AGENT_ID_BYTES];  // whom the reader means to talk to
};

struct HelloAnswer {
  uint32_t magic;
  uint16_t version;
  HelloStatus status;
  uint8_t producer_id[KVP_AGENT_ID_BYTES];  // zero when refused
  uint32_t pages_max;                       // per request; zero when refused
  uint32_t reserved;
};

struct RequestHeader {
  uint32_t magic;
  uint32_t request_id;  // the reader's counter; every page of the answer repeats it
  uint32_t n_pages;     // 1..pages_max
  uint32_t reserved;
};

struct RequestPage {
  uint32_t slot;
  uint32_t generation;
  uint8_t key[KVP_KEY_BYTES];
  uint32_t length;  // page bytes, and exactly the payload bytes of the answer
  uint32_t reserved;
};

struct PagePrefix {
  uint32_t magic;
  PageStatus status;
  uint16_t n_parts;  // 1..KVP_PARTS_MAX when SENT, else 0
  uint32_t request_id;
  uint32_t page_idx;  // place in the request
};

static_assert(sizeof(Hello) == 72 && std::has_unique_object_representations_v<Hello>);
static_assert(sizeof(HelloAnswer) == 32 && std::has_unique_object_representations_v<HelloAnswer>);
static_assert(sizeof(RequestHeader) == 16 && std::has_unique_object_representations_v<RequestHeader>);
static_assert(sizeof(RequestPage) == 32 && std::has_unique_object_representations_v<RequestPage>);
static_assert(sizeof(PagePrefix) == 16 && std::has_unique_object_representations_v<PagePrefix>);
static_assert(sizeof(kvp_slot_header) == KVP_HEADER_BYTES && sizeof(kvp_part) == KVP_PART_ENTRY_BYTES);

}  // namespace kvpeer::tcp
