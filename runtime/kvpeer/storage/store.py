"""The disk tier as an agent uses it: pages are offered, found, read and forgotten; no call waits for the disk.

Belongs to one event loop. One task (`run`) opens the folder, writes batch after batch, and gives the disk up when it
fails: then no page is found on it, offers are dropped, and it is opened again later. A batch is written and made
durable, then the pool is asked whether the pages lay still meanwhile, then their rows are committed, and only then are
they found.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from kvpeer.core.disk import Condition, DiskHealth, DiskPage, DiskPages, Offer, WriteQueue
from kvpeer.model import Outcome
from kvpeer.storage.base import DiskEvents, DiskSettings, PoolPages
from kvpeer.storage.conditions import DiskError
from kvpeer.storage.folder import DiskFolder, PageRead, PageWrite, ReadPage
from kvpeer.storage.threads import DiskThreads
from kvpeer.waits import is_set_within

__all__ = ["READS_MAX", "DiskStore"]

READS_MAX = 512
"""Pages being read, or waiting for a thread: half a second of a fast disk with 1 MiB pages. Whoever comes later would
wait longer than a recompute takes, and is refused."""

READ_FAILURES_MAX = 3
"""Reads that fail one after another, by errors of the disk: then it is given up. A single bad sector costs a page."""

CHECK_S = 5.0
"""Between two looks whether the folder is still there, and between two tries to use more of a disk that was full."""

SLICE_PAGES = 1024
SLICE_PAUSE_S = 0.005
"""Pages that come or go with the whole disk are told in slices, with pauses: the event loop has other work."""

FORGOTTEN_MAX = 256
"""Namespaces to be forgotten while the disk is out of use. With more, the whole folder is."""

_log = logging.getLogger(__name__)


class DiskStore:
    """See the module docstring.

    Attributes:
        outcomes: offered pages, by what became of them: written, queue_full, disk_off, moved (evicted from the pool
            before or while they were written), no_room, failed.
        n_corrupt: pages whose bytes were found wrong. n_bytes_written, n_bytes_read: of pages.
    """

    def __init__(
        self,
        settings: DiskSettings,
        pool: PoolPages,
        events: DiskEvents,
        clock: Callable[[], float] = time.monotonic,
        open_folder: Callable[[Path, int, int], DiskFolder] = DiskFolder,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._events = events
        self._clock = clock
        self._open_folder = open_folder
        self._health = DiskHealth()
        self._pages = DiskPages(0, settings.segment_bytes)
        self._queue = WriteQueue()
        self._folder: DiskFolder | None = None  # while it serves
        self._opening: asyncio.Future[DiskFolder] | None = None
        self._threads = DiskThreads(settings.read_threads, settings.slow_s)
        self._wake = asyncio.Event()
        self._has_written = asyncio.Event()  # nothing waits to be written, or is being written
        self._failure: DiskError | None = None  # what a reader met
        self._n_read_failures = 0
        self._dropped: list[int] = []  # slots whose rows are to go with the next commit
        self._to_forget: dict[bytes, asyncio.Event] = {}
        self._forgets_all = False
        self._n_evicted = 0
        self.n_reading = 0
        self.outcomes: Counter[str] = Counter()
        self.n_corrupt = self.n_bytes_written = self.n_bytes_read = 0

    # ---- questions

    @property
    def condition(self) -> Condition:
        """FULL also while it works with less room than it was given."""
        if self._health.condition is Condition.OK and self._pages.segments.refused:
            return Condition.FULL
        return self._health.condition

    @property
    def used_bytes(self) -> int:
        """What its files take."""
        return self._pages.segments.assigned_bytes

    @property
    def n_pages(self) -> int:
        return len(self._pages)

    @property
    def n_evicted(self) -> int:
        return self._n_evicted + self._pages.n_evicted

    @property
    def n_queued(self) -> int:
        return len(self._queue)

    @property
    def _is_off(self) -> bool:
        return self._folder is None and self._health.condition is not Condition.OPENING

    def find(self, key: bytes) -> DiskPage | None:
        """The page, if it can be read from the disk."""
        return self._pages.find(key)

    # ---- requests

    def offer(self, offers: Iterable[Offer]) -> None:
        """Pages that the pool just committed. What is on the disk already counts as used."""
        for offer in offers:
            if self._is_off:
                self.outcomes["disk_off"] += 1
            elif self._pages.find(offer.facts.key) is not None:
                self._pages.use(offer.facts.key)
            elif not self._pages.is_known(offer.facts.key) and not self._queue.put(offer):
                self.outcomes["queue_full"] += 1
        self._has_written.clear()
        self._wake.set()

    def use(self, key: bytes) -> None:
        """Notes a use of a page, if it is on the disk."""
        if self._pages.find(key) is not None:
            self._pages.use(key)

    async def read(self, page: DiskPage, address: int) -> ReadPage:
        """Reads a page into memory at `address` (a slot of the pool), verified; REFUSED beyond READS_MAX, MISS if it
        is not on the disk any more. When this returns, and not before, nothing writes there any more: it may take as
        long as the disk does, and must not be cancelled."""
        if self._folder is None or self._pages.find(page.facts.key) is not page:
            return ReadPage(Outcome.MISS)
        if self.n_reading >= READS_MAX:
            return ReadPage(Outcome.REFUSED)
        self._pages.use(page.facts.key)
        wanted = PageRead(page, *self._pages.segments.place(page.slot), address)
        self.n_reading += 1
        try:
            reading = self._threads.begin_read(self._folder, wanted)
            try:
                read = await self._threads.in_time(reading)
            except DiskError as error:
                if not reading.done():
                    self._fail(error)
                read = await reading
        except DiskError as error:
            return self._read_failed(page, error)
        finally:
            self.n_reading -= 1
        return self._judge(page, read)

    def forget(self, namespace: bytes) -> None:
        """No page of the namespace is found from now on; its rows go as soon as the disk can be written."""
        self._pages.forget(namespace)
        self._queue.forget(namespace)
        self._tell_gone()
        if len(self._to_forget) >= FORGOTTEN_MAX:
            self._to_forget.clear()
            self._forgets_all = True
        self._to_forget.setdefault(namespace, asyncio.Event())
        self._wake.set()

    async def forgotten(self, namespace: bytes, deadline: float) -> bool:
        """Whether no page of the namespace that was forgotten can come back by a restart; waits for that until the
        deadline, but not for a disk that is out of use."""
        is_done = self._to_forget.get(namespace)
        if is_done is None or self._is_off:
            return is_done is None
        return await is_set_within(is_done, deadline - self._clock())

    # ---- life

    async def run(self) -> None:
        """Opens and serves the disk, until cancelled."""
        while True:
            await asyncio.sleep(max(0.0, self._health.retry_at - self._clock()))
            try:
                await self._open()
                await self._serve()
            except DiskError as error:
                if self._health.failed(error.condition, self._clock()):
                    _log.error("no disk tier (%s), tried again later: %s", error.condition.value, error)
            await self._give_up()

    async def flush(self, deadline_s: float) -> None:
        """Returns when all that was offered is written, or after `deadline_s`; at once where no disk is in use."""
        if self._folder is not None:
            self._wake.set()
            await is_set_within(self._has_written, deadline_s)

    async def close(self, deadline_s: float) -> None:
        """Ends what is under way and gives the folder back; after `deadline_s` it is left to the end of the process.
        `run` was cancelled before."""
        try:
            await asyncio.wait_for(self._end_folder(), deadline_s)
        except asyncio.TimeoutError:
            _log.warning("the disk does not answer: its folder is left as it is")
        self._threads.close()

    async def _open(self) -> None:
        settings = self._settings
        place = settings.path, settings.n_segments, settings.segment_bytes
        self._opening = self._threads.begin_write(self._open_folder, *place)
        folder = await self._threads.in_time(self._opening)
        self._pages = folder.pages
        self._pages.is_in_use = self._pool.has
        await self._forget_due(folder)
        self._folder = folder
        self._health.opened(self._clock())
        kind = "direct" if folder.is_direct else "buffered"
        _log.info("disk tier at %s: %d pages, %s I/O", settings.path, len(self._pages), kind)
        await self._tell_slowly(self._pages.all(), self._tell_stored)

    async def _serve(self) -> None:
        check_at = self._clock() + CHECK_S
        while True:
            self._wake.clear()
            assert self._folder is not None  # noqa: S101 - set by `_open`
            if self._failure is not None:
                raise self._failure
            await self._forget_due(self._folder)
            if self._clock() >= check_at:
                check_at = self._clock() + CHECK_S
                await self._threads.write(self._folder.check)
                self._pages.segments.allow_growth()
            if self._queue:
                await self._write_batch(self._folder)
            elif self._dropped:
                await self._commit(self._folder, {}, [])
            else:
                self._has_written.set()
                await is_set_within(self._wake, check_at - self._clock())

    async def _give_up(self) -> None:
        """No page is found from now on; returns when nothing is under way any more, however long that takes."""
        self._folder, self._failure = None, None
        self._n_read_failures = 0
        self.outcomes["disk_off"] += self._queue.clear()
        pages, self._pages = self._pages, DiskPages(0, self._settings.segment_bytes)
        self._n_evicted += pages.n_evicted
        await self._tell_slowly(pages.take_gone() + pages.all(), self._events.gone)
        await self._end_folder()

    async def _end_folder(self) -> None:
        """Closes the folder when nothing uses it any more: a file descriptor that is closed may be another file's."""
        self._folder = None
        await self._threads.idle()
        opening, self._opening = self._opening, None
        if opening is not None and not opening.cancelled() and opening.exception() is None:
            await self._threads.begin_write(opening.result().close)
        self._dropped.clear()

    # ---- writing

    async def _write_batch(self, folder: DiskFolder) -> None:
        writes = self._place(self._queue.take_batch())
        self._tell_gone()
        if not writes:
            return
        refused = await self._threads.write(folder.write, writes)
        for segment in refused:
            self.outcomes["no_room"] += sum(write.segment == segment for write in writes)
            self._pages.refuse_segment(segment)
        writes = [write for write in writes if write.segment not in refused]
        still = [write for write in writes if self._lay_still(write)]
        self.outcomes["moved"] += len(writes) - len(still)
        pages = [write.page for write in still]
        segments = self._pages.segments.slot_bytes_of
        await self._commit(folder, {write.segment: segments[write.segment] for write in still}, pages)
        stored = [page for page in pages if self._pages.stored(page)]
        self.outcomes["written"] += len(pages)
        self.n_bytes_written += sum(page.facts.length for page in pages)
        self._tell_stored(stored)

    def _place(self, offers: list[Offer]) -> list[PageWrite]:
        """Places for those that still lie in the pool and are not on the disk yet."""
        writes: list[PageWrite] = []
        for offer in offers:
            if self._pages.is_known(offer.facts.key):
                continue
            if not self._pool.holds(offer.facts.key, offer.slot, offer.generation):
                self.outcomes["moved"] += 1
                continue
            page = self._pages.begin(offer.facts)
            if page is None:
                self.outcomes["no_room"] += 1
                continue
            writes.append(PageWrite(page, offer, *self._pages.segments.place(page.slot)))
        return writes

    def _lay_still(self, write: PageWrite) -> bool:
        """Whether what was written is the page: its slot was not used again meanwhile. Gives its place back if not."""
        offer = write.offer
        if write.page.is_wanted and self._pool.holds(offer.facts.key, offer.slot, offer.generation):
            return True
        self._pages.failed(write.page)
        return False

    async def _commit(self, folder: DiskFolder, segments: dict[int, int], pages: list[DiskPage]) -> None:
        dropped, self._dropped = self._dropped, []
        await self._threads.write(folder.commit, segments, pages, dropped)

    async def _forget_due(self, folder: DiskFolder) -> None:
        """Drops the rows of the namespaces that are to be forgotten, and tells who waits for that."""
        due = dict(self._to_forget)
        if self._forgets_all:
            due = {page.facts.namespace: asyncio.Event() for page in self._pages.all()} | due
        for namespace, is_done in due.items():
            self._pages.forget(namespace)
            await self._threads.write(folder.forget, namespace)
            if self._to_forget.get(namespace) is is_done:
                del self._to_forget[namespace]
            is_done.set()
        self._forgets_all = False
        if due:
            self._tell_gone()

    # ---- reading

    def _judge(self, page: DiskPage, read: ReadPage) -> ReadPage:
        """What a reader gets: nothing of a page that went in the meantime."""
        if read.outcome is Outcome.HIT:
            self._n_read_failures = 0
            self.n_bytes_read += page.facts.length
            return read if page.is_wanted else ReadPage(Outcome.MISS)
        if self._pages.find(page.facts.key) is not page:
            return ReadPage(Outcome.MISS)
        if read.outcome is Outcome.CORRUPT:
            self.n_corrupt += 1
            _log.error("page %s has other bytes on the disk than were written: dropped", page.facts.key.hex())
        self._drop(page)
        return read

    def _read_failed(self, page: DiskPage, error: DiskError) -> ReadPage:
        self._n_read_failures += 1
        _log.warning("a page could not be read from the disk: %s", error)
        if self._n_read_failures >= READ_FAILURES_MAX:
            self._fail(error)
        self._drop(page)
        return ReadPage(Outcome.MISS)

    def _drop(self, page: DiskPage) -> None:
        if self._pages.find(page.facts.key) is page:
            self._pages.drop(page)
            self._dropped.append(page.slot)
            self._tell_gone()
            self._wake.set()

    # ---- the task

    def _fail(self, error: DiskError) -> None:
        """Makes `run` give the disk up."""
        if self._folder is not None:
            self._failure = self._failure or error
            self._wake.set()

    # ---- events

    def _tell_gone(self) -> None:
        gone = self._pages.take_gone()
        if gone:
            self._events.gone(gone)

    def _tell_stored(self, pages: list[DiskPage]) -> None:
        there = [page for page in pages if self._pages.find(page.facts.key) is page]
        if there:
            self._events.stored(there)

    async def _tell_slowly(self, pages: list[DiskPage], tell: Callable[[list[DiskPage]], None]) -> None:
        for first in range(0, len(pages), SLICE_PAGES):
            tell(pages[first : first + SLICE_PAGES])
            await asyncio.sleep(SLICE_PAUSE_S)
