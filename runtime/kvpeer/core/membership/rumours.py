"""Rumours that this agent still has to pass on."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from kvpeer.wire.messages import MemberUpdate

__all__ = ["Rumours"]


@dataclass(slots=True)
class _Rumour:
    update: MemberUpdate
    n_sent: int


class Rumours:
    """At most one rumour per member, the newest; each is handed out a bounded number of times, least sent first.

    Bounded by the members and tombstones the table holds. Not thread-safe.
    """

    def __init__(self) -> None:
        self._rumours: dict[bytes, _Rumour] = {}

    def __len__(self) -> int:
        return len(self._rumours)

    def add(self, update: MemberUpdate, n_sent: int = 0) -> None:
        """Replaces what was said about this member. `n_sent` copies are on their way already."""
        self._rumours[update.info.agent_id] = _Rumour(update, n_sent)

    def take(self, n_max: int, retransmits: int) -> list[MemberUpdate]:
        """At most `n_max` rumours to put on one message. A rumour is dropped with its `retransmits`-th copy."""
        if not self._rumours:
            return []
        taken = heapq.nsmallest(n_max, self._rumours.values(), key=lambda rumour: rumour.n_sent)
        for rumour in taken:
            rumour.n_sent += 1
            if rumour.n_sent >= retransmits:
                del self._rumours[rumour.update.info.agent_id]
        return [rumour.update for rumour in taken]
