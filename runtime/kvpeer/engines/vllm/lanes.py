"""How many loads an engine has under way, and on whose threads: what both sides of the connector agree on.

A load out of the own pool is a copy in memory; one from peers waits for their networks and agents. Each kind has a
lane with threads of its own, so that a slow peer holds up no reload. The scheduler side accepts no more loads than a
lane begins soon; a request beyond that is computed at once instead of waiting for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

__all__ = ["START_SHARE", "Lane", "UnderWay"]

START_SHARE = 0.5
"""A load waits for a thread for at most this share of the time that it may take itself, then it is given up: its
request has lost that and no more."""


class Lane(Enum):
    """One kind of load: how many threads run it, and how many more loads may wait for each of them."""

    RELOAD = (2, 4)
    """Two copies use most of the memory's bandwidth, and one is over in a fraction of what computing takes, so that
    some may queue."""
    PULL = (4, 1)
    """As many as an agent fetches at once by default (`transport.fetch_threads`). A pull may take as long as computing
    its pages does, so that only one waits behind it."""

    def __init__(self, n_threads: int, n_waiting_per_thread: int) -> None:
        self.n_threads = n_threads
        self.loads_max = n_threads * (1 + n_waiting_per_thread)


class UnderWay:
    """Accepted loads that have not been reported by all ranks. Belongs to one thread.

    lost_after_s: a load that is not reported for so long is not counted any more; a report that went missing must not
    close a lane for good.
    """

    def __init__(self, lost_after_s: float) -> None:
        self.lost_after_s = lost_after_s
        self._loads: dict[str, tuple[Lane, float]] = {}

    def has_room(self, lane: Lane, now: float) -> bool:
        """Whether a further load of this kind is begun soon."""
        for request in [request for request, (_, lost_at) in self._loads.items() if now >= lost_at]:
            del self._loads[request]
        return sum(taken is lane for taken, _ in self._loads.values()) < lane.loads_max

    def begin(self, request: str, lane: Lane, now: float) -> None:
        """A load was accepted."""
        self._loads[request] = lane, now + self.lost_after_s

    def end(self, requests: Iterable[str]) -> None:
        """All ranks have reported these loads; others are ignored."""
        for request in requests:
            self._loads.pop(request, None)
