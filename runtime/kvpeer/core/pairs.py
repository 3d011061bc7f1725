"""How reading from each producer went: pages by outcome, bytes, and the rate of the last fetches.

Not safe for concurrent access.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvpeer.model import AgentId, Outcome

__all__ = ["Pair", "PairLedger"]

RECENT_SHARE = 0.2
"""What the latest fetch counts in the recent rate: five fetches are seen in it."""

RATED_BYTES_MIN = 1 << 20
"""Of a fetch that says something about the rate; less is mostly latency."""


@dataclass(slots=True)
class Pair:
    """Reading from one producer. `rate_bytes_per_s`: of the last fetches of at least a mebibyte, 0 before the first.
    `latency_s`: the least that a fetch took."""

    transport: str = ""
    n_fetches: int = 0
    n_bytes: int = 0
    seconds: float = 0.0
    outcomes: list[int] = field(default_factory=lambda: [0] * len(Outcome))
    rate_bytes_per_s: float = 0.0
    latency_s: float = 0.0
    last_at: float = 0.0
    last_error: str = ""


class PairLedger:
    """Pairs by producer; a producer that ended is forgotten."""

    def __init__(self) -> None:
        self._pairs: dict[AgentId, Pair] = {}

    def __iter__(self) -> Iterator[tuple[AgentId, Pair]]:
        return iter(self._pairs.items())

    def get(self, producer: AgentId) -> Pair | None:
        """The pair of this producer, if it was ever asked."""
        return self._pairs.get(producer)

    def forget(self, producer: AgentId) -> None:
        """The producer is no member any more."""
        self._pairs.pop(producer, None)

    def fetched(
        self, producer: AgentId, transport: str, counts: Sequence[int], n_bytes: int, error: str, seconds: float,
        now: float,
    ) -> None:  # fmt: skip
        """A fetch is over: pages by outcome, bytes that came verified, and why it ended early if it did."""
        pair = self._pairs.get(producer)
        if pair is None:
            pair = self._pairs[producer] = Pair()
        pair.transport = transport
        pair.n_fetches += 1
        pair.n_bytes += n_bytes
        pair.seconds += seconds
        pair.last_at = now
        pair.last_error = error
        for outcome, n in enumerate(counts):
            pair.outcomes[outcome] += n
        if seconds > 0 and n_bytes:
            pair.latency_s = min(pair.latency_s or seconds, seconds)
            if n_bytes >= RATED_BYTES_MIN:
                rate, before = n_bytes / seconds, pair.rate_bytes_per_s
                pair.rate_bytes_per_s = rate if not before else before + RECENT_SHARE * (rate - before)
