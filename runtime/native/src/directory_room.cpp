// Who bears the places of a partition, and how a full one makes room.
//
// Max-min fairness by longest queue drop (Suter, Lakshman, Stiliadis, Choudhury: Design considerations for supporting TCP with
// per-flow queueing, 1998): who bears most gives way, and nobody takes from an agent that would then have less than the taker.
// So every agent comes to have what it wants or an equal share, and what a big producer publishes beyond that costs its own oldest.
#include <algorithm>
#include <utility>

#include "directory_partition.hpp"

namespace kvpeer::directory {

namespace {

// Records that change their bearer for one put. Each makes the shares more equal, so more than a few in a row are rare; what is left
// over is handed over by the puts that follow.
constexpr int kHandOversMax = 16;

}  // namespace

// ---- the circle of an agent --------------------------------------------------------------------------------------------

void Partition::bear(std::uint32_t record) {
  AgentEntries &bearer = *agent_position(records_[record].first.agent);
  if (bearer.places++ == 0) {
    bearer.oldest = records_[record].older = records_[record].newer = record;
    return;
  }
  const std::uint32_t newest = records_[bearer.oldest].older;
  records_[record].older = newest;
  records_[record].newer = bearer.oldest;
  records_[newest].newer = records_[bearer.oldest].older = record;
}

void Partition::release(std::uint32_t record) {
  const auto [older, newer] = std::pair(records_[record].older, records_[record].newer);
  AgentEntries &bearer = *agent_position(records_[record].first.agent);
  --bearer.places;
  if (bearer.oldest == record) bearer.oldest = newer;
  records_[older].newer = newer;
  records_[newer].older = older;
}

// The record at `from` is about to be copied to `to`: its neighbours and its bearer follow.
void Partition::relink(std::uint32_t from, std::uint32_t to) {
  Record &moved = records_[from];
  AgentEntries &bearer = *agent_position(moved.first.agent);
  if (bearer.oldest == from) bearer.oldest = to;
  if (moved.newer == from) {
    moved.older = moved.newer = to;
    return;
  }
  records_[moved.older].newer = records_[moved.newer].older = to;
}

// `taker`, a further holder of the record, bears it from now on.
void Partition::pass_on(std::uint32_t record, Holder &taker) {
  release(record);
  Holder &first = records_[record].first;
  std::swap(first, taker);
  std::swap(first.next, taker.next);
  bear(record);
}

// The further holder that bears the fewest places, the lowest agent of several; null where there is none.
Partition::Holder *Partition::lightest_further(std::uint32_t record) {
  Holder *lightest = nullptr;
  std::pair<std::uint32_t, std::uint16_t> least;
  for (Holder *holder = next_of(records_[record].first); holder != nullptr; holder = next_of(*holder)) {
    const std::pair load(entries_of(holder->agent).places, holder->agent);
    if (lightest == nullptr || load < least) {
      lightest = holder;
      least = load;
    }
  }
  return lightest;
}

// ---- making room -------------------------------------------------------------------------------------------------------

// Frees a place for a record that the applicant will bear; false if nobody has more than it would have, and it has none itself.
// Memory for `dropped` is had before anything changes. Takes at most kHandOversMax + 1 passes over the agents of the partition, none
// over its records.
bool Partition::make_room(std::uint16_t applicant, DroppedAgents &dropped) {
  if (dropped.capacity() - dropped.size() < KVP_HOLDERS_MAX) dropped.reserve(2 * dropped.size() + KVP_HOLDERS_MAX);
  for (int n_handed_over = 0;; ++n_handed_over) {
    const std::uint32_t record = record_to_give(applicant);
    if (record == kNone) return false;
    if (n_handed_over == kHandOversMax || !hand_over(record)) {
      drop_record(record, dropped);
      return true;
    }
  }
}

// The oldest record of who has to give way (of several the lowest agent), or kNone.
std::uint32_t Partition::record_to_give(std::uint16_t applicant) {
  const auto most = std::max_element(agents_.begin(), agents_.end(), [](const AgentEntries &one, const AgentEntries &other) {
    return one.places < other.places;
  });
  const AgentEntries own = entries_of(applicant);
  if (most->places >= own.places + 2) return most->oldest;
  return own.places > 0 ? own.oldest : kNone;
}

// A record with other holders is not dropped while one of them bears less: then it is their turn to bear it.
bool Partition::hand_over(std::uint32_t record) {
  Holder *taker = lightest_further(record);
  if (taker == nullptr) return false;
  if (entries_of(records_[record].first.agent).places < entries_of(taker->agent).places + 2) return false;
  pass_on(record, *taker);
  return true;
}

void Partition::drop_record(std::uint32_t record, DroppedAgents &dropped) {
  const Holder &first = records_[record].first;
  while (first.next != kNone) {
    dropped.push_back(next_of(first)->agent);
    erase_holder(record, dropped.back());
  }
  dropped.push_back(first.agent);
  erase_holder(record, first.agent);
}

}  // namespace kvpeer::directory
