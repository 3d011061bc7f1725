// The negative control of the wrong-bytes tests: the reader's code once more, built without its header checks. Where the real one
// reports a stale page (reuse_test.cpp), this one must hit with wrong bytes; else that test proves nothing.
#define KVPEER_TEST_WITHOUT_HEADER_CHECKS
#define kvp_conn unchecked_conn
#define kvp_conn_open unchecked_conn_open
#define kvp_conn_pages_max unchecked_conn_pages_max
#define kvp_conn_fetch unchecked_conn_fetch
#define kvp_conn_shutdown unchecked_conn_shutdown
#define kvp_conn_free unchecked_conn_free
#include "../src/connection.cpp"

#include "tcp_fixture.hpp"  // its Reader makes the renamed calls

namespace kvpeer::testing {
namespace {

TEST(NegativeControl, WithoutHeaderChecksAReuseInTheMiddleOfASendIsAHitWithWrongBytes) {
  PagePool pool(1, Relay::kHeldPageBytes);
  Producer producer(pool);
  const Location page = pool.publish(0, 1);
  Relay relay(producer.port(), [&pool] { pool.publish(0, 2); });
  Reader reader;
  ASSERT_EQ(reader.open(relay.port(), producer.admit()), KVP_OK);
  const Fetched fetched = reader.fetch({page}, KVP_VERIFY_GENERATION);
  EXPECT_EQ(fetched.outcomes[0], KVP_HIT);
  EXPECT_FALSE(holds_page(page.key, fetched.pages[0]));
}

}  // namespace
}  // namespace kvpeer::testing
