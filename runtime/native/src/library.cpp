// What the library says about itself: ABI version, build, errno of the last failure.
#include <array>
#include <cerrno>
#include <cstdio>

#include "checksum.hpp"
#include "errors.hpp"
#include "kvpeer/kvpeer.h"

#ifndef KVPEER_VERSION
#error "the build defines KVPEER_VERSION"
#endif

#if defined(__SANITIZE_THREAD__)
#define KVPEER_SANITIZER "thread"
#elif defined(__SANITIZE_ADDRESS__)
#define KVPEER_SANITIZER "address"
#else
#define KVPEER_SANITIZER "none"
#endif

namespace {

thread_local int last_errno = 0;

constexpr std::size_t kBuildInfoBytes = 160;

}  // namespace

namespace kvpeer {

int failed_with(int error) noexcept {
  last_errno = error;
  return error == ENOMEM ? KVP_ENOMEM : KVP_ESYS;
}

}  // namespace kvpeer

extern "C" {

uint32_t kvp_abi_version(void) { return KVP_ABI_VERSION; }

int kvp_last_errno(void) { return last_errno; }

const char *kvp_build_info(void) {
  static const std::array<char, kBuildInfoBytes> text = [] {
    std::array<char, kBuildInfoBytes> out{};
    std::snprintf(out.data(), out.size(), "kvpeer %s; gcc %s; sanitizer %s; checksum %s", KVPEER_VERSION, __VERSION__,
                  KVPEER_SANITIZER, kvpeer::crc64_implementation_name());
    return out;
  }();
  return text.data();
}

}  // extern "C"
