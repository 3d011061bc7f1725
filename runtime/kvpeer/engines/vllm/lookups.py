"""Lookups that never make the scheduler wait: it polls, threads ask the agent, a deadline answers when they do not.

vLLM asks `get_num_new_matched_tokens` on its scheduling thread and has no timeout of its own: an answer that never
comes is a request that never runs. So each lookup ends by its deadline whatever the agent does, and only a bounded
number of requests may wait for one.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvpeer.core.chain import ChainSlice
from kvpeer.core.sources import Offer
from kvpeer.engines.vllm.tally import Tally
from kvpeer.wire.messages import PolicyTold

__all__ = ["Answer", "Located", "Locator", "Lookups"]

LOOKUP_THREADS = 8
"""An answer takes a round trip or two and no CPU. So many answer `deferred_requests_max` requests within the default
timeout when each answer takes 30 ms, and a slow owner holds up few of them."""

FRESH_S = 2.0
"""An answer that could not be used for this long (no free blocks) is asked again: pages may be gone, and new ones
there."""

_STOP_WAIT_S = 1.0
"""What `close` waits for a thread whose lookup is under way; it is a daemon, so a longer one does not keep the
process."""

_logger = logging.getLogger("vllm.kvpeer")


class Located(Protocol):
    """What the client answers: the status of each page, u8 [n], why the rest is nowhere (from a closed list), and which
    producers have how many of the first pages."""

    @property
    def statuses(self) -> npt.NDArray[np.uint8]: ...
    @property
    def reason(self) -> str: ...
    @property
    def offers(self) -> tuple[Offer, ...]: ...


class Locator(Protocol):
    """What the scheduler side needs of `kvpeer.client.Client`."""

    @property
    def healthy(self) -> bool: ...
    @property
    def policy(self) -> PolicyTold | None: ...
    def locate(self, chain: ChainSlice, request: str, deadline_s: float) -> Located: ...
    def reset(self, reason: str) -> Any: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Answer:
    """Where pages [first, first + n) of a request's chain are. statuses: u8 [n], 0 nowhere, 1 own pool, 2 a peer.
    offers: which producers have how many of them, from `first` on. reason: why the first page that is nowhere is; it
    took the agent `seconds` to say so."""

    first: int
    statuses: npt.NDArray[np.uint8]
    offers: tuple[Offer, ...] = ()
    reason: str = ""
    seconds: float = 0.0


@dataclass
class _Lookup:
    attempt: int
    first: int
    chain: ChainSlice
    asked_at: float
    deadline: float
    answer: Answer | None = None
    seen_at: float | None = None
    """When the scheduler first saw the answer: it ages from then on, however long a step was in which it came."""
    ended: threading.Event = field(default_factory=threading.Event)


class Lookups:
    """Pending and answered lookups by request. `poll`, `forget` and `clear` belong to one thread (the scheduler's);
    the lock protects `_lookups` entries against the lookup threads.

    locate(chain, request, timeout_s) blocks until it knows where the pages are, and does not raise. learn(located) is
    called with each answer by the thread that got it, also when nobody waits for it any more.
    """

    def __init__(
        self,
        locate: Callable[[ChainSlice, str, float], Located],
        *,
        timeout_s: float,
        deferred_max: int,
        clock: Callable[[], float],
        tally: Tally,
        learn: Callable[[Located], None] = lambda _: None,
    ) -> None:
        self._locate = locate
        self._learn = learn
        self._timeout_s = timeout_s
        self._deferred_max = deferred_max
        self._clock = clock
        self._tally = tally
        self._lock = threading.Lock()
        self._lookups: dict[str, _Lookup] = {}
        # As many as may be deferred, twice: a request that gave up leaves its lookup behind until a thread sees that
        # it expired.
        self._asked: queue.Queue[tuple[str, _Lookup] | None] = queue.Queue(maxsize=2 * deferred_max + LOOKUP_THREADS)
        self._threads = [
            threading.Thread(target=self._run, name=f"kvpeer-lookup-{n}", daemon=True) for n in range(LOOKUP_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def poll(
        self,
        request: str,
        attempt: int,
        first: int,
        slice_from: Callable[[], ChainSlice],
        wait: Callable[[Callable[[float], object]], None] = lambda _: None,
        may_wait: Callable[[float], bool] = lambda _: True,
    ) -> Answer | None:
        """Returns the answer for the pages from `first` on, or None while it is on its way (never longer than the
        timeout).

        attempt: counts the request's preemptions; an answer is for one attempt. slice_from() makes the pages to ask
        for. An answer without pages means: there are none, too many requests wait already, or this one may not wait any
        more. Blocks only in `wait`, which is called when something was asked, with a function that waits for the answer
        for some seconds. may_wait(waited_s): whether a request that waited so long may come back later for its answer.
        """
        now = self._clock()
        with self._lock:
            lookup = self._lookups.get(request)
            if lookup is not None and self._is_usable(lookup, attempt, first, now):
                return self._settle(lookup, now, may_wait)
            if sum(other.answer is None for other in self._lookups.values()) >= self._deferred_max:
                self._tally.count("lookups", "deferred_full")
                return Answer(first, np.zeros(0, np.uint8), reason="deferred_full")
        lookup = _Lookup(attempt, first, slice_from(), now, now + self._timeout_s)
        refusal = self._ask(request, lookup)
        if refusal is None:
            wait(lookup.ended.wait)
        with self._lock:
            return refusal or self._settle(lookup, self._clock(), may_wait)

    def forget(self, request: str) -> None:
        """Drops what is known or under way for a request."""
        with self._lock:
            self._lookups.pop(request, None)

    def clear(self) -> None:
        """Drops everything: answers under another namespace mean nothing."""
        with self._lock:
            self._lookups.clear()

    def close(self) -> None:
        """Ends the threads; returns within a bounded time."""
        self.clear()
        for _ in self._threads:
            try:
                self._asked.put_nowait(None)
            except queue.Full:
                break
        for thread in self._threads:
            thread.join(_STOP_WAIT_S)

    def _is_usable(self, lookup: _Lookup, attempt: int, first: int, now: float) -> bool:
        if lookup.attempt != attempt or first < lookup.first:
            return False
        return lookup.seen_at is None or now - lookup.seen_at < FRESH_S

    def _settle(self, lookup: _Lookup, now: float, may_wait: Callable[[float], bool]) -> Answer | None:
        is_late, waited_s = now >= lookup.deadline, now - lookup.asked_at
        if lookup.answer is None and (is_late or not may_wait(waited_s)):
            reason = "timeout" if is_late else "not_awaited"
            lookup.answer = Answer(lookup.first, np.zeros(0, np.uint8), reason=reason, seconds=waited_s)
            self._tally.count("lookups", "timeout" if is_late else "not_awaited")
        if lookup.answer is not None and lookup.seen_at is None:
            lookup.seen_at = now
        return lookup.answer

    def _ask(self, request: str, lookup: _Lookup) -> Answer | None:
        with self._lock:
            self._lookups[request] = lookup
        try:
            self._asked.put_nowait((request, lookup))
        except queue.Full:
            self.forget(request)
            self._tally.count("lookups", "deferred_full")
            return Answer(lookup.first, np.zeros(0, np.uint8), reason="deferred_full")
        return None

    def _run(self) -> None:
        while (item := self._asked.get()) is not None:
            request, lookup = item
            started = self._clock()
            if started >= lookup.deadline:
                continue
            try:
                located = self._locate(lookup.chain, request, lookup.deadline - started)
                self._answered(request, lookup, located, started)
            except Exception:
                # The root of this thread's task: the lookup ends by its deadline, and the next one is served.
                _logger.exception("kvpeer: lookup of request %s failed", request)
                self._tally.count("errors", "lookup")
                continue
            lookup.ended.set()

    def _answered(self, request: str, lookup: _Lookup, located: Located, started: float) -> None:
        now = self._clock()
        self._tally.observe("lookup_seconds", now - started)
        self._learn(located)
        with self._lock:
            if self._lookups.get(request) is not lookup or lookup.answer is not None:
                return
            lookup.answer = Answer(lookup.first, located.statuses, located.offers, located.reason, now - started)
        is_hit = len(located.statuses) > 0 and located.statuses[0] != 0
        self._tally.count("lookups", "hit" if is_hit else located.reason or "miss")
