"""Threads that read pages; those that lie one behind another are read in one call.

Handing one page over to a thread and back costs more than reading a small one, and a disk is quicker with a few large
reads than with many small ones. A prompt's pages are written side by side, and asked for at once: a thread takes as
many of those that wait as follow each other, in the order in which they came, but leaves the other threads their share.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpeer.storage.conditions import DiskError
from kvpeer.storage.folder import RUN_PAGES_MAX, PageRead, ReadPage

__all__ = ["RUN_BYTES_MAX", "PageReader", "ReadThreads"]

RUN_BYTES_MAX = 4 << 20
"""In the file, but for a page that is larger alone. All pages of a run come at once, so the first waits for the last:
this is some milliseconds of a fast disk."""


class PageReader(Protocol):
    """See DiskFolder."""

    def read_run(self, reads: Sequence[PageRead]) -> list[ReadPage | DiskError]: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    reader: PageReader
    read: PageRead
    found: asyncio.Future[ReadPage]

    def follows(self, other: _Waiting) -> bool:
        """Whether it begins where the other one ends."""
        of_one_file = self.reader is other.reader and self.read.segment == other.read.segment
        return of_one_file and self.read.offset == other.read.end


class ReadThreads:
    """Belongs to one event loop. The threads are daemons: a disk that hangs must not keep the process from ending. What
    waits is bounded by the callers.

    `_arrived` protects `_waiting` and `_is_closed`.
    """

    def __init__(self, n: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"kvpeer-disk-read-{idx}", daemon=True) for idx in range(n)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, reader: PageReader, read: PageRead) -> asyncio.Future[ReadPage]:
        """The page to be, or the DiskError. Cancelling it does not stop the read."""
        waiting = _Waiting(reader, read, self._loop.create_future())
        with self._arrived:
            self._waiting.append(waiting)
            self._arrived.notify()
        return waiting.found

    def close(self) -> None:
        """The threads end when they have nothing more to do."""
        with self._arrived:
            self._is_closed = True
            self._arrived.notify_all()

    def _run(self) -> None:
        while run := self._take():
            found: list[ReadPage | DiskError] | BaseException
            try:
                found = run[0].reader.read_run([each.read for each in run])
            except BaseException as error:  # noqa: BLE001 - handed to who waits for it
                found = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(_settle, run, found)
            del run, found

    def _take(self) -> list[_Waiting]:
        """Waits for pages to read; none when it is over."""
        with self._arrived:
            while not self._waiting:
                if self._is_closed:
                    return []
                self._arrived.wait()
            return self._next_run()

    def _next_run(self) -> list[_Waiting]:
        waiting = self._waiting
        pages_max = min(RUN_PAGES_MAX, -(-len(waiting) // len(self._threads)))
        run = [waiting.popleft()]
        end_max = run[0].read.offset + RUN_BYTES_MAX
        while waiting and len(run) < pages_max and waiting[0].follows(run[-1]) and waiting[0].read.end <= end_max:
            run.append(waiting.popleft())
        return run


def _settle(run: Sequence[_Waiting], found: Sequence[ReadPage | DiskError] | BaseException) -> None:
    each_found = [found] * len(run) if isinstance(found, BaseException) else found
    for waiting, page in zip(run, each_found, strict=True):
        if waiting.found.done():
            continue
        if isinstance(page, BaseException):
            waiting.found.set_exception(page)
        else:
            waiting.found.set_result(page)
