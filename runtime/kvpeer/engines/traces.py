"""What an engine says of its decisions to its agent, so that it can be asked later why a request did not hit.

A trace is told at the decision when nothing is to be loaded, else when the load is over. The engine's thread only
appends to a bounded list; a thread of its own sends what is there, twice a second, in one message. What does not fit is
dropped and counted: a trace is worth less than the least delay.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kvpeer.core.policy import Candidate, Decision, Located, RequestFacts
from kvpeer.core.policy.decision import Action
from kvpeer.wire.messages import SUBJECT_CHARS_MAX, TRACED_HOLDERS_MAX, TRACES_MAX, RequestTrace, Traced
from kvpeer.wire.packing import U4, pack

__all__ = ["NO_LOOKUP", "NO_TRACES", "DecisionTraces", "Lookup", "NoTraces", "TraceSender"]

INTERVAL_S = 0.5
"""Between two messages: a person who asks at once waits no longer than that."""

WAITING_MAX = 4 * TRACES_MAX
"""Traces that wait to be sent; two thousand requests a second fit."""

OPEN_MAX = 4096
"""Requests whose load is under way, or that are asked about again and again; beyond it the oldest is told as it is."""

_STOP_WAIT_S = 1.0

_logger = logging.getLogger("kvpeer.engines.traces")


@dataclass(frozen=True, slots=True)
class Lookup:
    """How long the agent took to say where a request's pages are, and why the first missing one is."""

    seconds: float = 0.0
    reason: str = ""


NO_LOOKUP = Lookup()


@dataclass(slots=True)
class _Open:
    """A request that may still be decided about again, or whose load is under way."""

    trace: RequestTrace
    at: float
    is_told: bool


class DecisionTraces:
    """Makes a trace of what happens to a request, and hands it to `keep`. Belongs to one thread."""

    def __init__(
        self, keep: Callable[[RequestTrace, float], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keep = keep
        self._clock = clock
        self._open: dict[str, _Open] = {}

    def unasked(self, request: str, n_tokens: int, page_tokens: int, reason: str) -> None:
        """A request that nobody was asked about; told once, however often it is said."""
        known = self._open.get(request)
        if known is None or (
            known.is_told and known.trace.outcome == "computed" and known.trace.reason != _why(reason)
        ):
            trace = _undecided(RequestFacts(request, n_tokens, page_tokens), reason)
            self._hold(request, trace, is_final=True)

    def decided(
        self, facts: RequestFacts, local_tokens: int, located: Located, candidates: Sequence[Candidate],
        decision: Decision, lookup: Lookup,
    ) -> None:  # fmt: skip
        """A decision, or the same one again: the engine asks as long as it cannot schedule the request."""
        known = self._open.get(facts.request)
        if known is not None and known.trace.reason == _named(decision) and known.trace.n_tokens == decision.n_tokens:
            return
        trace = _trace(facts, local_tokens, located, candidates, decision, lookup)
        self._hold(facts.request, trace, is_final=decision.action is Action.NONE)

    def loaded(self, request: str, n_tokens: int, seconds: float, *, is_void: bool) -> None:
        """All ranks' loads of the request are over."""
        known = self._open.get(request)
        if known is None:
            return
        outcome = "loaded" if n_tokens >= known.trace.n_tokens else "partly_loaded" if n_tokens else "not_loaded"
        if is_void and outcome != "loaded":
            outcome = "given_up"
        ended = {"outcome": outcome, "loaded_tokens": n_tokens, "load_us": _us(seconds)}
        known.trace, known.is_told = msgspec.structs.replace(known.trace, **ended), True
        self._keep(known.trace, known.at)

    def over(self, request: str) -> None:
        """The request is over; what was decided is told if it was not yet."""
        known = self._open.pop(request, None)
        if known is not None and not known.is_told:
            self._keep(known.trace, known.at)

    def _hold(self, request: str, trace: RequestTrace, *, is_final: bool) -> None:
        if request not in self._open and len(self._open) >= OPEN_MAX:
            self.over(next(iter(self._open)))
        at = self._clock()
        self._open[request] = _Open(trace, at, is_final)
        if is_final:
            self._keep(trace, at)


class NoTraces(DecisionTraces):
    """Nobody is told."""

    def __init__(self) -> None:
        super().__init__(lambda trace, at: None)

    def unasked(self, *_: object) -> None:
        """Nothing."""

    def decided(self, *_: object) -> None:
        """Nothing."""


NO_TRACES = NoTraces()


class TraceSender:
    """Sends traces in batches on a thread of its own. `add` never blocks; any thread may call it.

    send: gives a message to the agent, within a bounded time; False if it was not taken. `_lock` protects `_waiting`
    and `_n_dropped`.
    """

    def __init__(self, send: Callable[[Traced], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: list[tuple[RequestTrace, float]] = []
        self._n_dropped = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpeer-traces", daemon=True)
        self._thread.start()

    def add(self, trace: RequestTrace, at: float) -> None:
        """Takes in a trace of a decision that was made at `at`."""
        with self._lock:
            if len(self._waiting) < WAITING_MAX:
                self._waiting.append((trace, at))
            else:
                self._n_dropped += 1

    def flush(self) -> None:
        """Sends what waits. Blocks while the agent does not read, for a bounded time."""
        while True:
            with self._lock:
                batch, self._waiting = self._waiting[:TRACES_MAX], self._waiting[TRACES_MAX:]
                n_dropped, self._n_dropped = self._n_dropped, 0
            if not batch and not n_dropped:
                return
            now = self._clock()
            traces = [msgspec.structs.replace(trace, age_us=_us(now - at)) for trace, at in batch]
            if not self._send(Traced(traces, n_dropped)):
                with self._lock:
                    self._n_dropped += n_dropped + len(batch)
                return

    def close(self) -> None:
        """Ends the thread; bounded. What waits is not sent any more."""
        self._is_over.set()
        self._thread.join(_STOP_WAIT_S)

    def _run(self) -> None:
        while not self._is_over.wait(INTERVAL_S):
            try:
                self.flush()
            except Exception:
                # The root of this thread: traces are lost, and the next ones are sent.
                _logger.exception("kvpeer: traces could not be sent")


def _named(decision: Decision) -> str:
    return f"decision.{decision.reason.value}"


def _why(reason: str) -> str:
    return f"request.{reason}"


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1e6))


def _undecided(facts: RequestFacts, reason: str) -> RequestTrace:
    return RequestTrace(
        facts.request[:SUBJECT_CHARS_MAX], facts.prompt_tokens, facts.page_tokens, facts.page_bytes, 0, 0, 0, b"", b"",
        0, "", _why(reason), 0, 0, b"", 0, 0, 0, False, "computed", 0, 0, 0,
    )  # fmt: skip


def _trace(
    facts: RequestFacts, local_tokens: int, located: Located, candidates: Sequence[Candidate], decision: Decision,
    lookup: Lookup,
) -> RequestTrace:  # fmt: skip
    holders, estimates = candidates[:TRACED_HOLDERS_MAX], decision.estimates
    pull, prefill = (estimates.pull, estimates.prefill) if estimates is not None else (None, None)
    outcome = "computed" if decision.action is Action.NONE else "ordered"
    return RequestTrace(
        facts.request[:SUBJECT_CHARS_MAX], facts.prompt_tokens, facts.page_tokens, facts.page_bytes,
        local_tokens, located.resident_tokens, located.reachable_tokens,
        b"".join(holder.producer for holder in holders),
        pack(np.array([holder.reachable_tokens for holder in holders], dtype=np.uint32), U4),
        _us(lookup.seconds), lookup.reason, _named(decision), decision.n_tokens, _us(decision.wait_s),
        decision.producer, _us(pull.seconds) if pull else 0, _us(pull.deviation_s) if pull else 0,
        _us(prefill.seconds) if prefill else 0, estimates is not None and estimates.are_known, outcome, 0, 0, 0,
    )  # fmt: skip
