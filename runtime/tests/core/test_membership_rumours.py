"""What one membership machine tells, to whom and how often; how it joins and leaves."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from kvpeer.core.membership import (
    JoinSeed,
    Membership,
    MembershipSettings,
    Send,
)
from kvpeer.core.membership.rumours import Rumours
from kvpeer.core.membership.settings import UPDATES_PER_GOSSIP_MAX, UPDATES_PER_PING_MAX
from kvpeer.model import ConfigError
from kvpeer.wire.messages import AgentInfo, Gossip, Ping, PingAck, PingRequest
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
