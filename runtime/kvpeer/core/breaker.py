"""Circuit breakers: a peer that fails repeatedly is left alone for a while, then tried with one request.

closed --failures_to_open failures in a row--> open --backoff over--> half-open --success--> closed
                                                 ^                        |
                                                 +---failure, backoff x 2-+
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from kvpeer.model import AgentId, ConfigError

__all__ = ["BREAKERS_MAX", "BreakerSettings", "BreakerState", "Breakers"]

BREAKERS_MAX = 1024
"""Peers with failures that are remembered: as many as a cluster has members. Beyond, the one that failed longest ago is
forgotten, which closes its breaker: forgetting costs one deadline, not more."""


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When breakers open and for how long.

    Raises:
        ConfigError: a value makes no sense; the message names it.
    """

    failures_to_open: int = 3
    """Failures in a row. One or two are a lost packet or a peer that restarts its link."""
    backoff_s: float = 0.5
    """Open for this long the first time; twice as long after each failed try."""
    backoff_s_max: float = 30.0
    """Never open longer than this: a peer that came back is found again in half a minute."""
    try_timeout_s: float = 5.0
    """A try whose outcome nobody reported counts as lost after this long, and another is let through."""

    def __post_init__(self) -> None:
        if self.failures_to_open < 1:
            raise ConfigError(f"breaker.failures_to_open must be at least 1, not {self.failures_to_open}")
        if not 0 < self.backoff_s <= self.backoff_s_max < math.inf:
            raise ConfigError(
                f"breaker.backoff_s ({self.backoff_s}) must be positive and at most backoff_s_max "
                f"({self.backoff_s_max}), which is finite"
            )
        if not 0 < self.try_timeout_s < math.inf:
            raise ConfigError(f"breaker.try_timeout_s must be a positive number, not {self.try_timeout_s}")


@dataclass(slots=True)
class _Failing:
    """A peer whose last request failed. `open_until` is None while it is still closed."""

    n_failures: int = 0
    backoff_s: float = 0.0
    open_until: float | None = None
    try_until: float | None = None


class Breakers:
    """One breaker per peer; peers without failures take no memory. Every call is O(1). Not thread-safe."""

    def __init__(self, settings: BreakerSettings | None = None) -> None:
        self._settings = settings or BreakerSettings()
        self._failing: dict[AgentId, _Failing] = {}

    def __len__(self) -> int:
        return len(self._failing)

    def state(self, peer: AgentId, now: float) -> BreakerState:
        """The peer's breaker, changing nothing."""
        failing = self._failing.get(peer)
        if failing is None or failing.open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < failing.open_until else BreakerState.HALF_OPEN

    def is_usable(self, peer: AgentId, now: float) -> bool:
        """Whether `admit` would let a request through, changing nothing: for choosing among peers."""
        failing = self._failing.get(peer)
        if failing is None or failing.open_until is None:
            return True
        return now >= failing.open_until and (failing.try_until is None or now >= failing.try_until)

    def admit(self, peer: AgentId, now: float) -> bool:
        """Whether to send a request now. True while half-open takes the one try: report its outcome, or that it was
        not sent."""
        if not self.is_usable(peer, now):
            return False
        failing = self._failing.get(peer)
        if failing is not None and failing.open_until is not None:
            failing.try_until = now + self._settings.try_timeout_s
        return True

    def not_sent(self, peer: AgentId) -> None:
        """A request that was admitted was not sent after all: what it took of the breaker is given back."""
        failing = self._failing.get(peer)
        if failing is not None:
            failing.try_until = None

    def succeeded(self, peer: AgentId) -> None:
        """Closes the breaker."""
        self._failing.pop(peer, None)

    def failed(self, peer: AgentId, now: float) -> None:
        """Counts a failure. Failures of requests sent before the breaker opened do not prolong it."""
        failing = self._failing.pop(peer, None) or _Failing()
        if len(self._failing) >= BREAKERS_MAX:
            del self._failing[next(iter(self._failing))]
        self._failing[peer] = failing
        failing.n_failures += 1
        is_open = failing.open_until is not None and now < failing.open_until
        if is_open or failing.n_failures < self._settings.failures_to_open:
            return
        doubled = failing.backoff_s * 2 or self._settings.backoff_s
        failing.backoff_s = min(doubled, self._settings.backoff_s_max)
        failing.open_until = now + failing.backoff_s
        failing.try_until = None

    def forget(self, peer: AgentId) -> None:
        """Drops what is known of a peer that ended: its id never comes back."""
        self._failing.pop(peer, None)
