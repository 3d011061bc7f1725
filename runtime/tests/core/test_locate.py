"""Locating one batch: few messages, nothing waits for anybody late but the keys concerned, and it always ends."""

from __future__ import annotations

import hashlib
import heapq
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpeer.core.chain import Chain, ChainSlice
from kvpeer.core.directory_stream import LOOKUP_KEYS_MAX
from kvpeer.core.locate import (
    Ask,
    LocatePlan,
    LocateQuestion,
    LocateResult,
    LocateRings,
)
from kvpeer.core.locate.answers import AGENTS_PER_ANSWER_MAX
from kvpeer.core.reasons import MissReason
from kvpeer.core.ring import Ring
from kvpeer.model import HOLDER_DTYPE, AgentId, LocalProtocolError
from kvpeer.wire.messages import Holders

DEADLINE, HEDGE_S = 1.0, 0.1
KNOWN, MISS, UNSURE = 0, 1, 2


def agent(number: int) -> AgentId:
    return AgentId(hashlib.sha256(f"agent {number}".encode()).digest()[:16])


SELF, PRODUCER = agent(0), agent(99)


def chain_slice(n: int, first: int = 0) -> ChainSlice:
    chain = Chain(b"n" * 32)
    chain.extend(hashlib.sha256(page.to_bytes(4, "big")).digest() for page in range(first + n))
    return chain.slice(first, first + n)


def plan_of(
    pages: ChainSlice,
    n_agents: int = 8,
    *,
    resident: tuple[int, ...] = (),
    negative: tuple[int, ...] = (),
    previous: Ring | None = None,
    avoided: tuple[AgentId, ...] = (),
    members: list[AgentId] | None = None,
) -> LocatePlan:
    masks = np.zeros((2, len(pages)), dtype=np.bool_)
    masks[0, list(resident)] = masks[1, list(negative)] = True
    ring = Ring.build([agent(number) for number in range(n_agents)] if members is None else members)
    question = LocateQuestion(pages.keys, pages.partitions(), masks[0], masks[1])
    return LocatePlan(question, LocateRings(ring, previous, SELF, avoided), DEADLINE, HEDGE_S)


def answer(ask: Ask, status: int, producers: tuple[AgentId, ...] = (PRODUCER,)) -> Holders:
    """The same for every key; the slot of each holder is its key's index in the batch."""
    n = len(ask.indices)
    n_holders = len(producers) if status == KNOWN else 0
    holders = np.zeros(n * n_holders, dtype=HOLDER_DTYPE)
    holders["slot"] = ask.indices.repeat(n_holders)
    holders["agent"] = np.tile(np.arange(n_holders), n)
    return Holders(bytes([status]) * n, bytes([n_holders]) * n, b"".join(producers), holders.tobytes())


def finish(plan: LocatePlan) -> LocateResult:
    plan.tick(DEADLINE)
    assert plan.done
    return plan.result


# ---- the first round ------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(0, 800), st.integers(0, 100), st.integers(1, 64))
def test_the_first_round_has_one_message_per_owner_and_few_owners(n: int, first: int, n_agents: int):
    pages = chain_slice(n, first)
    asks = plan_of(pages, n_agents).start(0.0)
    assert len(asks) <= math.ceil(n / 32) + 1
    assert len({ask.owner for ask in asks}) == len(asks)
    asked = sorted(idx for ask in asks for idx in ask.indices.tolist())
    assert asked == (list(range(n)) if n_agents > 1 else [])


def test_a_message_carries_the_keys_and_partitions_of_its_indices():
    pages = chain_slice(100, 7)
    partitions = pages.partitions()
    for ask in plan_of(pages).start(0.0):
        keys = b"".join(pages.keys[idx * 16 : idx * 16 + 16] for idx in ask.indices.tolist())
        assert ask.message.keys == keys
        assert ask.message.partitions == partitions[ask.indices].tobytes()


def test_the_own_shard_is_asked_first_where_it_is_an_owner():
    pages = chain_slice(640)
    ring = Ring.build([agent(number) for number in range(8)])
    owners = ring.owners(pages.partitions())
    for ask in plan_of(pages).start(0.0):
        for idx in ask.indices:
            mine = [ring.members[owner] for owner in owners[idx]]
            assert ask.owner == (SELF if SELF in mine else mine[0])


def test_resident_pages_are_never_asked_for():
    plan = plan_of(chain_slice(64), resident=tuple(range(0, 64, 2)))
    asks = plan.start(0.0)
    assert all(idx % 2 == 1 for ask in asks for idx in ask.indices)
    for ask in asks:
        plan.answered(ask, answer(ask, KNOWN), 0.0)
    assert plan.result.statuses.tolist() == [1, 2] * 32
    assert plan.result.counts.tolist() == [0, 1] * 32


def test_all_resident_is_done_without_asking():
    plan = plan_of(chain_slice(4), resident=(0, 1, 2, 3))
    assert plan.start(0.0) == []
    assert plan.done
    assert plan.next_wakeup == math.inf
    assert plan.result.first_miss is None


def test_a_message_has_a_limited_number_of_keys():
    pages = chain_slice(32)
    n = 3 * LOOKUP_KEYS_MAX
    question = LocateQuestion(
        pages.keys * (n // 32), np.zeros(n, dtype=np.uint16), np.zeros(n, dtype=np.bool_), np.zeros(n, dtype=np.bool_)
    )
    ring = Ring.build([agent(1)])
    asks = LocatePlan(question, LocateRings(ring, None, SELF), DEADLINE, HEDGE_S).start(0.0)
    assert [len(ask.indices) for ask in asks] == [LOOKUP_KEYS_MAX] * 3


# ---- answers --------------------------------------------------------------------------------------------------------


def test_found_pages_have_their_holders_in_key_order():
    plan = plan_of(chain_slice(200))
    for ask in reversed(plan.start(0.0)):
        plan.answered(ask, answer(ask, KNOWN, (agent(50), agent(51))), 0.01)
    result = plan.result
    assert (result.statuses == 2).all()
    assert (result.counts == 2).all()
    assert result.holders["slot"].tolist() == [idx for idx in range(200) for _ in range(2)]
    assert [result.agents[holder] for holder in result.holders["agent"]] == [agent(50), agent(51)] * 200
    assert result.reasons == {}


def test_a_miss_of_a_synced_owner_is_final():
    plan = plan_of(chain_slice(40))
    for ask in plan.start(0.0):
        assert plan.answered(ask, answer(ask, MISS), 0.01) == []
    assert plan.done
    assert plan.result.reasons == {MissReason.MISS: 40}
    assert plan.result.first_miss is MissReason.MISS


def test_holders_that_are_this_agent_itself_do_not_count():
    plan = plan_of(chain_slice(3))
    (ask,) = plan.start(0.0)
    plan.answered(ask, answer(ask, KNOWN, (SELF,)), 0.01)
    assert plan.result.reasons == {MissReason.MISS: 3}
    plan = plan_of(chain_slice(3))
    (ask,) = plan.start(0.0)
    plan.answered(ask, answer(ask, KNOWN, (SELF, PRODUCER)), 0.01)
    assert plan.result.counts.tolist() == [1, 1, 1]
    assert {plan.result.agents[holder] for holder in plan.result.holders["agent"]} == {PRODUCER}


@pytest.mark.parametrize("trouble", ["unsure", "failed", "late", "garbled"])
def test_only_the_keys_of_an_owner_in_trouble_go_to_its_replica(trouble: str):
    pages = chain_slice(320)
    plan = plan_of(pages)
    bad, *good = plan.start(0.0)
    for ask in good:
        assert plan.answered(ask, answer(ask, KNOWN), 0.01) == []
    if trouble == "unsure":
        more = plan.answered(bad, answer(bad, UNSURE), 0.01)
    elif trouble == "failed":
        more = plan.failed(bad, 0.01)
    elif trouble == "garbled":
        more = plan.answered(bad, Holders(b"", b"", b"", b""), 0.01)
        assert plan.n_garbled == 1
    else:
        assert plan.next_wakeup == HEDGE_S
        assert plan.tick(HEDGE_S - 0.001) == []
        more = plan.tick(HEDGE_S)
        assert plan.n_hedged == 1
    assert sorted(idx for ask in more for idx in ask.indices.tolist()) == bad.indices.tolist()
    assert all(ask.owner != bad.owner for ask in more)
    for ask in more:
        plan.answered(ask, answer(ask, KNOWN), 0.2)
    assert plan.done
    assert (plan.result.statuses == 2).all()


def test_a_late_answer_still_counts_when_the_hedge_has_not_answered():
    plan = plan_of(chain_slice(10))
    (late,) = plan.start(0.0)
    (hedge,) = plan.tick(HEDGE_S)
    assert plan.answered(late, answer(late, KNOWN), 0.15) == []
    assert plan.done
    plan.answered(hedge, answer(hedge, MISS), 0.2)
    assert plan.n_ignored == 1
    assert (plan.result.statuses == 2).all()
    assert (plan.result.counts == 1).all()


def test_a_hedge_that_fails_waits_for_the_late_answer():
    plan = plan_of(chain_slice(10))
    (late,) = plan.start(0.0)
    (hedge,) = plan.tick(HEDGE_S)
    assert plan.failed(hedge, 0.2) == []
    assert not plan.done
    plan.answered(late, answer(late, KNOWN), 0.9)
    assert (plan.result.statuses == 2).all()


def test_an_unsure_answer_asks_nobody_further_while_the_hedge_is_under_way():
    members = [agent(number) for number in range(1, 9)]
    plan = plan_of(chain_slice(10), members=members[4:], previous=Ring.build(members[:4]))
    (late,) = plan.start(0.0)
    (hedge,) = plan.tick(HEDGE_S)
    assert plan.answered(late, answer(late, UNSURE), 0.11) == []
    (previous,) = plan.answered(hedge, answer(hedge, UNSURE), 0.12)
    assert previous.owner in members[:4]


def test_each_ask_is_hedged_once():
    plan = plan_of(chain_slice(10))
    plan.start(0.0)
    assert len(plan.tick(HEDGE_S)) == 1
    assert plan.tick(HEDGE_S) == []
    assert plan.next_wakeup == 2 * HEDGE_S
    assert plan.tick(2 * HEDGE_S) == []
    assert plan.next_wakeup == DEADLINE
    assert plan.n_asks == 2


def test_the_previous_owners_are_asked_last_and_only_where_the_new_ones_are_no_help():
    members = [agent(number) for number in range(1, 9)]
    previous = Ring.build(members[:4])
    plan = plan_of(chain_slice(32), members=members[4:], previous=previous)
    (first,) = plan.start(0.0)
    (second,) = plan.answered(first, answer(first, UNSURE), 0.01)
    (third,) = plan.answered(second, answer(second, UNSURE), 0.02)
    assert {first.owner, second.owner} <= set(members[4:])
    assert third.owner in previous.members
    plan.answered(third, answer(third, KNOWN), 0.03)
    assert (plan.result.statuses == 2).all()


def test_the_own_shard_is_asked_last_where_it_is_an_owner_of_the_previous_ring_only():
    pages, members = chain_slice(640), [agent(number) for number in range(8)]
    ring = Ring.build(members)
    is_own = (ring.owners(pages.partitions()) == ring.members.index(SELF)).any(axis=1)
    assert 0 < is_own.sum() < len(pages), "both cases are there"
    plan = plan_of(pages, members=members, previous=Ring.build([SELF]))
    asked: list[list[AgentId]] = [[] for _ in range(len(pages))]
    asks = plan.start(0.0)
    while asks:
        for ask in asks:
            for idx in ask.indices:
                asked[idx].append(ask.owner)
        asks = [more for ask in asks for more in plan.failed(ask, 0.01)]
    for owners, own in zip(asked, is_own, strict=True):
        assert len(owners) == len(set(owners)) == (2 if own else 3)
        assert owners.index(SELF) == (0 if own else 2)


def test_a_hedge_delay_beyond_the_deadline_does_not_prolong_it():
    pages = chain_slice(4)
    mask = np.zeros(4, dtype=np.bool_)
    question = LocateQuestion(pages.keys, pages.partitions(), mask, mask)
    plan = LocatePlan(question, LocateRings(Ring.build([agent(1)]), None, SELF), DEADLINE, hedge_delay_s=5.0)
    plan.start(0.0)
    assert plan.next_wakeup == DEADLINE


def test_nobody_is_asked_twice_about_a_key():
    members = [agent(number) for number in range(1, 4)]
    plan = plan_of(chain_slice(32), members=members, previous=Ring.build(members))
    asks, owners = plan.start(0.0), []
    while asks:
        (ask,) = asks
        owners.append(ask.owner)
        asks = plan.answered(ask, answer(ask, UNSURE), 0.01)
    assert len(owners) == len(set(owners)) == 2
    assert plan.result.reasons == {MissReason.UNSURE: 32}


# ---- what is ignored or refused --------------------------------------------------------------------------------------


def test_duplicates_are_ignored_and_counted():
    plan = plan_of(chain_slice(320))
    first, *_ = plan.start(0.0)
    plan.answered(first, answer(first, KNOWN), 0.01)
    assert plan.answered(first, answer(first, MISS), 0.02) == []
    assert plan.failed(first, 0.02) == []
    assert plan.n_ignored == 2
    assert (finish(plan).statuses[first.indices] == 2).all()


def garbled(ask: Ask, kind: str) -> Holders:
    good = answer(ask, KNOWN)
    n = len(ask.indices)
    return {
        "too few statuses": Holders(good.statuses[1:], good.counts, good.agents, good.holders),
        "too many counts": Holders(good.statuses, good.counts + b"\0", good.agents, good.holders),
        "too few holders": Holders(good.statuses, good.counts, good.agents, good.holders[:-20]),
        "half a holder": Holders(good.statuses, good.counts, good.agents, good.holders[:-1]),
        "no agents": Holders(good.statuses, good.counts, b"", good.holders),
        "half an agent": Holders(good.statuses, good.counts, good.agents + b"x", good.holders),
        "unknown status": Holders(b"\x03" * n, good.counts, good.agents, good.holders),
        "holders of a miss": Holders(b"\x01" * n, good.counts, good.agents, good.holders),
        "too many holders": answer(ask, KNOWN, (PRODUCER,) * 17),
        "too many agents": Holders(good.statuses, good.counts, PRODUCER * (AGENTS_PER_ANSWER_MAX + 1), good.holders),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "too few statuses",
        "too many counts",
        "too few holders",
        "half a holder",
        "no agents",
        "half an agent",
        "unknown status",
        "holders of a miss",
        "too many holders",
        "too many agents",
    ],
)
def test_an_answer_that_does_not_fit_counts_as_a_failed_owner(kind: str):
    plan = plan_of(chain_slice(10))
    (ask,) = plan.start(0.0)
    (replica,) = plan.answered(ask, garbled(ask, kind), 0.01)
    assert plan.n_garbled == 1
    plan.answered(replica, garbled(replica, kind), 0.02)
    assert plan.result.reasons == {MissReason.GARBLED: 10}
    assert len(plan.result.holders) == 0


def test_a_result_before_the_end_is_refused():
    plan = plan_of(chain_slice(3))
    plan.start(0.0)
    with pytest.raises(LocalProtocolError, match="before it is done"):
        _ = plan.result


@pytest.mark.parametrize("part", ["keys", "partitions", "resident", "negative"])
def test_a_question_whose_arrays_do_not_fit_is_refused(part: str):
    mask = np.zeros(2, dtype=np.bool_)
    arrays = {"keys": b"k" * 32, "partitions": np.zeros(2, dtype=np.uint16), "resident": mask, "negative": mask}
    LocateQuestion(**arrays)
    with pytest.raises(LocalProtocolError):
        LocateQuestion(**{**arrays, part: arrays[part][:-1]})


# ---- reasons --------------------------------------------------------------------------------------------------------


def test_nobody_else_means_no_members():
    for members in ([], [SELF]):
        plan = plan_of(chain_slice(3), members=members)
        assert plan.start(0.0) == []
        assert plan.result.reasons == {MissReason.NO_MEMBERS: 3}


def test_owners_that_are_all_avoided_mean_breaker_open():
    members = [agent(1), agent(2)]
    plan = plan_of(chain_slice(3), members=members, avoided=tuple(members))
    assert plan.start(0.0) == []
    assert plan.result.reasons == {MissReason.BREAKER_OPEN: 3}


def test_an_avoided_owner_is_skipped():
    members = [agent(1), agent(2)]
    (ask,) = plan_of(chain_slice(3), members=members, avoided=(agent(1),)).start(0.0)
    assert ask.owner == agent(2)


def test_an_empty_ring_with_a_previous_one_asks_the_previous_owners():
    plan = plan_of(chain_slice(3), members=[], previous=Ring.build([agent(1)]), avoided=(agent(1),))
    assert plan.start(0.0) == []
    assert plan.result.reasons == {MissReason.NO_OWNER: 3}
    (ask,) = plan_of(chain_slice(3), members=[], previous=Ring.build([agent(1)])).start(0.0)
    assert ask.owner == agent(1)


def test_negative_keys_are_not_asked_for():
    plan = plan_of(chain_slice(3), negative=(1,), resident=(2,))
    (ask,) = plan.start(0.0)
    assert ask.indices.tolist() == [0]
    plan.answered(ask, answer(ask, KNOWN), 0.01)
    assert plan.result.statuses.tolist() == [2, 0, 1]
    assert plan.result.reasons == {MissReason.NEGATIVE: 1}


def test_silence_ends_at_the_deadline_as_late():
    plan = plan_of(chain_slice(40))
    plan.start(0.0)
    while not plan.done:
        plan.tick(plan.next_wakeup)
    assert plan.next_wakeup == math.inf
    assert plan.result.reasons == {MissReason.LATE: 40}


def test_a_start_after_the_deadline_asks_nobody():
    plan = plan_of(chain_slice(40))
    assert plan.start(DEADLINE) == []
    assert plan.result.reasons == {MissReason.LATE: 40}


def test_failed_owners_are_a_reason_of_their_own():
    plan = plan_of(chain_slice(4))
    asks = plan.start(0.0)
    while asks:
        asks = [more for ask in asks for more in plan.failed(ask, 0.01)]
    assert plan.result.reasons == {MissReason.FAILED: 4}


# ---- all of it at once ----------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 300), st.integers(1, 12), st.booleans())
def test_whatever_owners_do_it_ends_by_the_deadline_and_finds_only_what_was_told(
    seed: int, n: int, n_agents: int, has_previous: bool
):
    rng = random.Random(seed)
    previous = Ring.build([agent(number) for number in range(3, 9)]) if has_previous else None
    plan = plan_of(chain_slice(n), n_agents, previous=previous)
    told: set[int] = set()
    now, n_events = 0.0, 0
    pending: list[tuple[float, int, Ask]] = []

    def send(asks: list[Ask]) -> None:
        for ask in asks:
            heapq.heappush(pending, (now + rng.random() * 1.5 * rng.choice([0.1, 1]), ask.number, ask))

    send(plan.start(now))
    while not plan.done:
        n_events += 1
        assert n_events < 500, f"seed {seed}: no end"
        if pending and pending[0][0] <= plan.next_wakeup:
            now, _, ask = heapq.heappop(pending)
            what = rng.choice([KNOWN, MISS, UNSURE, "failed", "garbled", "silent"])
            if what == KNOWN:
                told.update(ask.indices.tolist())
            if what == "failed":
                send(plan.failed(ask, now))
            elif what != "silent":
                send(plan.answered(ask, garbled(ask, "no agents") if what == "garbled" else answer(ask, what), now))
        else:
            now = plan.next_wakeup
            send(plan.tick(now))
        if now >= DEADLINE:
            plan.tick(now)
            assert plan.done, f"seed {seed}: not done at the deadline"
    result = plan.result
    found = np.flatnonzero(result.statuses == 2)
    assert set(found.tolist()) <= told
    assert result.holders["slot"].tolist() == found.tolist()
    assert sum(result.reasons.values()) == n - len(found)
