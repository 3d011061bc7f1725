"""Whom to probe next, and the pings that are under way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvpeer.core.membership.settings import INDIRECT_PINGS_MAX
from kvpeer.core.rng import Rng
from kvpeer.model import AgentId

__all__ = ["IndirectPing", "IndirectPings", "Probe", "ProbeOrder", "Probes"]


class ProbeOrder:
    """Round-robin over a shuffled list, shuffled again after each round; a new member enters at a random place.

    So every member is probed by each other once per round, however the shuffles fall. Source: SWIM, section 4.3.
    """

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        self._order: list[AgentId] = []
        self._next = 0

    def add(self, agent_id: AgentId) -> None:
        self._order.insert(self._rng.randrange(len(self._order) + 1), agent_id)

    def remove(self, agent_id: AgentId) -> None:
        place = self._order.index(agent_id)
        del self._order[place]
        if place < self._next:
            self._next -= 1

    def next(self) -> AgentId | None:
        """The next member to probe; None when there is none."""
        if not self._order:
            return None
        if self._next >= len(self._order):
            self._rng.shuffle(self._order)
            self._next = 0
        agent_id = self._order[self._next]
        self._next += 1
        return agent_id


@dataclass(slots=True)
class Probe:
    """A question whether `target` lives. `relays_at`: when relays are asked, None once they were.
    `is_verification`: there was evidence of its death."""

    target: AgentId
    sequence: int
    relays_at: float | None
    deadline: float
    is_verification: bool


class Probes:
    """Probes under way, at most one a member: a newer one replaces the older. Not thread-safe."""

    def __init__(self) -> None:
        self._by_target: dict[AgentId, Probe] = {}

    def __contains__(self, target: object) -> bool:
        return target in self._by_target

    def is_verifying(self, target: AgentId) -> bool:
        probe = self._by_target.get(target)
        return probe is not None and probe.is_verification

    def start(self, probe: Probe) -> None:
        self._by_target[probe.target] = probe

    def answered(self, sequence: int, target: AgentId) -> bool:
        """Ends the probe that this ack answers; False when it answers none (late, duplicate or made up)."""
        probe = self._by_target.get(target)
        if probe is None or probe.sequence != sequence:
            return False
        del self._by_target[target]
        return True

    def drop(self, target: AgentId) -> None:
        self._by_target.pop(target, None)

    def take_late(self, now: float) -> list[Probe]:
        """Probes whose direct ping is late, each once."""
        late = [p for p in self._by_target.values() if p.relays_at is not None and p.relays_at <= now < p.deadline]
        for probe in late:
            probe.relays_at = None
        return late

    def take_failed(self, now: float) -> list[Probe]:
        """Probes without an answer by their deadline, each once."""
        failed = [probe for probe in self._by_target.values() if probe.deadline <= now]
        for probe in failed:
            del self._by_target[probe.target]
        return failed

    def postpone(self, by_s: float) -> None:
        for probe in self._by_target.values():
            probe.deadline += by_s
            if probe.relays_at is not None:
                probe.relays_at += by_s

    def deadlines(self) -> Iterable[float]:
        return (probe.deadline if probe.relays_at is None else probe.relays_at for probe in self._by_target.values())


@dataclass(frozen=True, slots=True)
class IndirectPing:
    """A ping of `target` on behalf of `origin`, which calls it `origin_sequence`."""

    origin: AgentId
    origin_sequence: int
    target: AgentId
    deadline: float


class IndirectPings:
    """Pings under way on behalf of others. Bounded. Not thread-safe."""

    def __init__(self) -> None:
        self._pings: dict[int, IndirectPing] = {}

    def start(self, sequence: int, ping: IndirectPing) -> bool:
        """False when too many are under way."""
        if len(self._pings) >= INDIRECT_PINGS_MAX:
            return False
        self._pings[sequence] = ping
        return True

    def answered(self, sequence: int, target: AgentId) -> IndirectPing | None:
        """The ping that this ack answers, which is then over."""
        ping = self._pings.get(sequence)
        if ping is None or ping.target != target:
            return None
        return self._pings.pop(sequence)

    def expire(self, now: float) -> None:
        """Forgets pings whose asker has stopped waiting. All wait equally long, so the oldest are first."""
        while self._pings:
            sequence, ping = next(iter(self._pings.items()))
            if ping.deadline > now:
                return
            del self._pings[sequence]
