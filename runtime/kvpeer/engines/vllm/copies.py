"""The copies that one rank has under way: loads into engine blocks, publishes out of them, each on threads of its own.

The engine's thread only hands work in and collects what is done; it never waits here. Rules:

- A load is collected exactly once, whatever happened, and only after the client returned: nothing writes into its
  blocks any more. Its time begins when a thread takes it, or when the engine's work before it is over if that is
  later: until then its request could not be computed either. It waits for a thread for a bounded time.
- Blocks are read by a publish while the engine guarantees them: while their request runs, or until it is collected as
  sent. When the engine takes blocks back sooner (preemption) the request's copies are revoked: a copy that has not
  been committed by then never is.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvpeer.core.chain import ChainSlice
from kvpeer.engines.vllm.lanes import START_SHARE, Lane
from kvpeer.engines.vllm.metadata import LoadReport, PageOrder
from kvpeer.engines.vllm.tally import Tally
from kvpeer.model import Outcome

__all__ = ["Loads", "PageClient", "Publishes"]

LOAD_BATCH_PAGES = 32
"""Pages a fetch: an abort takes effect between two fetches. One anchor group, so it is one question to one owner."""

PUBLISH_BATCH_PAGES = 64
"""Pages a publish: bounds how long a running copy can outlive its revocation. Half of what the agent keeps free ahead
of need, so that a full pool does not keep a batch waiting for the next one."""

_STOP_WAIT_S = 6.0
"""What `close` waits for a thread: the longest default deadline of a copy, and a little."""

_logger = logging.getLogger("vllm.kvpeer")


class PageClient(Protocol):
    """What a rank needs of `kvpeer.client.Client`. No method raises for anything a peer, an agent or a deadline
    does."""

    @property
    def healthy(self) -> bool: ...
    def fetch(
        self,
        chain: ChainSlice,
        blocks: npt.NDArray[np.int64],
        request: str,
        deadline_s: float,
        *,
        source: bytes = b"",
    ) -> npt.NDArray[np.uint8]: ...

    def publish(
        self, chain: ChainSlice, blocks: npt.NDArray[np.int64], deadline_s: float, is_current: Callable[[], bool]
    ) -> Any: ...


@dataclass
class _Load:
    order: PageOrder
    fence: object
    start_by: float
    ordered_at: float
    reloaded_s: float = 0.0
    is_aborted: bool = False


class _Workers:
    """Daemon threads that run `work(item)` for items of a bounded queue. The condition's lock, which several may
    share, protects the queue and what its owner keeps beside it."""

    def __init__(self, name: str, n_threads: int, work: Callable[[Any], None], lock: threading.Lock) -> None:
        self.changed = threading.Condition(lock)
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
        seconds_since: Callable[[object], float] = lambda fence: math.inf,
        *,
        part_bytes: int,
        clock: Callable[[], float],
        tally: Tally,
    ) -> None:
        self._client = client
        self._wait_for = wait_for
        self._seconds_since = seconds_since
        self._part_bytes = part_bytes
        self._clock = clock
        self._tally = tally
        self._running: dict[str, _Load] = {}
        self._done: list[str] = []
        self._reports: list[LoadReport] = []
        self._failed_blocks: set[int] = set()
        self._lock = threading.Lock()
        self._lanes = {lane: _Workers(lane.name.lower(), lane.n_threads, self._run, self._lock) for lane in Lane}

    def start(self, order: PageOrder, fence: object) -> None:
        """Takes a load in. `fence` marks the engine's work that must be over before its blocks are written."""
        now = self._clock()
        load = _Load(order, fence, start_by=now + START_SHARE * order.timeout_s, ordered_at=now)
        workers = self._lanes[order.lane]
        with self._lock:
            self._running[order.request] = load
            if order.is_consistent() and len(workers.waiting) < order.lane.loads_max:
                workers.waiting.append(load)
                workers.changed.notify()
                return
        self._finish(load, 0, Outcome.REFUSED)

    def fail(self, order: PageOrder) -> None:
        """Takes in a load that cannot be started: it is collected as failed."""
        load = _Load(order, None, start_by=0.0, ordered_at=self._clock())
        with self._lock:
            self._running[order.request] = load
        self._finish(load, 0, Outcome.REFUSED)

    def abort(self, request: str) -> None:
        """The request is over: its load stops at the next batch. It is still collected."""
        with self._lock:
            load = self._running.get(request)
            if load is not None:
                load.is_aborted = True

    def collect(self) -> tuple[set[str], set[int]]:
        """Returns (requests whose loads are over, blocks that were not loaded among all of theirs), each once. Never
        blocks."""
        for load in self._take_hopeless():
            self._give_up(load)
        with self._lock:
            done, self._done = self._done, []
            failed, self._failed_blocks = self._failed_blocks, set()
        return set(done), failed

    def reports(self) -> list[LoadReport]:
        """Returns what became of the loads that ended since the last call, each once, never later than `collect`
        returns its request. Never blocks."""
        with self._lock:
            reports, self._reports = self._reports, []
        return reports

    def close(self) -> None:
        """Ends the threads; what is still under way is not collected any more."""
        for workers in self._lanes.values():
            workers.close()

    def _take_hopeless(self) -> list[_Load]:
        """Takes out of the queues what no thread took in time or nobody wants any more."""
        hopeless: list[_Load] = []
        now = self._clock()
        with self._lock:
            for workers in self._lanes.values():
                given_up = [load for load in workers.waiting if load.is_aborted or now >= load.start_by]
                for load in given_up:
                    workers.waiting.remove(load)
                hopeless += given_up
        return hopeless

    def _give_up(self, load: _Load) -> None:
        self._finish(load, 0, Outcome.REFUSED if load.is_aborted else Outcome.TIMEOUT)

    def _run(self, load: _Load) -> None:
        if load.is_aborted or self._clock() >= load.start_by:
            self._give_up(load)
            return
        started, n_loaded, outcome, seconds = self._clock(), 0, Outcome.REFUSED, None
        try:
            self._wait_for(load.fence)
            n_loaded, outcome = self._fetch(load, started)
            seconds = self._elapsed_s(load, load.ordered_at) - load.reloaded_s
        except Exception:
            # The root of this thread's task: whatever it was, the load must be reported, or its request hangs for ever.
            _logger.exception("kvpeer: load of request %s failed", load.order.request)
            self._tally.count("errors", "load")
        self._tally.observe("load_seconds", self._clock() - started)
        self._finish(load, n_loaded, outcome, seconds)

    def _elapsed_s(self, load: _Load, since: float) -> float:
        """From then on, or from when the engine's work before the load was over, if that is later; 0 while it is
        not."""
        return min(self._clock() - since, self._seconds_since(load.fence))

    def _fetch(self, load: _Load, started: float) -> tuple[int, Outcome]:
        """Returns how many leading pages were loaded, and what became of the next one."""
        order, blocks = load.order, load.order.block_ids()
        for start, stop in _batches(order):
            elapsed_s = self._elapsed_s(load, started)
            remaining_s = order.timeout_s - elapsed_s
            if start == order.n_reloads:
                load.reloaded_s = elapsed_s
            if load.is_aborted or remaining_s <= 0:
                return start, Outcome.REFUSED if load.is_aborted else Outcome.TIMEOUT
            outcomes = self._client.fetch(
                order.chain.part(start, stop), blocks[start:stop], order.request, remaining_s, source=order.source
            )
            missed = np.flatnonzero(outcomes != Outcome.HIT)
            if len(missed):
                return start + int(missed[0]), Outcome(int(outcomes[missed[0]]))
        return len(order), Outcome.HIT

    def _finish(self, load: _Load, n_loaded: int, outcome: Outcome, seconds: float | None = None) -> None:
        """seconds: None for a load that was not begun, or ended by an error of ours."""
        blocks = load.order.block_ids()
        if n_loaded:
            self._tally.count("loaded_pages", Outcome.HIT.name.lower(), n_loaded)
            self._tally.count("loaded_bytes", amount=n_loaded * self._part_bytes)
        if n_loaded < len(blocks):
            # vLLM recomputes from the first missing page on, so what lies behind it is of no use even if it arrived.
            self._tally.count("loaded_pages", outcome.name.lower(), len(blocks) - n_loaded)
        is_local_fault = seconds is None or outcome == Outcome.REFUSED or n_loaded < load.order.n_reloads
        report = LoadReport(load.order.request, n_loaded, seconds or 0.0, load.is_aborted, is_local_fault)
        with self._lock:
            del self._running[load.order.request]
            self._done.append(load.order.request)
            self._reports.append(report)
            self._failed_blocks.update(blocks[n_loaded:].tolist())


def _batches(order: PageOrder) -> list[tuple[int, int]]:
    """From where to where each fetch goes; none has both reloads and pulled pages, so that their times are told
    apart."""
    bounds = [*range(0, order.n_reloads, LOAD_BATCH_PAGES), *range(order.n_reloads, len(order), LOAD_BATCH_PAGES)]
    return list(pairwise([*bounds, len(order)]))


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
    when_done: Callable[[int], None]


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
        self._workers = _Workers("publish", 1, self._run, threading.Lock())

    def start(self, order: PageOrder, fence: object, when_done: Callable[[int], None] = lambda n_there: None) -> None:
        """Takes pages in, or drops them when too many wait. `fence` marks the engine's work that computes them.
        when_done(n_there) is called by the copying thread with how many pages can be had now; not for dropped ones.

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
            self._workers.waiting.append(_Publish(order, fence, lease, self.clock() + order.timeout_s, when_done))
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
            publish.when_done(self._publish(publish))
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

    def _publish(self, publish: _Publish) -> int:
        """Returns how many pages can be had now."""
        order, blocks, lease = publish.order, publish.order.block_ids(), publish.lease
        n_there = 0
        for start in range(0, len(order), PUBLISH_BATCH_PAGES):
            stop = min(start + PUBLISH_BATCH_PAGES, len(order))
            remaining_s = publish.deadline - self.clock()
            if lease.is_revoked or remaining_s <= 0:
                self.tally.count("published_pages", "revoked" if lease.is_revoked else "timeout", len(order) - start)
                break
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
            n_there += result.n_written + result.n_present
        return n_there
