"""Who is in the cluster, as this agent sees it now: one immutable ring at a time, and the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvpeer.core.locate import PREVIOUS_RING_S, LocateRings
from kvpeer.core.ring import Ring
from kvpeer.model import AgentId
from kvpeer.wire.messages import AgentInfo

__all__ = ["ClusterView"]


class ClusterView:
    """Not thread-safe. `build_ring` makes a ring of members."""

    def __init__(self, own: AgentInfo, build_ring: Callable[[Iterable[AgentId]], Ring]) -> None:
        self._build_ring = build_ring
        self._own_id = AgentId(own.agent_id)
        self._infos = {self._own_id: own}
        self._previous: Ring | None = None
        self._changed_at = 0.0
        self.ring = build_ring([self._own_id])

    @property
    def own_id(self) -> AgentId:
        """This agent, for as long as it runs."""
        return self._own_id

    @property
    def alive(self) -> frozenset[AgentId]:
        """All members believed alive, this agent included."""
        return frozenset(self._infos)

    def info(self, agent_id: AgentId) -> AgentInfo | None:
        """Where a living member listens."""
        return self._infos.get(agent_id)

    def update(self, alive: Iterable[AgentInfo], draining: Iterable[AgentId], now: float) -> None:
        """Takes a changed view. Draining members still serve what they hold, but own no partition any more."""
        self._infos = {AgentId(info.agent_id): info for info in alive}
        leaving = set(draining)
        ring = self._build_ring(agent_id for agent_id in self._infos if agent_id not in leaving)
        if ring.epoch != self.ring.epoch:
            self._previous, self.ring, self._changed_at = self.ring, ring, now

    def rings(self, now: float, avoided: Iterable[AgentId]) -> LocateRings:
        """Whom to ask now; the previous ring for a while after a change."""
        previous = self._previous if now < self._changed_at + PREVIOUS_RING_S else None
        return LocateRings(self.ring, previous, self._own_id, frozenset(avoided))
