// Every implementation is CRC-64/NVME, alone and fused with a copy, whatever the length, the alignment and the cuts.
#include "checksum.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "kvpeer/kvpeer.h"

namespace {

constexpr std::uint64_t kCheckValue = 0xae8b14860a799888;  // of "123456789", from the algorithm's catalogue entry
constexpr std::size_t kLengthMax = 3000;                    // several turns of the widest loop, and every tail
constexpr std::byte kUntouched{0xee};

// One bit at a time, straight from the definition.
std::uint64_t crc64_bitwise(std::uint64_t crc, const std::byte *source, std::size_t n_bytes) {
  crc = ~crc;
  for (std::size_t idx = 0; idx < n_bytes; ++idx) {
    crc ^= static_cast<std::uint64_t>(source[idx]);
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x9a6c9329ac4bc9b5 : 0);
    }
  }
  return ~crc;
}

std::vector<std::byte> random_bytes(std::mt19937_64 &random, std::size_t n_bytes) {
  std::vector<std::byte> bytes(n_bytes);
  for (std::byte &byte : bytes) {
    byte = static_cast<std::byte>(random());
  }
  return bytes;
}

class EveryImplementation : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (kvp_crc64_select(GetParam()) != KVP_OK) {
      GTEST_SKIP() << "this CPU lacks implementation " << GetParam();
    }
  }
  void TearDown() override { kvp_crc64_select(0); }

  std::mt19937_64 random_{20240607};
};

TEST_P(EveryImplementation, GivesTheCheckValue) {
  constexpr std::string_view kDigits = "123456789";
  EXPECT_EQ(kvp_crc64(0, kDigits.data(), kDigits.size()), kCheckValue);
}

TEST_P(EveryImplementation, OfNothingIsTheCrcSoFar) {
  EXPECT_EQ(kvp_crc64(0, nullptr, 0), 0u);
  EXPECT_EQ(kvp_crc64(kCheckValue, nullptr, 0), kCheckValue);
  EXPECT_EQ(kvp_copy_crc64(kCheckValue, nullptr, nullptr, 0), kCheckValue);
}

TEST_P(EveryImplementation, EqualsTheDefinitionAtEveryLength) {
  const std::vector<std::byte> bytes = random_bytes(random_, kLengthMax + 64);
  for (std::size_t length = 0; length <= kLengthMax; ++length) {
    const std::byte *source = bytes.data() + random_() % 64;
    ASSERT_EQ(kvp_crc64(0, source, length), crc64_bitwise(0, source, length)) << "length " << length;
  }
}

TEST_P(EveryImplementation, GoesOnWhereItStopped) {
  const std::vector<std::byte> bytes = random_bytes(random_, kLengthMax);
  const std::uint64_t whole = kvp_crc64(0, bytes.data(), bytes.size());
  for (int round = 0; round < 500; ++round) {
    const std::size_t cut = random_() % (bytes.size() + 1);
    const std::uint64_t first = kvp_crc64(0, bytes.data(), cut);
    ASSERT_EQ(kvp_crc64(first, bytes.data() + cut, bytes.size() - cut), whole) << "cut at " << cut;
  }
}

TEST_P(EveryImplementation, CopiesExactlyWhatItSums) {
  const std::vector<std::byte> source = random_bytes(random_, kLengthMax + 128);
  std::vector<std::byte> destination(source.size() + 128);
  for (const kvpeer::Store store : {kvpeer::Store::kCached, kvpeer::Store::kStreaming}) {
    for (std::size_t length = 0; length <= kLengthMax; ++length) {
      const std::byte *from = source.data() + random_() % 128;
      std::fill(destination.begin(), destination.end(), kUntouched);
      std::byte *to = destination.data() + 64 + random_() % 64;
      const std::uint64_t crc = kvpeer::copy_crc64(7, to, from, length, store);
      kvpeer::finish_streaming();
      ASSERT_EQ(crc, crc64_bitwise(7, from, length)) << "length " << length;
      ASSERT_TRUE(length == 0 || std::memcmp(to, from, length) == 0) << "length " << length;
      ASSERT_EQ(*(to - 1), kUntouched) << "wrote before the destination, length " << length;
      ASSERT_EQ(*(to + length), kUntouched) << "wrote behind the destination, length " << length;
    }
  }
}

TEST_P(EveryImplementation, AgreesWithTheTableOnLargeCopies) {
  const std::vector<std::byte> source = random_bytes(random_, (3u << 20) + 77);
  std::vector<std::byte> destination(source.size());
  const std::uint64_t crc = kvp_copy_crc64(0, destination.data(), source.data(), source.size());
  ASSERT_EQ(kvp_crc64_select(1), KVP_OK);
  EXPECT_EQ(crc, kvp_crc64(0, source.data(), source.size()));
  EXPECT_EQ(source, destination);
}

std::string implementation_name(const testing::TestParamInfo<int> &info) {
  constexpr const char *kNames[] = {"table", "pclmul", "vpclmul"};
  return kNames[info.param - 1];
}

INSTANTIATE_TEST_SUITE_P(Checksum, EveryImplementation, testing::Values(1, 2, 3), implementation_name);

TEST(Checksum, RefusesUnknownImplementations) {
  EXPECT_EQ(kvp_crc64_select(-1), KVP_EINVAL);
  EXPECT_EQ(kvp_crc64_select(4), KVP_EINVAL);
  EXPECT_EQ(kvp_crc64_select(0), KVP_OK);
}

TEST(Copy, MovesExactlyItsBytes) {
  std::mt19937_64 random{7};
  const std::vector<std::byte> source = random_bytes(random, 1200);
  for (const kvpeer::Store store : {kvpeer::Store::kCached, kvpeer::Store::kStreaming}) {
    for (std::size_t length = 0; length <= 1000; ++length) {
      std::vector<std::byte> destination(1200, kUntouched);
      std::byte *to = destination.data() + 1 + random() % 64;
      kvpeer::copy(to, source.data() + 3, length, store);
      kvpeer::finish_streaming();
      ASSERT_TRUE(length == 0 || std::memcmp(to, source.data() + 3, length) == 0) << "length " << length;
      ASSERT_EQ(*(to - 1), kUntouched);
      ASSERT_EQ(*(to + length), kUntouched);
    }
  }
}

}  // namespace
