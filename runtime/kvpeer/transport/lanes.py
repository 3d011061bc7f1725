"""Which ways to one producer carry pages: those that work, and, after a while, those that did not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvpeer.native import RAILS_MAX, monotonic_ns

__all__ = ["FAILURES_MAX", "PROBE_EVERY_S", "Lanes", "Standing"]

FAILURES_MAX = 2
"""Failures in a row that take a lane out: one is an accident (a queue pair that was ended, a key that holds no longer),
the second a way that does not work."""

PROBE_EVERY_S = 5.0
"""A lane that is out is probed so often, by a fetch that pays for it (`verbs.PROBE_S_MAX`): 4 % of the time at most."""


class Standing(Enum):
    """Whether a lane carries pages now."""

    IN = "in"
    DUE = "due"
    """It is to be probed by who asks; others are told OUT meanwhile."""
    OUT = "out"


@dataclass(slots=True)
class _Lane:
    n_failures: int = 0
    failed_at_ns: int = 0
    is_out: bool = False
    probe_at_ns: int = 0
    reason: str = ""


class Lanes:
    """The lanes from n_own rails to one producer. Thread-safe.

    Lane k joins own rail k mod n_own and the producer's rail k mod the number of its rails: every rail of both is in
    one, and where both have equally many, rails of equal numbers meet. on_change: told a lane's number and why it is
    out, or an empty text when it is in again; called on the fetching thread.
    """

    def __init__(
        self, n_own: int, on_change: Callable[[int, str], None], clock_ns: Callable[[], int] = monotonic_ns
    ) -> None:
        self._n_own = n_own
        self._on_change = on_change
        self._clock_ns = clock_ns
        self._lock = threading.Lock()  # protects everything below
        self._n_theirs = 0  # not known: each lane asks for the rail of its own number, whichever of them works
        self._lanes = [_Lane() for _ in range(n_own)]

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def n_out(self) -> int:
        """How many carry nothing."""
        with self._lock:
            return sum(lane.is_out for lane in self._lanes)

    @property
    def reason(self) -> str:
        """Why a lane is out; empty if none is."""
        with self._lock:
            return next((lane.reason for lane in self._lanes if lane.is_out), "")

    def learn(self, n_theirs: int) -> None:
        """The producer says that it has so many rails: there may be more lanes now."""
        with self._lock:
            self._n_theirs = n_theirs
            n = min(RAILS_MAX, max(self._n_own, n_theirs))
            self._lanes += [_Lane() for _ in range(n - len(self._lanes))]

    def ends(self, number: int) -> tuple[int, int]:
        """Returns the own rail and the producer's rail of a lane."""
        return number % self._n_own, number % self._n_theirs if self._n_theirs else number

    def standing(self, number: int) -> Standing:
        """Returns whether the lane carries pages, and takes the probe upon the asker where it is due."""
        with self._lock:
            lane, now_ns = self._lanes[number], self._clock_ns()
            if not lane.is_out:
                return Standing.IN
            if now_ns < lane.probe_at_ns:
                return Standing.OUT
            lane.probe_at_ns = now_ns + round(PROBE_EVERY_S * 1e9)
            return Standing.DUE

    def worked(self, number: int) -> None:
        """Pages, or a probe, came by this lane."""
        with self._lock:
            lane = self._lanes[number]
            is_change = lane.is_out
            lane.n_failures, lane.is_out, lane.reason = 0, False, ""
        if is_change:
            self._on_change(number, "")

    def failed(self, number: int, reason: str, *, opened_ns: int = 0, is_certain: bool = False) -> None:
        """The lane broke. `is_certain`: it is out at once. opened_ns: when its queue pair was opened, where there is
        one: of several that knew the same, which holds no longer, the first one's failure counts."""
        with self._lock:
            lane = self._lanes[number]
            if not is_certain and 0 < opened_ns < lane.failed_at_ns:
                return
            lane.failed_at_ns = self._clock_ns()
            lane.n_failures += 1
            is_change = not lane.is_out and (is_certain or lane.n_failures >= FAILURES_MAX)
            if is_change:
                lane.is_out, lane.reason = True, reason
                lane.probe_at_ns = self._clock_ns() + round(PROBE_EVERY_S * 1e9)
        if is_change:
            self._on_change(number, reason)
