// The negative control of the wrong-bytes tests by verbs: the reader's code once more, built without its header checks. Where the real
// one reports stale pages (verbs_test.cpp), this one must hit with wrong bytes; else that test proves nothing.
#define KVPEER_TEST_WITHOUT_HEADER_CHECKS
#define kvp_verbs_conn unchecked_verbs_conn
#define kvp_verbs_conn_create unchecked_verbs_conn_create
#define kvp_verbs_conn_connect unchecked_verbs_conn_connect
#define kvp_verbs_conn_learn unchecked_verbs_conn_learn
#define kvp_verbs_conn_knows unchecked_verbs_conn_knows
#define kvp_verbs_conn_probe unchecked_verbs_conn_probe
#define kvp_verbs_fetch unchecked_verbs_fetch
#define kvp_verbs_conn_fault unchecked_verbs_conn_fault
#define kvp_verbs_conn_shutdown unchecked_verbs_conn_shutdown
#define kvp_verbs_conn_free unchecked_verbs_conn_free
#include "../src/verbs_connection.cpp"
#include "../src/verbs_fetch.cpp"

#include "verbs_fixture.hpp"  // its reader makes the renamed calls

namespace kvpeer::testing {
namespace {

TEST(VerbsNegativeControl, WithoutHeaderChecksReuseUnderReadsIsAHitWithWrongBytes) {
  if (rdma_device().empty()) {
    GTEST_SKIP() << "needs an RDMA device: make test-rdma";
  }
  PagePool pool(kChurnSlots, kChurnBytes);
  VerbsReader reader(pool);
  Churn churn(pool);
  EXPECT_TRUE(eventually([&] {
    const std::vector<Location> locations = churn.locations();
    const Fetched fetched = reader.fetch(locations, KVP_VERIFY_GENERATION);
    for (size_t page = 0; page < locations.size(); ++page) {
      if (fetched.outcomes[page] == KVP_HIT && !holds_page(locations[page].key, fetched.pages[page])) {
        return true;
      }
    }
    return false;
  }));
}

}  // namespace
}  // namespace kvpeer::testing
