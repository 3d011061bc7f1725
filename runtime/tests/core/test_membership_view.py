"""Whom one membership machine believes to be there, and what makes it change its mind."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpeer.core.membership import (
    MEMBERS_MAX,
    MembersChanged,
    Membership,
    MemberState,
    Send,
)
from kvpeer.core.membership.settings import REFUTATION_MAX, TOMBSTONES_MAX, UPDATES_PER_GOSSIP_MAX
from kvpeer.core.membership.table import Change, MemberTable
from kvpeer.wire.messages import AgentInfo, Gossip, MemberUpdate, Ping, PingAck
from one_member import (
    ALIVE,
    DEAD,
    DRAINING,
    LEFT,
    SETTINGS,
    SUSPECT,
    changes,
    hear,
    id_of,
    info,
    machine,
    sends,
    tick_until,
    update,
)


def test_the_view_is_sorted_and_has_this_agent():
    membership = Membership(info(5), SETTINGS, random.Random(1), 0.0)
    (changed,) = changes(membership.joined([info(9), info(2)], 0.0))
    assert changed == MembersChanged((info(2), info(5), info(9)), ())
    assert membership.alive() == changed.alive
    assert membership.is_alive(id_of(5))
    assert membership.is_alive(id_of(2))
    assert not membership.is_alive(id_of(3))


def test_suspects_are_alive_and_the_dead_are_not():
    membership = machine()
    assert changes(hear(membership, update(2, SUSPECT))) == []
    assert membership.is_alive(id_of(2))
    (changed,) = changes(hear(membership, update(2, DEAD)))
    assert changed.ended == (id_of(2),)
    assert info(2) not in changed.alive
    assert membership.info_of(id_of(2)) == info(2), "it may have to be pinged"


def test_a_death_is_reported_once():
    membership = machine()
    hear(membership, update(2, DEAD))
    assert changes(hear(membership, update(2, DEAD), update(2, LEFT, 1))) == []


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(list(MemberState)), st.integers(0, 3)).map(lambda row: update(2, *row)), max_size=6
    ),
    st.randoms(use_true_random=False),
)
def test_the_order_and_repetition_of_rumours_do_not_matter(updates: list[MemberUpdate], rng: random.Random):
    shuffled = updates + rng.choices(updates, k=3) if updates else []
    rng.shuffle(shuffled)
    tables = [MemberTable(), MemberTable()]
    for table, heard in zip(tables, (updates, shuffled), strict=True):
        table.apply(update(2, ALIVE), 0.0, 1.0)
        for one in heard:
            table.apply(one, 0.0, 1.0)
    first, second = ((table.member(id_of(2)) or table.ended(id_of(2))).update for table in tables)
    assert first == second


@pytest.mark.parametrize("known", list(itertools.product(list(MemberState), [1, 2])))
def test_only_news_changes_the_table(known: tuple[MemberState, int]):
    table = MemberTable()
    table.apply(update(2, ALIVE), 0.0, 1.0)
    table.apply(update(2, *known), 0.0, 1.0)
    assert table.apply(update(2, *known), 0.0, 1.0) is Change.NONE
    assert table.apply(update(2, LEFT, 0), 0.0, 1.0) is Change.NONE
    assert table.apply(update(2, ALIVE, 3), 0.0, 1.0) is not Change.NONE


def test_the_address_of_a_member_is_not_changed_by_a_rumour_but_by_its_own_hello():
    membership = machine()
    moved = AgentInfo(id_of(2), "agent-2", "10.9.9.9", 1, 2)
    hear(membership, MemberUpdate(moved, ALIVE, 5))
    assert membership.info_of(id_of(2)) == info(2)
    membership.hello(moved, 0.0)
    assert membership.info_of(id_of(2)) == moved


def test_members_are_limited_and_the_rest_is_counted():
    membership = machine(MEMBERS_MAX + 4)
    assert len(membership.alive()) == MEMBERS_MAX
    assert membership.n_members_refused == 5
    hear(membership, update(1, DEAD))
    hear(membership, update(MEMBERS_MAX + 4, ALIVE))
    assert membership.is_alive(id_of(MEMBERS_MAX + 4))


def test_tombstones_are_limited():
    table = MemberTable()
    for number in range(1, TOMBSTONES_MAX + 11):
        table.apply(update(number, DEAD), 0.0, 1.0)
    assert table.ended(id_of(10)) is None
    assert table.ended(id_of(11)) is not None
    assert len(table.remembered(0.0, 1.0)) == TOMBSTONES_MAX


@pytest.mark.parametrize(
    "bad",
    [
        MemberUpdate(info(9), 0, 0),
        MemberUpdate(info(9), 6, 0),
        MemberUpdate(info(9), 1, -1),
        MemberUpdate(info(9), 1, REFUTATION_MAX),
        MemberUpdate(AgentInfo(b"short", "x", "10.0.0.1", 1, 2), 1, 0),
    ],
    ids=["state 0", "state 6", "negative counter", "huge counter", "short id"],
)
def test_malformed_updates_are_counted_and_not_believed(bad: MemberUpdate):
    membership = machine()
    before = membership.alive()
    assert hear(membership, bad) == []
    assert membership.n_updates_refused == 1
    assert membership.alive() == before


def test_of_a_message_only_a_limited_number_of_updates_is_read():
    membership = machine(1)
    hear(membership, *(update(number, ALIVE) for number in range(10, 10 + UPDATES_PER_GOSSIP_MAX + 7)))
    assert len(membership.alive()) == 2 + UPDATES_PER_GOSSIP_MAX
    assert membership.n_updates_refused == 7


@pytest.mark.parametrize("state", [SUSPECT, DEAD, LEFT])
def test_a_rumour_against_oneself_is_refuted_with_a_higher_counter_at_once(state: MemberState):
    membership = machine()
    effects = hear(membership, update(0, state, 4))
    assert {send.message.updates[0] for send in sends(effects, Gossip)} == {update(0, ALIVE, 5)}
    assert membership.n_refutations == 1
    assert changes(effects) == []


def test_an_outdated_rumour_against_oneself_is_answered_without_raising_the_counter():
    membership = machine()
    hear(membership, update(0, SUSPECT, 4))
    (ack,) = sends(membership.ping(id_of(1), Ping(7, [update(0, SUSPECT, 4)]), 0.0), PingAck)
    assert update(0, ALIVE, 5) in ack.message.updates
    assert membership.n_refutations == 1


def test_an_ack_to_a_suspicious_ping_carries_the_refutation():
    membership = machine()
    effects = membership.ping(id_of(1), Ping(7, [update(0, SUSPECT)]), 0.0)
    (ack,) = sends(effects, PingAck)
    assert (ack.agent_id, ack.message.sequence, ack.message.subject) == (id_of(1), 7, id_of(0))
    assert update(0, ALIVE, 1) in ack.message.updates


def test_a_dead_member_that_refutes_is_back_and_is_told_the_whole_view():
    membership = machine()
    hear(membership, update(2, DEAD), update(3, DEAD))
    effects = hear(membership, update(2, ALIVE, 1), now=0.1)
    (changed,) = changes(effects)
    assert info(2) in changed.alive
    view = [one for send in sends(effects, Gossip) if send.agent_id == id_of(2) for one in send.message.updates]
    assert update(0, ALIVE) in view
    assert update(1, ALIVE) in view
    assert update(3, SUSPECT) in view, "a death is told as a suspicion, so that it can be refuted"


def test_without_a_higher_counter_nobody_comes_back():
    membership = machine()
    hear(membership, update(2, DEAD, 3))
    for old in (update(2, ALIVE, 3), update(2, SUSPECT, 3), update(2, DRAINING, 2)):
        assert changes(hear(membership, old, now=SETTINGS.forget_s * 2)) == []
    assert changes(membership.joined([info(2)], SETTINGS.forget_s * 2)) == []


def test_a_death_of_somebody_unknown_is_remembered():
    membership = machine()
    hear(membership, update(9, DEAD, 1))
    assert changes(hear(membership, update(9, ALIVE, 1))) == []
    assert len(changes(hear(membership, update(9, ALIVE, 2)))) == 1


def test_a_suspicion_of_somebody_unknown_adds_nobody():
    assert changes(hear(machine(), update(9, SUSPECT, 1))) == []


@pytest.mark.parametrize("event", ["hello", "ping", "gossip", "ack"])
def test_a_dead_member_that_speaks_is_told_that_it_is_dead(event: str):
    membership = machine()
    hear(membership, update(2, DEAD, 3))
    effects = {
        "hello": lambda: membership.hello(info(2), 0.1),
        "ping": lambda: membership.ping(id_of(2), Ping(1, []), 0.1),
        "gossip": lambda: membership.gossip(id_of(2), Gossip([]), 0.1),
        "ack": lambda: membership.ack(id_of(2), PingAck(1, id_of(2), []), 0.1),
    }[event]()
    assert update(2, DEAD, 3) in [
        one for send in effects if isinstance(send, Send) and send.agent_id == id_of(2) for one in send.message.updates
    ]
    assert changes(effects) == []


def test_a_member_that_left_is_not_told_and_does_not_come_back():
    membership = machine()
    hear(membership, update(2, LEFT, 1))
    assert membership.gossip(id_of(2), Gossip([]), 0.1) == []
    assert changes(membership.hello(info(2), 0.1)) == []
    assert id_of(2) not in {send.agent_id for send in sends(tick_until(membership, 0.2, 30.0, answers=True), Ping)}


def test_a_new_id_at_a_known_address_ends_the_old_one_at_once():
    membership = machine()
    successor = AgentInfo(id_of(50), "agent-2", info(2).host, info(2).control_port, 1)
    effects = membership.hello(successor, 1.0)
    (changed,) = changes(effects)
    assert changed.ended == (id_of(2),)
    assert successor in changed.alive
    assert update(2, DEAD) in sends(effects, Gossip)[0].message.updates


def test_a_new_id_at_a_known_address_ends_the_old_one_also_when_gossip_named_it_first():
    membership = machine()
    successor = AgentInfo(id_of(50), "agent-2", info(2).host, info(2).control_port, 1)
    hear(membership, MemberUpdate(successor, ALIVE, 0))
    assert membership.is_alive(id_of(2)), "gossip alone proves nothing about an address"
    (changed,) = changes(membership.hello(successor, 1.0))
    assert changed.ended == (id_of(2),)


def test_an_ended_id_that_says_hello_does_not_end_its_successor():
    membership = machine()
    successor = AgentInfo(id_of(50), "agent-2", info(2).host, info(2).control_port, 1)
    membership.hello(successor, 1.0)
    assert changes(membership.hello(info(2), 2.0)) == []
    assert membership.is_alive(id_of(50))


def test_a_predecessor_is_not_pinged_any_more():
    membership = machine(2)
    successor = AgentInfo(id_of(50), "agent-2", info(2).host, info(2).control_port, 1)
    membership.hello(successor, 1.0)
    pinged = {send.agent_id for send in sends(tick_until(membership, 1.0, 60.0, answers=True), Ping)}
    assert pinged == {id_of(1), id_of(50)}
