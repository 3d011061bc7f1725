// A pool, a client's map of it, and pages whose content says which generation wrote them.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <vector>

#include "kvpeer/kvpeer.h"

namespace kvpeer_test {

constexpr std::uint64_t kExtentBytes = 1u << 20;
constexpr std::uint64_t kExtents = 4;

using Bytes16 = std::array<std::uint8_t, 16>;

constexpr Bytes16 bytes16(std::uint32_t seed) {
  Bytes16 bytes{};
  for (std::size_t idx = 0; idx < bytes.size(); ++idx) {
    seed = seed * 1664525u + 1013904223u;
    bytes[idx] = static_cast<std::uint8_t>(seed >> 24);
  }
  return bytes;
}

constexpr Bytes16 kRunId = bytes16(1);

// One pool with all extents touched, none assigned.
class PoolTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(kvp_pool_create(kExtents * kExtentBytes, kExtentBytes, 0, kRunId.data(), &pool_), KVP_OK);
    ASSERT_EQ(kvp_pool_fds(pool_, &payload_fd_, &header_fd_), KVP_OK);
    for (std::uint32_t extent = 0; extent < kExtents; ++extent) {
      ASSERT_EQ(kvp_pool_touch_extent(pool_, extent), KVP_OK);
    }
  }
  void TearDown() override { kvp_pool_destroy(pool_); }

  int mark_writing(std::uint32_t slot, std::uint32_t generation) { return kvp_pool_mark_writing(pool_, 1, &slot, &generation); }
  int mark_withdrawn(std::uint32_t slot, std::uint32_t generation) {
    return kvp_pool_mark_withdrawn(pool_, 1, &slot, &generation);
  }
  int mark_committed(std::uint32_t slot, std::uint32_t generation, const Bytes16 &key, const std::vector<kvp_part> &parts) {
    return kvp_pool_mark_committed(pool_, 1, &slot, &generation, key.data(), static_cast<std::uint32_t>(parts.size()),
                                   parts.data());
  }

  kvp_pool *pool_ = nullptr;
  int payload_fd_ = -1;
  int header_fd_ = -1;
};

}  // namespace kvpeer_test
