"""The threads that fetch from peers, shared out so that a silent producer leaves some to the others."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

from kvpeer.core.pull import FETCH_S_MIN
from kvpeer.core.reasons import UnaskedReason
from kvpeer.model import AgentId
from kvpeer.transport import FetchBatch, FetchResult, NotAskedError

__all__ = ["FetchThreads"]


class FetchThreads:
    """Runs `fetch` (see `DataPeers.fetch`) on threads. Belongs to one event loop. `in_flight`: fetches of each producer
    that run or wait.

    One producer has at most `per_producer_max` threads: as many as it may have connections, and at least one thread
    less than there are, unless there is only one.
    """

    def __init__(
        self,
        fetch: Callable[[AgentId, FetchBatch, float], FetchResult],
        threads: int,
        connections_per_peer: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fetch = fetch
        self._clock = clock
        self._threads = asyncio.Semaphore(threads)  # waited for here, with a deadline, and not in the executor's queue
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="kvpeer-fetch")
        self.per_producer_max = max(1, min(connections_per_peer, threads - 1))
        self.in_flight: Counter[AgentId] = Counter()
        self._places: dict[AgentId, asyncio.Semaphore] = {}  # of producers with fetches in flight

    async def fetch(self, producer: AgentId, batch: FetchBatch, deadline: float) -> FetchResult:
        """What became of the pages. A fetch that gets no thread in time is not begun: its error is a NotAskedError.

        When this returns or raises anything but CancelledError, nothing writes to the destinations.
        """
        places = self._places.setdefault(producer, asyncio.Semaphore(self.per_producer_max))
        self.in_flight[producer] += 1
        try:
            async with _place(places, deadline - self._clock()) as has_place:
                if has_place:
                    return await self._on_thread(producer, batch, deadline)
                reason = f"{self.per_producer_max} fetches from agent {producer.hex()} are under way"
                return FetchResult.not_asked(len(batch), NotAskedError(UnaskedReason.BUSY, reason))
        finally:
            self.in_flight[producer] -= 1
            if not self.in_flight[producer]:
                del self.in_flight[producer], self._places[producer]

    async def _on_thread(self, producer: AgentId, batch: FetchBatch, deadline: float) -> FetchResult:
        async with _place(self._threads, deadline - self._clock()) as has_place:
            if not has_place or deadline - self._clock() < FETCH_S_MIN:
                error = NotAskedError(UnaskedReason.LATE, "no thread was free before the deadline")
                return FetchResult.not_asked(len(batch), error)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._executor, self._fetch, producer, batch, deadline)

    def close(self) -> None:
        """Waits for fetches that run; they end by their deadlines. Blocks."""
        self._executor.shutdown()


@contextlib.asynccontextmanager
async def _place(places: asyncio.Semaphore, timeout_s: float) -> AsyncIterator[bool]:
    """Whether there was a place in time; it is held until the end."""
    try:
        await asyncio.wait_for(places.acquire(), max(0.0, timeout_s))
    except asyncio.TimeoutError:
        yield False
        return
    try:
        yield True
    finally:
        places.release()
