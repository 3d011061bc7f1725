"""One membership machine, agent 0, and what the tests say to it and read off it."""

from __future__ import annotations

import random

from kvpeer.core.membership import (
    Effect,
    MembersChanged,
    Membership,
    MembershipSettings,
    MemberState,
    Send,
)
from kvpeer.model import AgentId
from kvpeer.wire.messages import AgentInfo, Gossip, MemberUpdate, Ping, PingAck

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
