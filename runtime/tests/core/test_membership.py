"""One membership machine: what it believes, what it answers, what it asks, and what it never does."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpeer.core.membership import (
    MEMBERS_MAX,
    Effect,
    JoinSeed,
    MembersChanged,
    Membership,
    MembershipSettings,
    MemberState,
    Send,
)
from kvpeer.core.membership.probing import ProbeOrder
from kvpeer.core.membership.rumours import Rumours
from kvpeer.core.membership.settings import REFUTATION_MAX, TOMBSTONES_MAX, UPDATES_PER_GOSSIP_MAX, UPDATES_PER_PING_MAX
from kvpeer.core.membership.table import Change, MemberTable
from kvpeer.model import AgentId, ConfigError
from kvpeer.wire.messages import AgentInfo, Gossip, MemberUpdate, Ping, PingAck, PingRequest

ALIVE, SUSPECT, DEAD, LEFT, DRAINING = (
    MemberState.ALIVE,
    MemberState.SUSPECT,
    MemberState.DEAD,
    MemberState.LEFT,
    MemberState.DRAINING,
)
SETTINGS = MembershipSettings()


def info(number: int) -> AgentInfo:
    return AgentInfo(number.to_bytes(16, "big"), f"agent-{number}", "10.0.0.1", 7000 + number, 9000 + number)


def id_of(number: int) -> AgentId:
    return AgentId(info(number).agent_id)


def update(number: int, state: MemberState, refutation: int = 0) -> MemberUpdate:
    return MemberUpdate(info(number), state, refutation)


def machine(n_others: int = 3, seed: int = 1, settings: MembershipSettings = SETTINGS) -> Membership:
    """Agent 0 that has joined others 1..n at time 0, with what that caused already done."""
    membership = Membership(info(0), settings, random.Random(seed), 0.0)
    membership.joined([info(number) for number in range(1, n_others + 1)], 0.0)
    return membership


def sends(effects: list[Effect], kind: type) -> list[Send]:
    return [effect for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


def changes(effects: list[Effect]) -> list[MembersChanged]:
    return [effect for effect in effects if isinstance(effect, MembersChanged)]


def hear(membership: Membership, *updates: MemberUpdate, now: float = 0.0, sender: int = 1) -> list[Effect]:
    return membership.gossip(id_of(sender), Gossip(list(updates)), now)


def tick_until(membership: Membership, start: float, end: float, answers: bool = False) -> list[Effect]:
    """Everything that ticks ask for in (start, end]; with `answers` every ping is answered at once."""
    effects: list[Effect] = []
    now = membership.next_wakeup(start)
    while now <= end:
        done = membership.tick(now)
        for send in sends(done, Ping) if answers else []:
            done += membership.ack(send.agent_id, PingAck(send.message.sequence, send.agent_id, []), now)
        effects += done
        assert membership.next_wakeup(now) > now, "a tick that leaves itself due spins"
        now = membership.next_wakeup(now)
    return effects


# ---- the view -------------------------------------------------------------------------------------------------------


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


# ---- refutation, return, end ----------------------------------------------------------------------------------------


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


# ---- probing --------------------------------------------------------------------------------------------------------


def test_every_member_is_probed_once_in_each_round():
    order = ProbeOrder(random.Random(1))
    for number in range(10):
        order.add(id_of(number))
    rounds = [tuple(order.next() for _ in range(10)) for _ in range(20)]
    assert all(sorted(one) == [id_of(number) for number in range(10)] for one in rounds)
    assert len(set(rounds)) > 10, "the rounds are shuffled"


def test_a_round_goes_on_with_the_others_when_one_is_removed():
    order = ProbeOrder(random.Random(1))
    for number in range(5):
        order.add(id_of(number))
    first, second = order.next(), order.next()
    order.remove(first)
    assert {order.next() for _ in range(3)} == {id_of(number) for number in range(5)} - {first, second}


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "next"]), st.integers(0, 9)), max_size=80))
def test_nobody_is_passed_over_when_members_come_and_go(steps: list[tuple[str, int]]):
    order, members = ProbeOrder(random.Random(3)), set()
    for step, number in steps:
        agent_id = id_of(number)
        if step == "add" and agent_id not in members:
            order.add(agent_id)
            members.add(agent_id)
        elif step == "remove" and agent_id in members:
            order.remove(agent_id)
            members.remove(agent_id)
        elif step == "next":
            assert order.next() in (members or {None})
    assert {order.next() for _ in range(2 * len(members))} == members


def test_a_late_ping_asks_relays_and_then_suspects_tells_and_at_last_buries():
    membership = machine(4)
    now = membership.next_wakeup(0.0)
    while not sends(effects := membership.tick(now), Ping):
        now = membership.next_wakeup(now)
    (ping,) = sends(effects, Ping)
    target, asked_at = ping.agent_id, now

    def run(until: float) -> list[Effect]:
        """Everybody answers, except the target."""
        nonlocal now
        done: list[Effect] = []
        while membership.next_wakeup(now) <= until:
            now = membership.next_wakeup(now)
            some = membership.tick(now)
            for send in sends(some, Ping):
                if send.agent_id != target:
                    membership.ack(send.agent_id, PingAck(send.message.sequence, send.agent_id, []), now)
            done += some
        return done

    requests = sends(run(asked_at + SETTINGS.probe_timeout_s), PingRequest)
    assert len(requests) == SETTINGS.relays
    assert {send.message.target for send in requests} == {target}
    assert target not in {send.agent_id for send in requests}
    assert {send.message.sequence for send in requests} == {ping.message.sequence}

    suspected_at = asked_at + SETTINGS.probe_timeout_s + SETTINGS.indirect_timeout_s
    effects = run(suspected_at)
    suspicion = MemberUpdate(membership.info_of(target), SUSPECT, 0)
    assert suspicion in [one for s in sends(effects, Gossip) if s.agent_id == target for one in s.message.updates]
    assert membership.is_alive(target)

    half = SETTINGS.suspicion_of(5) / 2
    again = [send for send in sends(run(suspected_at + half + 0.01), Ping) if send.agent_id == target]
    assert again
    assert suspicion in again[-1].message.updates, "it is told what it has to refute"
    (changed,) = changes(run(suspected_at + 2 * half + 0.01))
    assert changed.ended == (target,)


def test_an_ack_through_a_relay_saves_the_target():
    membership = machine(1)
    effects = membership.evidence_of_death(id_of(1), 0.01)
    (ping,) = sends(effects, Ping)
    membership.ack(id_of(1), PingAck(ping.message.sequence, id_of(1), []), 0.02)
    other = machine(3)
    requests = sends(other.evidence_of_death(id_of(2), 0.01), PingRequest)
    assert {send.agent_id for send in requests} == {id_of(1), id_of(3)}
    other.ack(id_of(1), PingAck(requests[0].message.sequence, id_of(2), []), 0.1)
    for tested in (membership, other):
        assert changes(tick_until(tested, 0.1, 20.0, answers=True)) == []


def test_an_ack_with_another_number_or_subject_saves_nobody():
    membership = machine(1)
    (ping,) = sends(membership.evidence_of_death(id_of(1), 0.01), Ping)
    membership.ack(id_of(1), PingAck(ping.message.sequence + 1, id_of(1), []), 0.02)
    membership.ack(id_of(1), PingAck(ping.message.sequence, id_of(0), []), 0.02)
    end = 0.01 + SETTINGS.verify_timeout_s + SETTINGS.verified_suspicion_s
    (changed,) = changes(tick_until(membership, 0.02, end + 0.001))
    assert changed.ended == (id_of(1),)


def test_evidence_is_checked_in_about_a_second():
    membership = machine(1)
    membership.evidence_of_death(id_of(1), 0.01)
    end = 0.01 + SETTINGS.verify_timeout_s + SETTINGS.verified_suspicion_s
    assert changes(tick_until(membership, 0.01, end - 0.001)) == []
    assert len(changes(tick_until(membership, end - 0.001, end + 0.001))) == 1
    assert end < 1.2


def test_evidence_shortens_a_suspicion_that_is_under_way():
    membership = machine(1)
    membership.evidence_of_death(id_of(1), 0.0)
    hear(membership, update(1, SUSPECT), now=0.1)
    effects = tick_until(membership, 0.1, 0.01 + SETTINGS.verify_timeout_s + SETTINGS.verified_suspicion_s)
    assert len(changes(effects)) == 1


def test_evidence_while_one_check_runs_asks_nothing_more():
    membership = machine(3)
    assert sends(membership.evidence_of_death(id_of(1), 0.0), Ping)
    assert membership.evidence_of_death(id_of(1), 0.1) == []


def test_evidence_against_the_dead_the_unknown_or_oneself_is_ignored():
    membership = machine()
    hear(membership, update(2, DEAD))
    for number in (0, 2, 77):
        assert membership.evidence_of_death(id_of(number), 0.1) == []


def test_a_relay_pings_for_the_asker_and_passes_the_ack_on_under_the_askers_number():
    membership = machine()
    (ping,) = sends(membership.ping_request(id_of(1), PingRequest(77, id_of(2), []), 0.0), Ping)
    assert ping.agent_id == id_of(2)
    effects = membership.ack(id_of(2), PingAck(ping.message.sequence, id_of(2), []), 0.1)
    (ack,) = sends(effects, PingAck)
    assert (ack.agent_id, ack.message.sequence, ack.message.subject) == (id_of(1), 77, id_of(2))
    assert sends(membership.ack(id_of(2), PingAck(ping.message.sequence, id_of(2), []), 0.1), PingAck) == []


def test_a_relay_does_not_pass_on_what_somebody_else_says_about_the_target():
    membership = machine()
    (ping,) = sends(membership.ping_request(id_of(1), PingRequest(77, id_of(2), []), 0.0), Ping)
    assert sends(membership.ack(id_of(3), PingAck(ping.message.sequence, id_of(2), []), 0.1), PingAck) == []


def test_a_relay_forgets_whom_it_pinged_for_after_a_while():
    membership = machine()
    (ping,) = sends(membership.ping_request(id_of(1), PingRequest(77, id_of(2), []), 0.0), Ping)
    tick_until(membership, 0.0, SETTINGS.indirect_timeout_s + SETTINGS.probe_interval_s, answers=True)
    assert sends(membership.ack(id_of(2), PingAck(ping.message.sequence, id_of(2), []), 1.0), PingAck) == []


def test_a_relay_answers_for_itself_and_not_for_the_unknown():
    membership = machine()
    (ack,) = sends(membership.ping_request(id_of(1), PingRequest(77, id_of(0), []), 0.0), PingAck)
    assert (ack.message.sequence, ack.message.subject) == (77, id_of(0))
    assert membership.ping_request(id_of(1), PingRequest(78, id_of(99), []), 0.0) == []


def test_an_agent_that_was_not_run_judges_nobody_by_that_time():
    membership = machine(3)
    membership.evidence_of_death(id_of(1), 0.0)
    hear(membership, update(2, SUSPECT))
    effects = membership.tick(60.0) + tick_until(membership, 60.0, 60.2, answers=True)
    assert changes(effects) == []
    suspected = [one for send in sends(effects, Gossip) for one in send.message.updates if one.state == SUSPECT]
    assert update(1, SUSPECT) not in suspected, "its check has not had its time yet"
    assert membership.is_alive(id_of(1))
    assert membership.is_alive(id_of(2))


def test_a_member_that_came_back_is_not_judged_by_a_probe_from_before():
    membership = machine(1)
    membership.evidence_of_death(id_of(1), 0.0)
    hear(membership, update(1, DEAD), update(1, ALIVE, 1), now=0.1)
    effects = tick_until(membership, 0.1, SETTINGS.verify_timeout_s + 0.1, answers=True)
    assert [one for send in sends(effects, Gossip) for one in send.message.updates if one.state == SUSPECT] == []


def test_a_suspect_is_told_on_every_ack_even_after_the_rumour_has_run_out():
    membership = machine(2)
    hear(membership, update(1, SUSPECT))
    for _ in range(50):
        (ack,) = sends(membership.ping(id_of(1), Ping(1, []), 0.0), PingAck)
        assert ack.message.updates[0] == update(1, SUSPECT)
    (ack,) = sends(membership.ping(id_of(2), Ping(1, []), 0.0), PingAck)
    assert ack.message.updates == []


# ---- rumours --------------------------------------------------------------------------------------------------------


def test_a_rumour_is_sent_a_limited_number_of_times_least_sent_first():
    rumours = Rumours()
    rumours.add(update(1, ALIVE))
    assert [rumours.take(1, 3) for _ in range(2)] == [[update(1, ALIVE)]] * 2
    rumours.add(update(2, ALIVE))
    assert rumours.take(1, 3) == [update(2, ALIVE)]
    rumours.add(update(1, DEAD))
    taken = [one for _ in range(10) for one in rumours.take(1, 3)]
    assert taken.count(update(1, DEAD)) == 3
    assert taken.count(update(2, ALIVE)) == 2
    assert update(1, ALIVE) not in taken, "a newer rumour replaces the older"
    assert len(rumours) == 0


def test_news_is_forwarded_at_once_to_a_few_and_old_news_to_nobody():
    membership = machine(20)
    effects = hear(membership, update(2, SUSPECT))
    assert len(sends(effects, Gossip)) == SETTINGS.gossip_fanout
    assert all(send.message.updates == [update(2, SUSPECT)] for send in effects)
    assert hear(membership, update(2, SUSPECT)) == []


def test_rumours_on_a_ping_are_limited():
    membership = machine(1)
    for number in range(10, 60):
        hear(membership, update(number, ALIVE))
    (ack,) = sends(membership.ping(id_of(1), Ping(1, []), 0.0), PingAck)
    assert len(ack.message.updates) == UPDATES_PER_PING_MAX - 1


def test_the_whole_view_is_pushed_now_and_then():
    membership = machine(2)
    effects = tick_until(membership, 0.0, 25.0, answers=True)
    pushed = [send for send in sends(effects, Gossip) if len(send.message.updates) == 3]
    assert 2 <= len(pushed) <= 3


# ---- seeds, draining, leaving ---------------------------------------------------------------------------------------


def test_seeds_are_contacted_at_once_then_ever_slower_but_for_ever():
    membership = Membership(info(0), SETTINGS, random.Random(1), 0.0)
    now, contacts = 0.0, []
    while now < 300.0:
        contacts += [now for effect in membership.tick(now) if isinstance(effect, JoinSeed)]
        now = membership.next_wakeup(now)
    assert contacts[0] == 0.0
    assert contacts[1] < 1.0
    gaps = [later - earlier for earlier, later in itertools.pairwise(contacts)]
    assert all(gap <= SETTINGS.seed_interval_s * 1.5 for gap in gaps)
    assert 15 < len(contacts) < 50


def test_draining_is_told_and_kept_through_a_suspicion():
    membership = machine()
    (changed,) = changes(hear(membership, update(2, DRAINING, 1)))
    assert changed.draining == (id_of(2),)
    assert info(2) in changed.alive
    hear(membership, update(2, SUSPECT, 1))
    (changed,) = changes(hear(membership, update(3, DEAD)))
    assert changed.draining == (id_of(2),)


def test_this_agent_drains_and_still_refutes():
    membership = machine()
    effects = membership.drain(0.0)
    assert changes(effects)[0].draining == (id_of(0),)
    assert sends(effects, Gossip)[0].message.updates == [update(0, DRAINING, 1)]
    assert membership.drain(0.0) == []
    effects = hear(membership, update(0, SUSPECT, 1))
    assert sends(effects, Gossip)[0].message.updates == [update(0, DRAINING, 2)]


def test_leaving_tells_every_member_and_ends_all_activity():
    membership = machine(20)
    effects = membership.leave(0.0)
    assert {send.agent_id for send in effects} == {id_of(number) for number in range(1, 21)}
    assert all(send.message.updates == [update(0, LEFT, 1)] for send in effects)
    assert membership.has_left
    assert membership.next_wakeup(0.0) == math.inf
    assert membership.tick(10.0) == []
    assert membership.leave(10.0) == []
    assert hear(membership, update(0, SUSPECT, 1)) == []
    assert info(0) not in membership.alive()


@pytest.mark.parametrize(
    ("name", "value"), [("probe_interval_s", 0.0), ("relays", 0), ("forget_s", -1.0), ("suspicion_s", math.inf)]
)
def test_settings_that_make_no_sense_are_refused_by_name(name: str, value: float):
    with pytest.raises(ConfigError, match=name):
        MembershipSettings(**{name: value})


def test_the_view_for_people_shows_the_dead_until_they_are_forgotten():
    membership = machine(2)
    hear(membership, update(2, DEAD))
    assert update(2, DEAD) in membership.view()
    tick_until(membership, 0.0, SETTINGS.forget_s + 1.0, answers=True)
    assert update(2, DEAD) not in membership.view()
    assert update(1, ALIVE) in membership.view()


# ---- what others rely on --------------------------------------------------------------------------------------------


def test_no_two_pings_have_the_same_number_and_each_goes_to_somebody_known():
    membership = machine(4)
    effects = hear(membership, update(2, SUSPECT), update(3, DEAD))
    effects += membership.ping_request(id_of(1), PingRequest(7, id_of(4), []), 0.0)
    effects += membership.evidence_of_death(id_of(4), 0.0)
    effects += tick_until(membership, 0.0, 30.0)
    pings = sends(effects, Ping)
    numbers = [ping.message.sequence for ping in pings]
    assert len(set(numbers)) == len(numbers)
    assert all(number > 0 for number in numbers)
    assert {ping.agent_id for ping in pings} == {id_of(number) for number in (1, 2, 3, 4)}


def test_every_message_has_rumours_even_if_none():
    membership = machine(4)
    effects = membership.ping_request(id_of(1), PingRequest(7, id_of(0), []), 0.0)
    effects += membership.ping_request(id_of(1), PingRequest(8, id_of(2), []), 0.0)
    (relayed,) = sends(effects, Ping)
    effects += membership.ack(id_of(2), PingAck(relayed.message.sequence, id_of(2), []), 0.1)
    effects += tick_until(membership, 0.1, 10.0)
    messages = [effect.message for effect in effects if isinstance(effect, Send)]
    assert {type(message) for message in messages} == {Ping, PingAck, PingRequest, Gossip}
    assert all(isinstance(message.updates, list) for message in messages)
    assert {send.agent_id for send in sends(effects, PingAck)} == {id_of(1)}


def test_a_suspect_hears_of_it_from_who_suspects_it():
    membership = machine(1)
    effects = tick_until(membership, 0.0, 5.0)
    told = [update for send in sends(effects, Gossip) if send.agent_id == id_of(1) for update in send.message.updates]
    assert (id_of(1), SUSPECT) in [(update.info.agent_id, update.state) for update in told]


def test_a_newcomer_is_shown_the_whole_view_and_a_member_is_not():
    membership = machine(3)
    shown = [send for send in sends(membership.hello(info(9), 0.0), Gossip) if send.agent_id == id_of(9)]
    assert {update.info.agent_id for send in shown for update in send.message.updates} >= {id_of(n) for n in range(4)}
    assert not [send for send in sends(membership.hello(info(9), 1.0), Gossip) if send.agent_id == id_of(9)]


@pytest.mark.parametrize("agent_id", [id_of(0), b"short", b""])
def test_a_hello_of_oneself_or_of_nobody_changes_nothing(agent_id: bytes):
    membership = machine(3)
    before = membership.alive()
    stranger = AgentInfo(agent_id, "x", "10.0.0.1", 7002, 9002)
    assert changes(membership.hello(stranger, 0.0)) == []
    assert membership.alive() == before


def test_a_hello_from_another_address_does_not_clear_a_suspicion():
    membership = machine(3)
    hear(membership, update(2, SUSPECT, 4))
    membership.hello(AgentInfo(id_of(2), "agent-2", "10.9.9.9", 1, 2), 0.0)
    (known,) = [update for update in membership.view() if update.info.agent_id == id_of(2)]
    assert (known.state, known.refutation, known.info.host) == (SUSPECT, 4, "10.9.9.9")


def test_who_knows_only_the_dead_still_asks_them():
    membership = machine(1)
    hear(membership, update(1, DEAD))
    pings = sends(tick_until(membership, 0.0, 4 * SETTINGS.dead_probe_interval_s), Ping)
    assert len(pings) >= 3
    assert {ping.agent_id for ping in pings} == {id_of(1)}


def test_counters_count_every_time():
    membership = machine(3)
    for refutation in (3, 9):
        hear(membership, update(0, SUSPECT, refutation))
        hear(membership, update(2, SUSPECT, -1))
        hear(membership, *[update(2, ALIVE)] * (UPDATES_PER_GOSSIP_MAX + 2))
    assert membership.n_refutations == 2
    assert membership.n_updates_refused == 2 * 3
