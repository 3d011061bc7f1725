"""Pulling: who is asked for what until when, what each answer means, and that no slot is given back too early."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kvpeer.core.breaker import BreakerState
from kvpeer.core.pull import (
    Commit,
    Effect,
    Fetch,
    GiveBack,
    Locate,
    Promote,
    PullPlan,
    Pulls,
    ReportCorrupt,
    ReportStale,
    Reserve,
    Touched,
)
from kvpeer.core.pull.plan import FETCH_MARGIN_S, FETCH_S_MIN, PROMOTE_SHARE
from kvpeer.core.reasons import NotAskedError, UnaskedReason
from kvpeer.core.slot_effects import ReserveStatus
from kvpeer.model import AgentId, LocalProtocolError, Outcome, PeerUnavailableError
from pulling import (
    DEADLINE,
    GENERATION,
    N_PARTS,
    Cluster,
    agent,
    answer,
    chain_slice,
    located_of,
    question_of,
    slots_for,
)

HIT, MISS, STALE, CORRUPT, TIMEOUT, REFUSED = Outcome
WRITE, PRESENT, NO_ROOM, BUSY = ReserveStatus
BROKEN = PeerUnavailableError("the connection broke")


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def plan_of(cluster: Cluster, *held: set[int], **located: Any) -> tuple[PullPlan, list[Effect]]:
    """A plan for as many pages, located at these producers, and its first effects."""
    question = question_of(chain_slice(len(held)))
    cluster.recent.remember("r", located_of(question, list(held), **located))
    plan = PullPlan(question, cluster.producers, cluster.recent)
    return plan, plan.start(0.0)


def only(effects: list[Effect], kind: type) -> Effect:
    """The one effect, which is of this kind."""
    (effect,) = effects
    assert isinstance(effect, kind), effect
    return effect


def of_kind(effects: list[Effect], kind: type) -> list:
    return [effect for effect in effects if isinstance(effect, kind)]


def fetch_of(plan: PullPlan, effects: list[Effect], now: float = 0.0) -> Fetch:
    """The fetch that follows when the one reservation gets all its slots."""
    reserve = only(effects, Reserve)
    return only(plan.reserved(reserve, slots_for(*[WRITE] * len(reserve.portion)), now), Fetch)


def names(plan: PullPlan) -> list[str]:
    return [Outcome(outcome).name for outcome in plan.outcomes.tolist()]


# ---- where the pages lie


def test_what_was_located_a_moment_ago_is_not_asked_for_again(cluster):
    _, effects = plan_of(cluster, {1}, {1})
    assert only(effects, Reserve).portion.places.tolist() == [0, 1]


def test_what_was_not_located_for_this_request_is_asked_for_first(cluster):
    question = question_of(chain_slice(2), request="another")
    plan = PullPlan(question, cluster.producers, cluster.recent)
    locate = only(plan.start(0.0), Locate)
    assert not plan.done
    reserve = only(plan.located(locate, located_of(question, [{1}, {1}]), 0.1), Reserve)
    assert reserve.portion.producer == agent(1)


def test_readers_that_name_no_request_spread_over_the_holders_and_one_of_them_keeps_to_its_choice():
    def producer_for(reader: int, first: int) -> AgentId:
        cluster = Cluster(number=reader)
        question = question_of(chain_slice(2, first), request="")
        plan = PullPlan(question, cluster.producers, cluster.recent)
        located = located_of(question, [{1, 2, 3, 4}] * 2)
        return only(plan.located(only(plan.start(0.0), Locate), located, 0.1), Reserve).portion.producer

    assert len({producer_for(reader, 0) for reader in range(100, 140)}) == 4
    assert len({producer_for(100, first) for first in range(40)}) == 4
    assert len({producer_for(100, 0) for _ in range(5)}) == 1


def test_pages_that_nobody_holds_are_misses_at_once(cluster):
    plan, effects = plan_of(cluster, set(), set())
    assert (effects, plan.done, names(plan)) == ([], True, ["MISS", "MISS"])
    assert plan.unasked == {UnaskedReason.NO_SOURCE: 2}


def test_locating_that_took_all_the_time_is_a_timeout_and_nobody_is_asked(cluster):
    question = question_of(chain_slice(2), request="another")
    plan = PullPlan(question, cluster.producers, cluster.recent)
    locate = only(plan.start(0.0), Locate)
    assert plan.located(locate, located_of(question, [{1}, {1}]), DEADLINE - FETCH_S_MIN / 2) == []
    assert (plan.done, names(plan)) == (True, ["TIMEOUT"] * 2)
    assert plan.unasked == {UnaskedReason.LATE: 2}


# ---- pages on the disks of producers


def promoted(promote: Promote, *outcomes: Outcome, slot: int = 900) -> tuple[np.ndarray, np.ndarray]:
    """An answer: the pages lie in slots from `slot` on, in generation 1."""
    moved = promote.portion.holders.copy()
    moved["slot"], moved["generation"] = np.arange(slot, slot + len(moved)), 1
    return np.array(outcomes, dtype=np.uint8), moved


def test_what_is_on_a_disk_is_promoted_and_then_read_from_where_it_lies_then(cluster):
    plan, effects = plan_of(cluster, {1}, {1}, on_disk={0, 1})
    promote = only(effects, Promote)
    assert promote.portion.holders["slot"].tolist() == [0, 1]
    assert promote.deadline == pytest.approx(DEADLINE * PROMOTE_SHARE)
    fetch = fetch_of(plan, plan.promoted(promote, *promoted(promote, HIT, HIT), 0.1))
    assert fetch.portion.holders["slot"].tolist() == [900, 901]
    assert fetch.portion.holders["generation"].tolist() == [1, 1]
    assert fetch.portion.keys == plan.question.keys
    assert fetch.deadline == DEADLINE - FETCH_MARGIN_S


def test_what_is_in_the_pool_does_not_wait_for_what_is_on_the_disk(cluster):
    plan, effects = plan_of(cluster, {1}, {1}, {1}, on_disk={1})
    (reserve,), (promote,) = of_kind(effects, Reserve), of_kind(effects, Promote)
    assert (reserve.portion.places.tolist(), promote.portion.places.tolist()) == ([0, 2], [1])
    (fetch,) = plan.reserved(reserve, slots_for(WRITE, WRITE), 0.0)
    assert isinstance(fetch, Fetch)
    assert not plan.done


def test_what_became_of_pages_that_were_not_promoted(cluster):
    """MISS, corrupt: their locations are reported; refused: avoided for a while; in time for none: nothing is held
    against the location."""
    plan, effects = plan_of(cluster, {1}, {1}, {1}, {1}, on_disk=range(4))
    promote = only(effects, Promote)
    effects = plan.promoted(promote, *promoted(promote, MISS, CORRUPT, REFUSED, TIMEOUT), 0.1)
    assert names(plan) == ["STALE", "CORRUPT", "REFUSED", "TIMEOUT"]
    assert plan.unasked == {UnaskedReason.NOT_PROMOTED: 4}
    assert not of_kind(effects, ReportCorrupt), "its own agent found that out"
    keys = {report.report.keys for report in of_kind(effects, ReportStale)}
    assert keys == {plan.question.keys[:32]}
    located = located_of(plan.question, [{1}] * 4, on_disk=range(4))
    holding = cluster.producers.holding(located, np.arange(4), plan.question.keys, 0.2)
    assert holding.is_obtainable.tolist() == [False, False, False, True]


def test_a_producer_whose_disk_did_nothing_in_time_is_not_asked_again_but_others_are(cluster):
    plan, effects = plan_of(cluster, {1, 2}, on_disk={0})
    first = only(effects, Promote)
    second = only(plan.promoted(first, *promoted(first, TIMEOUT), 0.4), Promote)
    assert {first.portion.producer, second.portion.producer} == {agent(1), agent(2)}


def test_a_producer_that_failed_while_its_disk_was_asked_is_not_read_from(cluster):
    plan, effects = plan_of(cluster, {1}, {1}, on_disk={1})
    (reserve,), (promote,) = of_kind(effects, Reserve), of_kind(effects, Promote)
    (fetch,) = plan.reserved(reserve, slots_for(WRITE), 0.0)
    plan.fetched(fetch, answer(TIMEOUT, error=BROKEN), 0.2)
    assert not of_kind(plan.promoted(promote, *promoted(promote, HIT), 0.3), Reserve)
    assert plan.done
    assert plan.unasked == {UnaskedReason.NOT_PROMOTED: 1}


def test_a_promotion_that_broke_here_ends_the_plan_and_no_breaker_hears_of_it(cluster):
    plan, effects = plan_of(cluster, {1}, on_disk={0})
    assert plan.broke(only(effects, Promote), 0.1) == []
    assert plan.done


# ---- slots


def test_pages_that_are_here_or_being_written_or_have_no_room_are_not_fetched(cluster):
    plan, effects = plan_of(cluster, {1}, {1}, {1}, {1})
    effects = plan.reserved(only(effects, Reserve), slots_for(PRESENT, NO_ROOM, BUSY, WRITE), 0.0)
    fetch = only(effects, Fetch)
    assert (fetch.portion.places.tolist(), fetch.slots.tolist(), fetch.offsets.tolist()) == ([3], [103], [103 * 64])
    assert fetch.portion.keys == plan.question.keys[48:]
    assert names(plan)[:3] == ["HIT", "REFUSED", "MISS"]
    assert plan.unasked == {UnaskedReason.NO_ROOM: 1, UnaskedReason.WRITING: 1}


def test_without_a_slot_nothing_is_asked_of_the_producer(cluster):
    for _ in range(3):
        cluster.breakers.failed(agent(1), -10.0)
    plan, effects = plan_of(cluster, {1})
    reserve = only(effects, Reserve)
    assert not cluster.breakers.is_usable(agent(1), 0.0), "its one try is taken"
    effects = plan.reserved(reserve, slots_for(NO_ROOM), 0.0)
    assert cluster.breakers.state(agent(1), 0.0) is BreakerState.HALF_OPEN
    # The try was given back, so that the second round may ask again; that is the last.
    assert plan.reserved(only(effects, Reserve), slots_for(NO_ROOM), 0.0) == []
    assert cluster.breakers.is_usable(agent(1), 0.0)
    assert (plan.done, names(plan)) == (True, ["REFUSED"])


def test_slots_that_come_too_late_are_given_back_and_no_fetch_is_begun(cluster):
    plan, effects = plan_of(cluster, {1})
    late = DEADLINE - FETCH_MARGIN_S - FETCH_S_MIN / 2
    back = only(plan.reserved(only(effects, Reserve), slots_for(WRITE), late), GiveBack)
    assert (back.slots.tolist(), back.generations.tolist()) == ([100], [1])
    assert (plan.done, names(plan)) == (True, ["TIMEOUT"])
    assert plan.unasked == {UnaskedReason.LATE: 1}
    assert not len(cluster.breakers), "that says nothing about the producer"


def test_who_could_not_be_asked_in_its_share_of_the_time_leaves_the_rest_to_another(cluster):
    plan, effects = plan_of(cluster, {1, 2})
    first = only(effects, Reserve)
    (second,) = of_kind(plan.reserved(first, slots_for(WRITE), first.deadline), Reserve)
    assert second.portion.producer != first.portion.producer


def test_what_came_is_committed_and_what_did_not_is_given_back_only_when_the_fetch_ended(cluster):
    plan, effects = plan_of(cluster, {1}, {1}, {1})
    fetch = fetch_of(plan, effects)
    effects = plan.fetched(fetch, answer(HIT, MISS, HIT), 0.1)
    (back,), (commit,) = of_kind(effects, GiveBack), of_kind(effects, Commit)
    assert (back.slots.tolist(), back.generations.tolist()) == ([101], [1])
    assert (commit.slots.tolist(), commit.indices.tolist(), commit.parts) == ([100, 102], [0, 2], [0, 1, 2])
    assert names(plan) == ["MISS"] * 3, "a page is a hit when it is committed, not before"
    touched = of_kind(plan.committed(commit, np.array([True, True]), 0.1), Touched)
    (read,) = touched
    assert (read.producer, read.slots.tolist(), read.generations.tolist()) == (agent(1), [0, 2], [GENERATION] * 2)
    assert names(plan) == ["HIT", "MISS", "HIT"]


def test_a_page_whose_reservation_expired_meanwhile_is_no_hit_and_was_not_read(cluster):
    plan, effects = plan_of(cluster, {1}, {1})
    commit = only(plan.fetched(fetch_of(plan, effects), answer(HIT, HIT), DEADLINE), Commit)
    touched = only(plan.committed(commit, np.array([False, True]), DEADLINE), Touched)
    assert touched.slots.tolist() == [1]
    assert (plan.done, names(plan)) == (True, ["TIMEOUT", "HIT"])
    assert plan.asked == {HIT: 1, TIMEOUT: 1}


@pytest.mark.parametrize("n_parts", [0, N_PARTS - 1, N_PARTS + 1])
def test_a_verified_page_of_other_parts_is_stale_and_never_committed(cluster, n_parts):
    plan, effects = plan_of(cluster, {1})
    fetched = answer(HIT)
    fetched.n_parts[0] = n_parts
    effects = plan.fetched(fetch_of(plan, effects), fetched, 0.1)
    assert not of_kind(effects, Commit)
    assert of_kind(effects, GiveBack)
    assert (names(plan), plan.asked) == (["STALE"], {STALE: 1})


# ---- rounds and their deadlines


def test_a_source_that_others_could_replace_has_half_of_the_time_and_a_sole_one_all(cluster):
    _, effects = plan_of(cluster, {1, 2})
    assert only(effects, Reserve).deadline == DEADLINE / 2
    plan, effects = plan_of(cluster, {1})
    assert only(effects, Reserve).deadline == DEADLINE
    assert fetch_of(plan, effects).deadline == DEADLINE - FETCH_MARGIN_S


def test_what_one_source_did_not_give_is_asked_of_another_until_the_deadline(cluster):
    plan, effects = plan_of(cluster, {1, 2}, {1, 2})
    fetch = fetch_of(plan, effects)
    first = fetch.portion.producer
    effects = plan.fetched(fetch, answer(HIT, TIMEOUT, error=BROKEN), 0.5)
    effects = plan.committed(of_kind(effects, Commit)[0], np.array([True]), 0.5)
    (reserve,) = of_kind(effects, Reserve)
    assert {first, reserve.portion.producer} == {agent(1), agent(2)}
    assert (reserve.portion.places.tolist(), reserve.deadline) == ([1], DEADLINE)
    fetch = fetch_of(plan, [reserve], 0.5)
    plan.committed(only(plan.fetched(fetch, answer(HIT), 0.6), Commit), np.array([True]), 0.6)
    assert (plan.done, names(plan)) == (True, ["HIT", "HIT"])
    assert plan.asked == {HIT: 2, TIMEOUT: 1}


def test_a_producer_that_failed_is_not_asked_again_though_nobody_else_has_the_page(cluster):
    plan, effects = plan_of(cluster, {1})
    effects = plan.fetched(fetch_of(plan, effects), answer(MISS, error=BROKEN), 0.1)
    only(effects, GiveBack)
    assert (plan.done, names(plan)) == (True, ["MISS"])


def test_a_producer_that_answered_is_asked_again_elsewhere_only(cluster):
    """A location that failed is avoided; the same producer may have the page in another slot."""
    question = question_of(chain_slice(2))
    located = located_of(question, [{1}, {1}])
    cluster.recent.remember("r", located)
    plan = PullPlan(question, cluster.producers, cluster.recent)
    effects = plan.fetched(fetch_of(plan, plan.start(0.0)), answer(MISS, STALE), 0.1)
    assert [reserve.portion.places.tolist() for reserve in of_kind(effects, Reserve)] == [[0]]


def test_there_is_no_third_round(cluster):
    plan, effects = plan_of(cluster, {1, 2, 3})
    effects = plan.fetched(fetch_of(plan, effects), answer(MISS, error=BROKEN), 0.1)
    effects = plan.fetched(fetch_of(plan, of_kind(effects, Reserve), 0.1), answer(MISS, error=BROKEN), 0.2)
    only(effects, GiveBack)
    assert plan.done


def test_the_second_round_begins_when_the_last_source_of_the_first_ended(cluster):
    plan, effects = plan_of(cluster, {1}, {2, 3})
    one, two = [only(plan.reserved(each, slots_for(WRITE), 0.0), Fetch) for each in effects]
    failed = answer(MISS, error=BROKEN)
    assert not of_kind(plan.fetched(one, failed, 0.1), Reserve)
    assert len(of_kind(plan.fetched(two, failed, 0.2), Reserve)) == 1


def test_a_producer_that_ended_since_is_not_asked(cluster):
    question = question_of(chain_slice(1))
    cluster.recent.remember("r", located_of(question, [{1}]))
    cluster.alive(2)
    plan = PullPlan(question, cluster.producers, cluster.recent)
    assert (plan.start(0.0), plan.done) == ([], True)


# ---- what an answer means for others


def test_stale_pages_are_reported_to_all_owners_and_not_located_there_for_a_while(cluster):
    plan, effects = plan_of(cluster, {1}, {1}, {1})
    effects = plan.fetched(fetch_of(plan, effects), answer(STALE, MISS, STALE), 0.1)
    reports = of_kind(effects, ReportStale)
    ring = cluster.view.ring
    owners = {ring.members[idx] for idx in ring.owners(plan.question.chain.partitions()[:1])[0].tolist()}
    assert {each.owner for each in reports} == owners
    for each in reports:
        assert each.report.producer == agent(1)
        assert each.report.keys == plan.question.keys[:16] + plan.question.keys[32:]
        assert np.frombuffer(each.report.slots, "<u4").tolist() == [0, 2]
        assert np.frombuffer(each.report.generations, "<u4").tolist() == [GENERATION] * 2
    holding = cluster.producers.holding(located_of(plan.question, [{1}] * 3), np.arange(3), plan.question.keys, now=0.2)
    assert holding.failed.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("outcome", "is_avoided"), [(STALE, True), (CORRUPT, True), (REFUSED, True), (MISS, False), (TIMEOUT, False)]
)
def test_a_location_is_avoided_for_what_it_did_not_for_what_happened_on_the_way(cluster, outcome, is_avoided):
    plan, effects = plan_of(cluster, {1})
    plan.fetched(fetch_of(plan, effects), answer(outcome), 0.1)
    holding = cluster.producers.holding(located_of(plan.question, [{1}]), np.arange(1), plan.question.keys, now=0.2)
    assert holding.failed.tolist() == [is_avoided]


def test_corrupt_pages_are_reported_to_their_producer_and_to_nobody_else(cluster):
    plan, effects = plan_of(cluster, {1}, {1})
    effects = plan.fetched(fetch_of(plan, effects), answer(MISS, CORRUPT), 0.1)
    (report,) = of_kind(effects, ReportCorrupt)
    assert (report.producer, report.slots.tolist(), report.generations.tolist()) == (agent(1), [1], [GENERATION])
    assert report.keys == plan.question.keys[16:]
    assert not of_kind(effects, ReportStale)


def test_pages_of_another_size_are_stale_without_being_asked_for(cluster):
    plan, effects = plan_of(cluster, {1}, {1}, length=65)
    assert (effects, plan.done, names(plan)) == ([], True, ["STALE"] * 2)
    assert plan.unasked == {UnaskedReason.OTHER_SIZE: 2}


def test_a_fault_of_the_producer_counts_against_it_and_one_on_this_side_does_not(cluster):
    plan, effects = plan_of(cluster, {1})
    plan.fetched(fetch_of(plan, effects), answer(TIMEOUT, error=BROKEN), 0.1)
    assert len(cluster.breakers) == 1
    cluster.breakers.forget(agent(1))
    plan, effects = plan_of(cluster, {1})
    busy = NotAskedError(UnaskedReason.BUSY, "all threads are busy")
    plan.fetched(fetch_of(plan, effects), answer(TIMEOUT, error=busy, n_asked=0), 0.1)
    assert not len(cluster.breakers)
    assert (plan.unasked, plan.asked) == ({UnaskedReason.BUSY: 1}, {})


def test_the_one_try_of_a_half_open_breaker_is_given_back_when_it_was_not_made(cluster):
    for _ in range(3):
        cluster.breakers.failed(agent(1), -10.0)
    plan, effects = plan_of(cluster, {1})
    busy = NotAskedError(UnaskedReason.BUSY, "all threads are busy")
    plan.fetched(fetch_of(plan, effects), answer(TIMEOUT, error=busy, n_asked=0), 0.1)
    assert cluster.breakers.state(agent(1), 0.1) is BreakerState.HALF_OPEN
    assert cluster.breakers.is_usable(agent(1), 0.1)


@pytest.mark.parametrize("way", ["the fetch broke here", "slots came too late"])
def test_the_one_try_is_given_back_too_when(cluster, way):
    for _ in range(3):
        cluster.breakers.failed(agent(1), -10.0)
    plan, effects = plan_of(cluster, {1})
    if way == "the fetch broke here":
        plan.broke(fetch_of(plan, effects), 0.1)
    else:
        plan.reserved(only(effects, Reserve), slots_for(WRITE), DEADLINE - FETCH_MARGIN_S - FETCH_S_MIN / 2)
    assert cluster.breakers.is_usable(agent(1), DEADLINE)


def test_a_half_open_breaker_lets_one_of_two_portions_through(cluster):
    for _ in range(3):
        cluster.breakers.failed(agent(1), -10.0)
    plan, effects = plan_of(cluster, {1}, {1}, {1}, on_disk={1, 2})
    (promote,) = of_kind(effects, Promote)
    assert plan.promoted(promote, *promoted(promote, HIT, HIT), 0.1) == []
    assert plan.unasked == {UnaskedReason.BREAKER_OPEN: 2}


def test_an_answer_ends_a_row_of_failures(cluster):
    for _ in range(2):
        cluster.breakers.failed(agent(1), 0.0)
    plan, effects = plan_of(cluster, {1})
    plan.fetched(fetch_of(plan, effects), answer(MISS), 0.1)
    assert not len(cluster.breakers)


def test_pages_that_the_producer_was_not_asked_for_count_as_such(cluster):
    plan, effects = plan_of(cluster, {1}, {1}, {1})
    late = NotAskedError(UnaskedReason.LATE, "no time")
    plan.fetched(fetch_of(plan, effects), answer(STALE, TIMEOUT, TIMEOUT, error=late, n_asked=1), 0.9)
    assert plan.asked == {STALE: 1}
    assert plan.unasked == {UnaskedReason.LATE: 2}


def test_an_agent_that_ended_has_no_breaker_any_more(cluster):
    plan, effects = plan_of(cluster, {1})
    fetch = fetch_of(plan, effects)
    cluster.alive(2)
    plan.fetched(fetch, answer(MISS, error=BROKEN), 0.1)
    assert not len(cluster.breakers)


def test_a_half_open_breaker_lets_one_pull_through(cluster):
    for _ in range(3):
        cluster.breakers.failed(agent(1), -10.0)
    _, effects = plan_of(cluster, {1})
    only(effects, Reserve)
    plan, effects = plan_of(cluster, {1})
    assert (effects, plan.done, names(plan)) == ([], True, ["MISS"])


# ---- what goes wrong here


def test_a_fetch_that_broke_gives_its_slots_back_and_the_plan_ends(cluster):
    plan, effects = plan_of(cluster, {1, 2})
    back = only(plan.broke(fetch_of(plan, effects), 0.1), GiveBack)
    assert (back.slots.tolist(), back.generations.tolist()) == ([100], [1])
    assert (plan.done, names(plan)) == (True, ["MISS"])


def test_a_plan_that_broke_still_takes_what_is_under_way_and_begins_nothing(cluster):
    plan, effects = plan_of(cluster, {1}, {2, 3})
    one, two = [only(plan.reserved(each, slots_for(WRITE), 0.0), Fetch) for each in effects]
    only(plan.broke(one, 0.1), GiveBack)
    assert not plan.done
    assert not of_kind(plan.fetched(two, answer(MISS, error=BROKEN), 0.2), Reserve)
    assert plan.done


def test_a_second_answer_is_refused_and_changes_nothing(cluster):
    plan, effects = plan_of(cluster, {1})
    fetch = fetch_of(plan, effects)
    plan.fetched(fetch, answer(STALE, error=BROKEN), 0.1)
    with pytest.raises(LocalProtocolError, match="a Fetch was answered that nobody waits for"):
        plan.fetched(fetch, answer(HIT), 0.2)
    assert (plan.done, names(plan)) == (True, ["STALE"])


# ---- single flight


def pulls_of(cluster: Cluster) -> Pulls:
    return Pulls(cluster.producers, cluster.recent)


def test_who_wants_pages_that_are_being_pulled_waits_for_the_same_plan(cluster):
    pulls = pulls_of(cluster)
    first = pulls.ask(question_of(chain_slice(4)))
    second = pulls.ask(question_of(chain_slice(6)))
    third = pulls.ask(question_of(chain_slice(2, first=3)))
    assert (first.joined, second.joined) == ((), (first.fresh,))
    assert second.fresh.question.indices.tolist() == [4, 5]
    assert (third.fresh, third.joined) == (None, (first.fresh, second.fresh))
    assert len(pulls) == 6


def test_each_gets_the_outcomes_of_its_own_pages_from_whichever_plan_pulled_them(cluster):
    pulls = pulls_of(cluster)
    first = pulls.ask(question_of(chain_slice(3)))
    second = pulls.ask(question_of(chain_slice(3, first=2)))
    first.fresh.outcomes[:] = [MISS, STALE, HIT]
    second.fresh.outcomes[:] = [CORRUPT, MISS]
    assert second.outcomes.tolist() == [HIT, TIMEOUT, TIMEOUT], "what is here is a hit before its plan has ended"
    pulls.end(first.fresh)
    pulls.end(second.fresh)
    assert first.outcomes.tolist() == [MISS, STALE, HIT]
    assert second.outcomes.tolist() == [HIT, CORRUPT, MISS]


def test_pages_may_be_pulled_anew_when_their_plan_ended_whatever_became_of_it(cluster):
    pulls = pulls_of(cluster)
    first = pulls.ask(question_of(chain_slice(2)))
    (locate,) = first.fresh.start(0.0)
    pulls.end(first.fresh)
    assert len(pulls) == 0
    assert first.fresh.located(locate, located_of(first.fresh.question, [{1}, {1}]), 0.1) == []
    assert pulls.ask(question_of(chain_slice(2))).fresh is not None
