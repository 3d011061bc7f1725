"""The copies that one rank has under way: loads into engine blocks, publishes out of them, each on threads of its own.

The engine's thread only hands work in and collects what is done; it never waits here. Rules:

- A load is collected exactly once, whatever happened, and only after the client returned: nothing writes into its
  blocks any more.
- Blocks are read by a publish while the engine guarantees them: while their request runs, or until it is collected as
  sent. When the engine takes blocks back sooner (preemption) the request's copies are revoked: a copy that has not
  been committed by then never is.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvpeer.core.chain import ChainSlice
from kvpeer.engines.vllm.metadata import PageOrder
from kvpeer.engines.vllm.tally import Tally
from kvpeer.model import Outcome

__all__ = ["Loads", "PageClient", "Publishes"]

LOAD_THREADS = 2
"""A load waits for peers most of the time; a second one keeps the next request's local pages from waiting behind it."""

LOAD_BATCH_PAGES = 32
"""Pages a fetch: an abort takes effect between two fetches. One anchor group, so it is one question to one owner."""

LOADS_WAITING_MAX = 1024
"""Further loads fail at once. vLLM admits a load only with its blocks allocated, so so many never wait in practice."""

PUBLISH_BATCH_PAGES = 32
"""Pages a publish: bounds how long a running copy can outlive its revocation."""

_STOP_WAIT_S = 6.0
"""What `close` waits for a thread: the longest default deadline of a copy, and a little."""

_logger = logging.getLogger("vllm.kvpeer")


class PageClient(Protocol):
    """What a rank needs of `kvpeer.client.Client`. No method raises for anything a peer, an agent or a deadline
    does."""

    @property
    def healthy(self) -> bool: ...
    def fetch(
        self, chain: ChainSlice, blocks: npt.NDArray[np.int64], request: str, deadline_s: float
    ) -> npt.NDArray[np.uint8]: ...

    def publish(
        self, chain: ChainSlice, blocks: npt.NDArray[np.int64], deadline_s: float, is_current: Callable[[], bool]
    ) -> Any: ...


@dataclass
class _Load:
    order: PageOrder
    fence: object
    deadline: float
    is_aborted: bool = False


class _Workers:
    """Daemon threads that run `work(item)` for items of a bounded queue. The condition's lock protects the queue and
    what its owner keeps beside it."""

    def __init__(self, name: str, n_threads: int, work: Callable[[Any], None]) -> None:
        self.changed = threading.Condition()
        self.waiting: deque[Any] = deque()
        self._work = work
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"kvpeer-{name}-{n}", daemon=True) for n in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        with self.changed:
            self._is_closed = True
            self.waiting.clear()
            self.changed.notify_all()
        for thread in self._threads:
            thread.join(_STOP_WAIT_S)

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self._is_closed)
                if self._is_closed:
                    return
                item = self.waiting.popleft()
            self._work(item)


class Loads:
    """Loads under way by request. Methods are called by the engine's thread only."""

    def __init__(
        self,
        client: PageClient,
        wait_for: Callable[[object], None],
        *,
        part_bytes: int,
        clock: Callable[[], float],
        tally: Tally,
    ) -> None:
        self._client = client
        self._wait_for = wait_for
        self._part_bytes = part_bytes
        self._clock = clock
        self._tally = tally
        self._running: dict[str, _Load] = {}
        self._done: list[str] = []
        self._failed_blocks: set[int] = set()
        self._workers = _Workers("load", LOAD_THREADS, self._run)

    def start(self, order: PageOrder, fence: object) -> None:
        """Takes a load in. `fence` marks the engine's work that must be over before its blocks are written."""
        load = _Load(order, fence, self._clock() + order.timeout_s)
        with self._workers.changed:
            self._running[order.request] = load
            if order.is_consistent() and len(self._workers.waiting) < LOADS_WAITING_MAX:
                self._workers.waiting.append(load)
                self._workers.changed.notify()
                return
        self._finish(load, 0, Outcome.REFUSED)

    def abort(self, request: str) -> None:
        """The request is over: its load stops at the next batch. It is still collected."""
        with self._workers.changed:
            load = self._running.get(request)
            if load is not None:
                load.is_aborted = True

    def collect(self) -> tuple[set[str], set[int]]:
        """Returns (requests whose loads are over, blocks that were not loaded among all of theirs), each once. Never
        blocks."""
        with self._workers.changed:
            done, self._done = self._done, []
            failed, self._failed_blocks = self._failed_blocks, set()
        return set(done), failed

    def close(self) -> None:
        """Ends the threads; what is still under way is not collected any more."""
        self._workers.close()

    def _run(self, load: _Load) -> None:
        started, n_loaded, outcome = self._clock(), 0, Outcome.REFUSED
        try:
            self._wait_for(load.fence)
            n_loaded, outcome = self._fetch(load)
        except Exception:
            # The root of this thread's task: whatever it was, the load must be reported, or its request hangs for ever.
            _logger.exception("kvpeer: load of request %s failed", load.order.request)
            self._tally.count("errors", "load")
        self._tally.observe("load_seconds", self._clock() - started)
        self._finish(load, n_loaded, outcome)

    def _fetch(self, load: _Load) -> tuple[int, Outcome]:
        """Returns how many leading pages were loaded, and what became of the next one."""
        order, blocks = load.order, load.order.block_ids()
        for start in range(0, len(order), LOAD_BATCH_PAGES):
            remaining_s = load.deadline - self._clock()
            if load.is_aborted or remaining_s <= 0:
                return start, Outcome.REFUSED if load.is_aborted else Outcome.TIMEOUT
            stop = min(start + LOAD_BATCH_PAGES, len(order))
            outcomes = self._client.fetch(order.chain.part(start, stop), blocks[start:stop], order.request, remaining_s)
            missed = np.flatnonzero(outcomes != Outcome.HIT)
            if len(missed):
                return start + int(missed[0]), Outcome(int(outcomes[missed[0]]))
        return len(order), Outcome.HIT

    def _finish(self, load: _Load, n_loaded: int, outcome: Outcome) -> None:
        blocks = load.order.block_ids()
        if n_loaded:
            self._tally.count("loaded_pages", Outcome.HIT.name.lower(), n_loaded)
            self._tally.count("loaded_bytes", amount=n_loaded * self._part_bytes)
        if n_loaded < len(blocks):
            # vLLM recomputes from the first missing page on, so what lies behind it is of no use even if it arrived.
            self._tally.count("loaded_pages", outcome.name.lower(), len(blocks) - n_loaded)
        with self._workers.changed:
            del self._running[load.order.request]
            self._done.append(load.order.request)
            self._failed_blocks.update(blocks[n_loaded:].tolist())


@dataclass
class _Lease:
    """The right to read a request's present blocks. Revoked for good when the engine takes them back."""

    n_copies: int = 0
    is_revoked: bool = False


@dataclass
class _Publish:
    order: PageOrder
    fence: object
    lease: _Lease
    deadline: float


@dataclass
class Publishes:
    """Publishes under way. Methods are called by the engine's thread only."""

    client: PageClient
    wait_for: Callable[[object], None]
    part_bytes: int
    queue_pages_max: int
    clock: Callable[[], float]
    tally: Tally

    _leases: dict[str, _Lease] = field(default_factory=dict)
    _held: set[str] = field(default_factory=set)
    _n_waiting_pages: int = 0

    def __post_init__(self) -> None:
        # One thread: pages of a request are published in order, and a second one would only compete for memory
        # bandwidth.
        self._workers = _Workers("publish", 1, self._run)

    def start(self, order: PageOrder, fence: object) -> None:
        """Takes pages in, or drops them when too many wait. `fence` marks the engine's work that computes them.

        The deadline counts from here, so that an agent that hangs holds blocks for one timeout and not for one a copy.
        """
        reason = self._drop_reason(order)
        if reason:
            self.tally.count("published_pages", reason, len(order))
            return
        with self._workers.changed:
            lease = self._leases.setdefault(order.request, _Lease())
            lease.n_copies += 1
            self._n_waiting_pages += len(order)
            self._workers.waiting.append(_Publish(order, fence, lease, self.clock() + order.timeout_s))
            self._workers.changed.notify()

    def revoke(self, request: str) -> None:
        """The engine takes the request's blocks back now: nothing copied from them is committed from here on. Never
        blocks."""
        with self._workers.changed:
            lease = self._leases.pop(request, None)
            if lease is not None:
                lease.is_revoked = True

    def hold(self, request: str) -> None:
        """The request is over and its blocks wait for its copies: `collect` will return it, once."""
        self._held.add(request)

    def collect(self) -> set[str]:
        """Returns the held requests that have no copy under way any more. Never blocks."""
        with self._workers.changed:
            done = {request for request in self._held if request not in self._leases}
        self._held -= done
        return done

    def close(self) -> None:
        """Ends the thread; what waits is dropped."""
        self._workers.close()

    def _drop_reason(self, order: PageOrder) -> str:
        if not self.client.healthy:
            return "no_agent"
        if not order.is_consistent():
            return "inconsistent"
        with self._workers.changed:
            return "queue_full" if self._n_waiting_pages + len(order) > self.queue_pages_max else ""

    def _run(self, publish: _Publish) -> None:
        started = self.clock()
        try:
            self.wait_for(publish.fence)
            self._publish(publish)
        except Exception:
            # The root of this thread's task: without this the request's blocks would be held for ever.
            _logger.exception("kvpeer: publish of request %s failed", publish.order.request)
            self.tally.count("errors", "publish")
        self.tally.observe("publish_seconds", self.clock() - started)
        with self._workers.changed:
            self._n_waiting_pages -= len(publish.order)
            publish.lease.n_copies -= 1
            if publish.lease.n_copies == 0 and self._leases.get(publish.order.request) is publish.lease:
                del self._leases[publish.order.request]

    def _publish(self, publish: _Publish) -> None:
        order, blocks, lease = publish.order, publish.order.block_ids(), publish.lease
        for start in range(0, len(order), PUBLISH_BATCH_PAGES):
            stop = min(start + PUBLISH_BATCH_PAGES, len(order))
            remaining_s = publish.deadline - self.clock()
            if lease.is_revoked or remaining_s <= 0:
                self.tally.count("published_pages", "revoked" if lease.is_revoked else "timeout", len(order) - start)
                return
            result = self.client.publish(
                order.chain.part(start, stop), blocks[start:stop], remaining_s, lambda: not lease.is_revoked
            )
            for label, n_pages in (
                ("written", result.n_written),
                ("present", result.n_present),
                ("refused", result.n_refused),
            ):
                if n_pages:
                    self.tally.count("published_pages", label, n_pages)
            if result.n_written:
                self.tally.count("published_bytes", amount=result.n_written * self.part_bytes)
