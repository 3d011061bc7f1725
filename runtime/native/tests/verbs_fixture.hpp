// A producer's and a reader's RDMA device, connected by function calls. For the machine of `make test-rdma`.
#pragma once

#include <cstdlib>

#include "tcp_fixture.hpp"

namespace kvpeer::testing {

// The device to test with, or empty: there is none.
inline std::string rdma_device() {
  const char *name = std::getenv("KVPEER_TEST_RDMA_DEVICE");
  return name == nullptr ? "" : name;
}

class VerbsReader {
 public:
  explicit VerbsReader(const PagePool &producer_pool) : own_pool_(1, 4096) {
    producer_ = open(producer_pool);
    reader_ = open(own_pool_);
    kvp_verbs_endpoint reader_end{}, producer_end{};
    kvp_verbs_extent extent{};
    EXPECT_EQ(kvp_verbs_conn_create(reader_, kProducerId.data(), &reader_end, &conn_), KVP_OK);
    EXPECT_EQ(kvp_verbs_accept(producer_, kReaderId.data(), &reader_end, &producer_end), KVP_OK);
    EXPECT_EQ(kvp_verbs_conn_connect(conn_, &producer_end), KVP_OK);
    EXPECT_EQ(kvp_verbs_extents(producer_, 0, 1, &extent), 1);
    EXPECT_EQ(kvp_verbs_conn_learn(conn_, 0, 1, &extent), KVP_OK);
  }
  ~VerbsReader() {
    kvp_verbs_conn_free(conn_);
    kvp_verbs_close(reader_);
    kvp_verbs_close(producer_);
  }
  VerbsReader(const VerbsReader &) = delete;
  VerbsReader &operator=(const VerbsReader &) = delete;

  Fetched fetch(const std::vector<Location> &locations, int verify, uint32_t timeout_ms = kAmpleMs) {
    const auto registering = [this](kvp_verbs_conn *conn, uint64_t n, const uint32_t *slots, const uint32_t *generations,
                                    const uint8_t *keys, const uint32_t *lengths, void *const *destinations, auto... rest) {
      for (uint64_t i = 0; i < n; ++i) {
        EXPECT_EQ(kvp_verbs_register(reader_, destinations[i], lengths[i]), KVP_OK);
      }
      int32_t code = KVP_OK;
      const int rc = kvp_verbs_fetch(&conn, 1, &code, n, slots, generations, keys, lengths, destinations, rest...);
      for (uint64_t i = 0; i < n; ++i) {
        EXPECT_EQ(kvp_verbs_unregister(reader_, destinations[i]), KVP_OK);
      }
      return rc;
    };
    return fetch_with(registering, conn_, locations, verify, deadline_in_ms(timeout_ms));
  }
  kvp_verbs_conn *get() const { return conn_; }

 private:
  static kvp_verbs *open(const PagePool &pool) {
    const std::string device = rdma_device();
    const kvp_verbs_settings settings{device.c_str(), -1, 4, 4};
    std::array<char, 256> reason{};
    kvp_verbs *opened = nullptr;
    EXPECT_EQ(kvp_verbs_open(pool.get(), &settings, reason.data(), reason.size(), &opened), KVP_OK) << reason.data();
    return opened;
  }

  PagePool own_pool_;
  kvp_verbs *producer_ = nullptr;
  kvp_verbs *reader_ = nullptr;
  kvp_verbs_conn *conn_ = nullptr;
};

}  // namespace kvpeer::testing
