"""Whom one membership machine asks whether it lives, and how it judges the answers."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from kvpeer.core.membership import (
    Effect,
)
from kvpeer.core.membership.probing import ProbeOrder
from kvpeer.wire.messages import Gossip, MemberUpdate, Ping, PingAck, PingRequest
from one_member import ALIVE, DEAD, SETTINGS, SUSPECT, changes, hear, id_of, machine, sends, tick_until, update


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
