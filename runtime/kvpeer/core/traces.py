"""What an agent remembers of requests, so that it can be asked minutes later why one did not hit.

A *trace* gathers, by the request's id, what the agent did (locates, fetches, what moved from whom) and what the engine
said of its decision. Traces lie in a ring with two limits; the oldest go. Nothing of a prompt is in one: a page is
known by the first four bytes of its key, which is a hash already, and the request by its id. Not safe for concurrent
access.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpeer.core.sources import Offer
from kvpeer.model import KEY_BYTES, Outcome
from kvpeer.wire.messages import RequestTrace

__all__ = ["KEY_HASH_BYTES", "LocateStep", "Move", "Trace", "TraceLimits", "TraceRing", "key_hashes", "unnamed_request"]

KEY_HASH_BYTES = 4
"""Of a key, in a trace: tells the pages of 8 MiB of traces apart well enough, and fetches nothing."""

TRACE_KEYS_MAX = 1024
"""Pages that a trace names, the first ones: a prompt of 16,000 tokens in pages of 16."""

LOCATES_MAX = 4
"""Locates that a trace keeps, the first ones: an engine asks once, and again after a preemption."""

MOVES_MAX = 16
"""Pairs of producer and transport that a trace keeps apart: more than a pull asks."""

REASONS_MAX = 16
"""Reasons that a trace counts; there are fewer."""

TRACE_BYTES = 900
"""What a trace without steps takes: measured, with its places in the ring and the containers in it."""

STEP_BYTES = 500
"""What a locate, a move or a counted reason adds, at most."""

VERDICT_BYTES = 1300
"""What the engine's half adds, with its numbers and strings."""


@dataclass(frozen=True, slots=True)
class TraceLimits:
    """traces_max: 4,096 are some minutes of a busy engine. bytes_max: bounds them where prompts are long."""

    traces_max: int = 4096
    bytes_max: int = 8 << 20


@dataclass(frozen=True, slots=True)
class LocateStep:
    """One question of the engine: pages by where they were, why the first missing one was, and who offered how many of
    the first pages."""

    began_at: float
    seconds: float
    n_own_pool: int
    n_peer: int
    n_missing: int
    reason: str
    offers: tuple[tuple[bytes, int], ...]


@dataclass(slots=True)
class Move:
    """Pages asked of one producer by one transport. `seconds` adds up the fetches, which may have run side by side."""

    began_at: float
    ended_at: float = 0.0
    n_fetches: int = 0
    n_bytes: int = 0
    seconds: float = 0.0
    outcomes: list[int] = field(default_factory=lambda: [0] * len(Outcome))
    error: str = ""


@dataclass(slots=True)
class Trace:
    """See the module docstring. Times are of the agent's clock. `namespace`: the first 8 bytes of its digest.
    `outcomes`: page parts that ranks fetched, by outcome; `n_own_pool` of them lay in the own pool."""

    request: str
    namespace: bytes
    began_at: float
    n_bytes: int
    key_hashes: bytes = b""
    locates: list[LocateStep] = field(default_factory=list)
    n_fetches: int = 0
    n_own_pool: int = 0
    fetch_s: float = 0.0
    fetch_began_at: float = 0.0
    fetch_ended_at: float = 0.0
    outcomes: list[int] = field(default_factory=lambda: [0] * len(Outcome))
    moves: dict[tuple[bytes, str], Move] = field(default_factory=dict)
    unasked: dict[str, int] = field(default_factory=dict)
    verdict: RequestTrace | None = None
    verdict_at: float = 0.0

    def has_key(self, key_hash: bytes) -> bool:
        """Whether a page whose key begins so is among the ones that the trace names."""
        wanted = np.frombuffer(key_hash, dtype=np.uint32)
        return bool((np.frombuffer(self.key_hashes, dtype=np.uint32) == wanted).any())


def key_hashes(keys: bytes, n_max: int = TRACE_KEYS_MAX) -> bytes:
    """The first bytes of each of the first keys, packed."""
    first = np.frombuffer(keys, dtype=np.uint8).reshape(-1, KEY_BYTES)[:n_max, :KEY_HASH_BYTES]
    return first.tobytes()


def unnamed_request(keys: bytes) -> str:
    """What stands for the id of a request that the engine does not name, and asks for these pages."""
    return f"@{keys[:KEY_HASH_BYTES].hex()}"


class TraceRing:
    """See the module docstring."""

    def __init__(self, limits: TraceLimits = TraceLimits()) -> None:
        self._limits = limits
        self._traces: OrderedDict[str, Trace] = OrderedDict()
        self.n_bytes = 0
        """What the traces take, by the costs named above."""
        self.n_evicted = 0
        self.n_dropped_by_engines = 0
        """Traces that engines had no room to keep until they were sent."""

    def __len__(self) -> int:
        return len(self._traces)

    def __iter__(self) -> Iterator[Trace]:
        """The youngest first."""
        return reversed(self._traces.values())

    def get(self, request: str) -> Trace | None:
        """The trace of this request."""
        return self._traces.get(request)

    def of_key(self, key_hash: bytes) -> list[Trace]:
        """The traces that name this page, the youngest first. O(all)."""
        return [trace for trace in self if trace.has_key(key_hash)]

    # ---- what happens

    def located(
        self, request: str, namespace: bytes, keys: bytes, counts: Sequence[int], reason: str, offers: Sequence[Offer],
        began_at: float, now: float,
    ) -> None:  # fmt: skip
        """An engine asked where pages are. counts: pages nowhere, in the own pool, at a peer."""
        trace = self._trace(request, namespace, keys, began_at)
        if not trace.key_hashes:
            trace.key_hashes = key_hashes(keys)
            self._grow(trace, len(trace.key_hashes))
        if len(trace.locates) < LOCATES_MAX:
            offered = tuple((bytes(offer.producer), offer.n_pages) for offer in offers)
            step = LocateStep(began_at, now - began_at, counts[1], counts[2], counts[0], reason, offered)
            trace.locates.append(step)
            self._grow(trace, STEP_BYTES + 120 * len(offered))
        self._evict()

    def fetched(
        self, request: str, namespace: bytes, keys: bytes, n_own_pool: int, pulled: Sequence[int], began_at: float,
        now: float,
    ) -> None:  # fmt: skip
        """A rank fetched pages: so many lay in the own pool, and these are the others by outcome."""
        trace = self._traces.get(request)
        if trace is None:
            trace = self._trace(request, namespace, keys, began_at)
            self._evict()
        if not trace.n_fetches:
            trace.fetch_began_at = began_at
        trace.n_fetches += 1
        trace.n_own_pool += n_own_pool
        trace.fetch_s += now - began_at
        trace.fetch_ended_at = now
        outcomes = trace.outcomes
        outcomes[0] += n_own_pool
        for outcome, n in enumerate(pulled):
            if n:
                outcomes[outcome] += n

    def moved(
        self, request: str, namespace: bytes, keys: bytes, producer: bytes, transport: str, counts: Sequence[int],
        n_bytes: int, error: str, began_at: float, now: float,
    ) -> None:  # fmt: skip
        """A producer was asked for pages: what became of them, by outcome, and how many bytes came verified."""
        trace = self._trace(request, namespace, keys, began_at)
        move = trace.moves.get((producer, transport))
        if move is None:
            if len(trace.moves) >= MOVES_MAX:
                return
            move = trace.moves[producer, transport] = Move(began_at)
            self._grow(trace, STEP_BYTES)
        move.n_fetches += 1
        move.n_bytes += n_bytes
        move.seconds += now - began_at
        move.ended_at = now
        move.error = error or move.error
        for outcome, n in enumerate(counts):
            move.outcomes[outcome] += n
        self._evict()

    def unasked(
        self, request: str, namespace: bytes, keys: bytes, counts: Sequence[tuple[str, int]], now: float
    ) -> None:
        """No producer was asked for so many pages, by UnaskedReason."""
        trace = self._trace(request, namespace, keys, now)
        for reason, n in counts:
            if reason in trace.unasked or len(trace.unasked) < REASONS_MAX:
                trace.unasked[reason] = trace.unasked.get(reason, 0) + n
        self._grow(trace, len(counts) * STEP_BYTES // 4)
        self._evict()

    def told(self, namespace: bytes, verdicts: Sequence[RequestTrace], n_dropped: int, now: float) -> None:
        """An engine said what it did with these requests."""
        self.n_dropped_by_engines += n_dropped
        for verdict in verdicts:
            age_s = verdict.age_us / 1e6
            trace = self._trace(verdict.request, namespace, b"", now - age_s)
            self._grow(trace, 0 if trace.verdict else VERDICT_BYTES)
            trace.verdict, trace.verdict_at = verdict, now - age_s
        self._evict()

    # ---- inside

    def _trace(self, request: str, namespace: bytes, keys: bytes, now: float) -> Trace:
        """An engine that names no request has its questions about one prompt kept together by the first page."""
        name = request or unnamed_request(keys)
        trace = self._traces.get(name)
        if trace is None:
            trace = self._traces[name] = Trace(name, namespace[:8], now, 0)
            self._grow(trace, TRACE_BYTES + 4 * len(name))
        return trace

    def _grow(self, trace: Trace, n_bytes: int) -> None:
        trace.n_bytes += n_bytes
        self.n_bytes += n_bytes

    def _evict(self) -> None:
        limits = self._limits
        while len(self._traces) > limits.traces_max or (self.n_bytes > limits.bytes_max and len(self._traces) > 1):
            _, oldest = self._traces.popitem(last=False)
            self.n_bytes -= oldest.n_bytes
            self.n_evicted += 1
