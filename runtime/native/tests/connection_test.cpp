// Whatever a producer sends, or does not send, a fetch ends by its deadline and believes only what it verified.
#include <poll.h>

#include <functional>
#include <string>
#include <tuple>

#include "acted_producer.hpp"

namespace kvpeer::testing {
namespace {

constexpr uint32_t kShortMs = 100;
constexpr uint64_t kNsPerMs = 1'000'000;
// How much later than its deadline a call may return on a busy machine.
constexpr uint64_t kToleranceMs = 400;

// ---- one lie at a time -------------------------------------------------------------------------------------------------

struct Lie {
  const char *name;
  std::function<void(Answer &)> tell;
  int rc;
  uint8_t outcome_full;
  uint8_t outcome_generation;
};

const Lie kLies[] = {
    {"Nothing", [](Answer &) {}, KVP_OK, KVP_HIT, KVP_HIT},
    {"FlippedPayloadByte", [](Answer &a) { a.bytes()[kLength - 1] ^= 1; }, KVP_OK, KVP_CORRUPT, KVP_HIT},
    {"FlippedFirstByte", [](Answer &a) { a.bytes()[0] ^= 1; }, KVP_OK, KVP_CORRUPT, KVP_HIT},
    {"OldGeneration", [](Answer &a) { a.header.generation = 6; a.seal(); }, KVP_OK, KVP_STALE, KVP_STALE},
    {"WrongKey", [](Answer &a) { a.header.key[5] ^= 1; a.seal(); }, KVP_OK, KVP_STALE, KVP_STALE},
    {"OtherRun", [](Answer &a) { a.header.run_id[0] ^= 1; a.seal(); }, KVP_OK, KVP_STALE, KVP_STALE},
    {"NotCommitted", [](Answer &a) { a.header.state = KVP_SLOT_WRITING; a.seal(); }, KVP_OK, KVP_STALE, KVP_STALE},
    {"WithdrawnWhileSent", [](Answer &a) { a.trailer.state = KVP_SLOT_WITHDRAWN; }, KVP_OK, KVP_STALE, KVP_STALE},
    {"ReusedWhileSent", [](Answer &a) { a.trailer.generation += 1; }, KVP_OK, KVP_STALE, KVP_STALE},
    {"CorruptAndReused", [](Answer &a) { a.bytes()[9] ^= 1; a.trailer.generation += 1; }, KVP_OK, KVP_STALE, KVP_STALE},
    {"HeaderChecksum", [](Answer &a) { a.header.header_checksum ^= 1; a.trailer = a.header; }, KVP_OK, KVP_STALE, KVP_STALE},
    {"TableChecksum", [](Answer &a) { a.parts[1].checksum ^= 1; }, KVP_OK, KVP_STALE, KVP_STALE},
    {"UnknownAlgorithm", [](Answer &a) { a.header.checksum_algorithm = 9; a.seal(); }, KVP_OK, KVP_STALE, KVP_STALE},
    {"PartsOverlap", [](Answer &a) { a.parts[1].offset -= 8; a.seal(); }, KVP_OK, KVP_STALE, KVP_STALE},
    {"PartsEndEarly", [](Answer &a) { a.parts[3].length -= 8; a.seal(); }, KVP_OK, KVP_STALE, KVP_STALE},
    {"PartsEndLate", [](Answer &a) { a.parts[3].length += 8; a.seal(); }, KVP_OK, KVP_STALE, KVP_STALE},
    {"PartsWrapAround", [](Answer &a) { a.parts[3].length = 0xffffffffu; a.seal(); }, KVP_OK, KVP_STALE, KVP_STALE},
    {"EmptyPart", [](Answer &a) { a.parts[0] = {0, 0, 0}; a.parts[1] = {0, kLength / 2, 0}; a.seal(); }, KVP_OK, KVP_STALE,
     KVP_STALE},
    {"WrongLength", [](Answer &a) { a.header.length = 4096; a.seal(); }, KVP_EPROTO, KVP_MISS, KVP_MISS},
    {"HugeLength", [](Answer &a) { a.header.length = 0xffffffffu; a.seal(); }, KVP_EPROTO, KVP_MISS, KVP_MISS},
    {"HugePartCount", [](Answer &a) { a.prefix.n_parts = 0xffff; }, KVP_EPROTO, KVP_MISS, KVP_MISS},
    {"NoParts", [](Answer &a) { a.prefix.n_parts = 0; }, KVP_EPROTO, KVP_MISS, KVP_MISS},
    {"TwoPartCounts", [](Answer &a) { a.header.n_parts = 64; a.seal(); }, KVP_EPROTO, KVP_MISS, KVP_MISS},
    {"BadMagic", [](Answer &a) { a.prefix.magic = 0; }, KVP_EPROTO, KVP_MISS, KVP_MISS},
    {"UnknownStatus", [](Answer &a) { a.prefix.status = static_cast<tcp::PageStatus>(77); }, KVP_EPROTO, KVP_MISS, KVP_MISS},
    {"OtherRequest", [](Answer &a) { a.prefix.request_id = 2; }, KVP_EPROTO, KVP_MISS, KVP_MISS},
    {"OtherPage", [](Answer &a) { a.prefix.page_idx = 1; }, KVP_EPROTO, KVP_MISS, KVP_MISS},
};

class LyingProducer : public ::testing::TestWithParam<std::tuple<Lie, int>> {};

INSTANTIATE_TEST_SUITE_P(, LyingProducer,
                         ::testing::Combine(::testing::ValuesIn(kLies),
                                            ::testing::Values(KVP_VERIFY_GENERATION, KVP_VERIFY_FULL)),
                         [](const auto &info) {
                           return std::string(std::get<0>(info.param).name) +
                                  (std::get<1>(info.param) == KVP_VERIFY_FULL ? "Full" : "Generation");
                         });

TEST_P(LyingProducer, IsNeverBelieved) {
  const auto &[lie, verify] = GetParam();
  Answer answer(kPage);
  lie.tell(answer);
  Actor actor([&answer](Stage &stage) {
    stage.greet();
    stage.take_request(1);
    stage.send(answer);
    stage.await_end();
  });
  Reader reader;
  ASSERT_EQ(open(reader, actor), KVP_OK);
  const Fetched fetched = reader.fetch({kPage}, verify);
  EXPECT_EQ(fetched.rc, lie.rc);
  EXPECT_EQ(fetched.outcomes[0], verify == KVP_VERIFY_FULL ? lie.outcome_full : lie.outcome_generation);
  EXPECT_EQ(fetched.n_parts[0], fetched.outcomes[0] == KVP_HIT ? kNParts : 0);
  if (lie.rc != KVP_OK) {
    EXPECT_EQ(reader.fetch({kPage}, verify).rc, KVP_ECLOSED) << "a broken connection is never used again";
  }
  kvp_conn_shutdown(reader.get());
}

// ---- streams that end, stall or go on --------------------------------------------------------------------------------------

TEST(Connection, KeepsItsAnswersApartWhenPagesHitGoStaleAndAreRefused) {
  Actor actor([](Stage &stage) {
    stage.greet();
    stage.take_request(4);
    Answer first(kPage), last(kPage);
    last.prefix.page_idx = 3;
    stage.send_front(first);
    const tcp::PagePrefix stale{tcp::kPageMagic, tcp::PageStatus::kStale, 0, 1, 1};
    const tcp::PagePrefix refused{tcp::kPageMagic, tcp::PageStatus::kRefused, 0, 1, 2};
    stage.send(&stale, sizeof(stale));
    stage.send(&refused, sizeof(refused));
    stage.send_front(last);
    for (const Answer *answer : {&first, &last}) {
      stage.send(answer->payload.data(), kLength);
    }
    for (const Answer *answer : {&first, &last}) {
      stage.send(&answer->trailer, sizeof(answer->trailer));
    }
    stage.await_end();
  });
  Reader reader;
  ASSERT_EQ(open(reader, actor), KVP_OK);
  const Fetched fetched = reader.fetch({kPage, kPage, kPage, kPage});
  EXPECT_EQ(fetched.rc, KVP_OK);
  EXPECT_EQ(fetched.outcomes, (std::vector<uint8_t>{KVP_HIT, KVP_STALE, KVP_REFUSED, KVP_HIT}));
  EXPECT_TRUE(holds_page(kPage.key, fetched.pages[3]));
  kvp_conn_shutdown(reader.get());
}

TEST(Connection, JudgesEachPageOfARunByItsOwnHeadersAndBytes) {
  Actor actor([](Stage &stage) {
    stage.greet();
    stage.take_request(5);
    std::vector<Answer> answers = answers_to(5);
    answers[1].trailer.generation += 1;
    answers[2].bytes()[kLength - 1] ^= 1;
    answers[3].header.key[0] ^= 1;
    answers[3].seal();
    stage.send_run(answers);
    stage.await_end();
  });
  Reader reader;
  ASSERT_EQ(open(reader, actor), KVP_OK);
  const Fetched fetched = reader.fetch(std::vector<Location>(5, kPage));
  EXPECT_EQ(fetched.rc, KVP_OK);
  EXPECT_EQ(fetched.outcomes, (std::vector<uint8_t>{KVP_HIT, KVP_STALE, KVP_CORRUPT, KVP_STALE, KVP_HIT}));
  EXPECT_TRUE(holds_page(kPage.key, fetched.pages[4]));
  kvp_conn_shutdown(reader.get());
}

TEST(Connection, ReportsPagesOfRunsBeforeATruncationAndNoneOfTheRunThatBreaksOff) {
  Actor actor([](Stage &stage) {
    stage.greet();
    stage.take_request(tcp::kRunPagesMax + 3);
    stage.send_run(answers_to(tcp::kRunPagesMax));
    const std::vector<Answer> cut_off = answers_to(3, tcp::kRunPagesMax);
    for (const Answer &answer : cut_off) {
      stage.send_front(answer);
    }
    for (const Answer &answer : cut_off) {
      stage.send(answer.payload.data(), kLength);
    }
    stage.send(&cut_off[0].trailer, sizeof(cut_off[0].trailer) - 1);
    stage.close();
  });
  Reader reader;
  ASSERT_EQ(open(reader, actor), KVP_OK);
  const Fetched fetched = reader.fetch(std::vector<Location>(tcp::kRunPagesMax + 3, kPage));
  EXPECT_EQ(fetched.rc, KVP_ECLOSED);
  std::vector<uint8_t> expected(tcp::kRunPagesMax + 3, KVP_MISS);
  std::fill_n(expected.begin(), tcp::kRunPagesMax, KVP_HIT);
  EXPECT_EQ(fetched.outcomes, expected);
}

TEST(Connection, EndsWhenAFrontComesWhereTheRunIsFull) {
  Actor actor([](Stage &stage) {
    stage.greet();
    stage.take_request(tcp::kRunPagesMax + 1);
    stage.send_run(answers_to(tcp::kRunPagesMax + 1));
    stage.await_end();
  });
  Reader reader;
  ASSERT_EQ(open(reader, actor), KVP_OK);
  const Fetched fetched = reader.fetch(std::vector<Location>(tcp::kRunPagesMax + 1, kPage));
  EXPECT_EQ(fetched.rc, KVP_EPROTO);
  EXPECT_NE(fetched.outcomes[tcp::kRunPagesMax], KVP_HIT);
}

TEST(Connection, RefusesBytesThatNobodyAskedFor) {
  Actor actor([](Stage &stage) {
    stage.greet();
    stage.take_request(1);
    Answer answer(kPage);
    std::vector<uint8_t> all(sizeof(answer.trailer) + 1);
    std::memcpy(all.data(), &answer.trailer, sizeof(answer.trailer));
    // Trailer and the byte too many in one piece, so that they arrive together.
    stage.send_front(answer);
    stage.send(answer.payload.data(), kLength);
    stage.send(all.data(), all.size());
    stage.await_end();
  });
  Reader reader;
  ASSERT_EQ(open(reader, actor), KVP_OK);
  EXPECT_EQ(reader.fetch({kPage}).rc, KVP_EPROTO);
}

// Runs the fetch and checks that it ended at its deadline, neither before nor long after.
void expect_timeout(Reader &reader) {
  const uint64_t start_ns = now_ns();
  const Fetched fetched = reader.fetch({kPage}, KVP_VERIFY_FULL, kShortMs);
  const uint64_t took_ns = now_ns() - start_ns;
  EXPECT_EQ(fetched.rc, KVP_ETIMEOUT);
  EXPECT_EQ(fetched.outcomes[0], KVP_TIMEOUT);
  EXPECT_GE(took_ns, kShortMs * kNsPerMs);
  EXPECT_LT(took_ns, (kShortMs + kToleranceMs) * kNsPerMs);
}

TEST(Connection, EndsAtItsDeadlineWhenNothingIsAnswered) {
  Actor actor([](Stage &stage) {
    stage.greet();
    stage.await_end();
  });
  Reader reader;
  ASSERT_EQ(open(reader, actor), KVP_OK);
  expect_timeout(reader);
}

TEST(Connection, EndsAtItsDeadlineWhenTheAnswerDripsWithoutAPause) {
  std::atomic<bool> is_over{false};
  Actor actor([&is_over](Stage &stage) {
    stage.greet();
    stage.take_request(1);
    const Answer answer(kPage);
    stage.send(answer, 16);
    while (!is_over) {
      stage.send("x", 1);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the pace of the drip, not a synchronisation
    }
  });
  Reader reader;
  ASSERT_EQ(open(reader, actor), KVP_OK);
  expect_timeout(reader);
  is_over = true;
}

TEST(Connection, WritesNothingToADestinationAfterATimeout) {
  std::atomic<bool> has_returned{false};
  Actor actor([&has_returned](Stage &stage) {
    stage.greet();
    stage.take_request(1);
    const Answer answer(kPage);
    stage.send(answer, kLength / 2);
    while (!has_returned) {
      std::this_thread::yield();
    }
    stage.send(answer.bytes() + kLength / 2, kLength / 2);
    stage.send(&answer.trailer, sizeof(answer.trailer));
    stage.await_end();
  });
  Reader reader;
  ASSERT_EQ(open(reader, actor), KVP_OK);
  Fetched fetched = reader.fetch({kPage}, KVP_VERIFY_FULL, kShortMs);
  ASSERT_EQ(fetched.rc, KVP_ETIMEOUT);
  const std::vector<uint64_t> poison(fetched.pages[0].size(), 0xddddddddddddddddu);
  fetched.pages[0] = poison;
  has_returned = true;
  EXPECT_EQ(reader.fetch({kPage}).rc, KVP_ECLOSED);
  EXPECT_EQ(fetched.pages[0], poison);
}

TEST(Connection, ShutdownFromAnotherThreadEndsAFetch) {
  std::atomic<bool> is_asked{false};
  Actor actor([&is_asked](Stage &stage) {
    stage.greet();
    stage.take_request(1);
    stage.send(Answer(kPage), kLength / 2);
    is_asked = true;
    stage.await_end();
  });
  Reader reader;
  ASSERT_EQ(open(reader, actor), KVP_OK);
  std::thread other([&] {
    EXPECT_TRUE(eventually([&] { return is_asked.load(); }));
    kvp_conn_shutdown(reader.get());
  });
  const uint64_t start_ns = now_ns();
  const Fetched fetched = reader.fetch({kPage});
  EXPECT_LT(now_ns() - start_ns, kAmpleMs * kNsPerMs / 2);
  EXPECT_EQ(fetched.rc, KVP_ECLOSED);
  EXPECT_EQ(fetched.outcomes[0], KVP_MISS);
  other.join();
  kvp_conn_shutdown(reader.get());  // a second time, on a closed connection: nothing happens
}

// ---- opening ---------------------------------------------------------------------------------------------------------------

TEST(Opening, EndsAtItsDeadlineWhenTheProducerSaysNothing) {
  Actor actor([](Stage &stage) { stage.await_end(); });
  Reader reader;
  const uint64_t start_ns = now_ns();
  EXPECT_EQ(open(reader, actor, kShortMs), KVP_ETIMEOUT);
  EXPECT_LT(now_ns() - start_ns, (kShortMs + kToleranceMs) * kNsPerMs);
}

TEST(Opening, RefusesAProducerThatIsAnotherOrSpeaksAnotherProtocol) {
  tcp::HelloAnswer good{tcp::kAnswerMagic, tcp::kVersion, tcp::HelloStatus::kOk, {}, 64, 0};
  std::copy(kProducerId.begin(), kProducerId.end(), good.producer_id);
  tcp::HelloAnswer other_run = good, bad_magic = good, other_version = good, unknown = good, no_pages = good;
  other_run.producer_id[0] ^= 1;
  bad_magic.magic = 0;
  other_version.version = 2;
  unknown.status = static_cast<tcp::HelloStatus>(9);
  no_pages.pages_max = 0;
  for (const tcp::HelloAnswer &answer : {other_run, bad_magic, other_version, unknown, no_pages}) {
    Actor actor([&answer](Stage &stage) {
      stage.greet(answer);
      stage.await_end();
    });
    Reader reader;
    EXPECT_EQ(open(reader, actor), KVP_EPROTO);
  }
}

TEST(Opening, NeverBelievesAHugeRequestLimit) {
  tcp::HelloAnswer answer{tcp::kAnswerMagic, tcp::kVersion, tcp::HelloStatus::kOk, {}, 0xffffffffu, 0};
  std::copy(kProducerId.begin(), kProducerId.end(), answer.producer_id);
  Actor actor([&answer](Stage &stage) {
    stage.greet(answer);
    stage.await_end();
  });
  Reader reader;
  ASSERT_EQ(open(reader, actor), KVP_OK);
  const uint64_t n = uint64_t{tcp::kRequestPagesMax} + 1;
  EXPECT_EQ(kvp_conn_fetch(reader.get(), n, nullptr, nullptr, nullptr, nullptr, nullptr, KVP_VERIFY_FULL, 0, nullptr, nullptr,
                           nullptr),
            KVP_EINVAL);
  kvp_conn_shutdown(reader.get());
}

TEST(Opening, SaysWhichSystemCallErrorItMetAndRefusesNames) {
  Reader reader;
  EXPECT_EQ(reader.open(1, {}), KVP_ESYS);
  EXPECT_EQ(kvp_last_errno(), ECONNREFUSED);
  kvp_conn *conn = nullptr;
  const std::array<uint8_t, 32> capability{};
  EXPECT_EQ(kvp_conn_open("localhost", 1, capability.data(), kReaderId.data(), kProducerId.data(), 0, &conn), KVP_EINVAL);
}

TEST(Connection, RefusesEmptyPagesMoreThanTheProducerTakesAndUnknownModes) {
  PagePool pool(1, kLength);
  Producer producer(pool);
  Reader reader;
  ASSERT_EQ(reader.open(producer), KVP_OK);
  const Location page = pool.publish(0, 1);
  Location empty = page;
  empty.length = 0;
  EXPECT_EQ(reader.fetch({empty}).rc, KVP_EINVAL);
  EXPECT_EQ(reader.fetch(std::vector<Location>(65, page)).rc, KVP_EINVAL);
  EXPECT_EQ(reader.fetch({page}, 0).rc, KVP_EINVAL);
  EXPECT_EQ(reader.fetch({page}).outcomes[0], KVP_HIT) << "a refused call leaves the connection as it was";
}

}  // namespace
}  // namespace kvpeer::testing
