"""Samples of bandwidth: one or several threads move batch after batch, each through the next part of the memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvpeer.bench.memory import BATCH_PAGES, MEMORY_BYTES

__all__ = ["Batch", "Mover", "Walk"]

Batch: TypeAlias = npt.NDArray[np.int64]
"""Numbers of BATCH_PAGES pages."""

Mover: TypeAlias = Callable[[int, Batch], Callable[[], None]]
"""Prepares the move of a batch by thread number i: the call that it returns is what is timed."""

SAMPLE_BYTES = 64 << 20
"""Moved by each thread in one sample: 10 ms of work and more, against which starting a thread is nothing."""


class Walk:
    """Goes through pages of page_bytes that fill MEMORY_BYTES, over and over; every sample takes the next ones. With
    `threads_max` threads at a time at most. Close it to end the threads."""

    def __init__(self, page_bytes: int, threads_max: int) -> None:
        self._batch_bytes = BATCH_PAGES * page_bytes
        self._batches = cycle(np.arange(MEMORY_BYTES // page_bytes, dtype=np.int64).reshape(-1, BATCH_PAGES))
        self._threads = ThreadPoolExecutor(threads_max, thread_name_prefix="kvpeer-bench")

    def bandwidth(self, mover: Mover, n_threads: int = 1) -> Callable[[], float]:
        """Returns a subject: GB/s of so many threads together."""
        n_batches = SAMPLE_BYTES // self._batch_bytes

        def sample() -> float:
            work = [[mover(thread, batch) for batch in islice(self._batches, n_batches)] for thread in range(n_threads)]
            return n_threads * n_batches * self._batch_bytes / 1e9 / self._seconds(work)

        return sample

    def batch_ms(self, mover: Mover) -> Callable[[], float]:
        """Returns a subject: milliseconds that one thread takes for a batch."""
        sample = self.bandwidth(mover)
        return lambda: self._batch_bytes / 1e6 / sample()

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()

    def _seconds(self, work: Sequence[Sequence[Callable[[], None]]]) -> float:
        started = time.perf_counter()
        if len(work) == 1:
            _perform(work[0])
        else:
            for done in [self._threads.submit(_perform, share) for share in work]:
                done.result()
        return time.perf_counter() - started


def _perform(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()
