"""The folder of the disk tier, as calls that block: for threads of their own.

`open`, `write`, `commit`, `forget`, `check` and `close` are called from one thread; `read` and `read_run` from any,
meanwhile. Every error of the file system or of SQLite is a DiskError.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvpeer.core.disk import SLOTS_PER_SEGMENT, Condition, DiskPage, DiskPages, Offer, Segments
from kvpeer.core.disk.segments import BLOCK_BYTES
from kvpeer.core.disk.write_queue import BATCH_PAGES_MAX
from kvpeer.model import Outcome
from kvpeer.storage.conditions import DiskError, disk_errors
from kvpeer.storage.index import PageIndex
from kvpeer.storage.lock import FolderLock
from kvpeer.storage.record import RECORD_BYTES, bytes_are_right, pack_record, parts_of_record
from kvpeer.storage.segment_files import SegmentFiles, memory_at

__all__ = ["RUN_PAGES_MAX", "DiskFolder", "PageRead", "PageWrite", "ReadPage"]

RUN_PAGES_MAX = 64
"""Pages of one read. Each is two pieces of memory, of which Linux takes 1024 in a call."""


@dataclass(frozen=True, slots=True, eq=False)
class PageWrite:
    """Write this page of the pool to its place: `offset` in the file of a segment."""

    page: DiskPage
    offer: Offer
    segment: int
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class PageRead:
    """Read this page from its place into memory at `address`, where there is room for whole blocks."""

    page: DiskPage
    segment: int
    offset: int
    address: int

    @property
    def end(self) -> int:
        """Where in the file it ends, and the next page may begin."""
        return self.offset + RECORD_BYTES + _whole_blocks(self.page.facts.length)


@dataclass(frozen=True, slots=True, eq=False)
class ReadPage:
    """HIT: the page's bytes are where they were wanted, verified; `parts` is its part table, PART_DTYPE [n_parts].
    STALE: the slot holds no record of this page. CORRUPT: its record is right, and its bytes are not."""

    outcome: Outcome
    parts: NDArray[np.void] | None = None


class DiskFolder:
    """Opens the folder. `pages`: what it holds; they are the caller's to change.

    Raises:
        DiskError: it cannot be had; the condition says why.
    """

    def __init__(self, path: Path, n_segments: int, segment_bytes: int) -> None:
        self._of_thread = threading.local()
        self._records = memoryview(mmap.mmap(-1, BATCH_PAGES_MAX * RECORD_BYTES))  # of one write, aligned
        with contextlib.ExitStack() as undo, disk_errors(f"open {path}"):
            self._lock = FolderLock(path)
            undo.callback(self._lock.close)
            self._files = SegmentFiles(path, segment_bytes)
            undo.callback(self._files.close)
            self._index = PageIndex(path, segment_bytes)
            undo.callback(self._index.close)
            self.pages = self._keep_what_fits(n_segments, segment_bytes)
            undo.pop_all()

    @property
    def is_direct(self) -> bool:
        """Whether the page cache is passed by."""
        return self._files.is_direct

    # ---- writing

    def write(self, writes: Sequence[PageWrite]) -> set[int]:
        """Writes at most BATCH_PAGES_MAX pages and makes them durable; returns the segments that there was no room for:
        nothing of theirs was written."""
        refused: set[int] = set()
        with disk_errors("write pages"):
            for segment in sorted({write.segment for write in writes}):
                if not self._prepare(segment):
                    refused.add(segment)
                    continue
                mine = [write for write in writes if write.segment == segment]
                self._write_segment(segment, sorted(mine, key=lambda write: write.offset))
        return refused

    def commit(self, slot_bytes_of: Mapping[int, int], pages: Iterable[DiskPage], dropped: Iterable[int]) -> None:
        """See `PageIndex.commit`."""
        with disk_errors("commit pages to the index"):
            self._index.commit(slot_bytes_of, pages, dropped)

    def forget(self, namespace: bytes) -> None:
        """See `PageIndex.forget`."""
        with disk_errors("drop a namespace from the index"):
            self._index.forget(namespace)

    # ---- reading

    def read(self, page: DiskPage, segment: int, offset: int, address: int) -> ReadPage:
        """Reads a page into memory at `address`, where there is room for whole blocks, and verifies it. When this
        returns, nothing writes there any more."""
        record, payload = self._read_records()[:RECORD_BYTES], memory_at(address, _whole_blocks(page.facts.length))
        with disk_errors("read a page"):
            is_whole = self._files.read(segment, offset, [record, payload])
        return _verified(page, record, payload) if is_whole else ReadPage(Outcome.STALE)

    def read_run(self, reads: Sequence[PageRead]) -> list[ReadPage | DiskError]:
        """Reads at most RUN_PAGES_MAX pages, each of which begins where the one before ends, as `read` does, and in one
        call. Where that fails they are read one by one, so that each has the outcome, or the error, that it has alone.
        """
        together = self._read_together(reads) if len(reads) > 1 else None
        return together or [self._read_alone(read) for read in reads]

    # ---- life

    def check(self) -> None:
        """Raises DiskError if the folder is not there any more."""
        with disk_errors("look for the folder"):
            self._lock.check()

    def close(self) -> None:
        """Gives the folder back. Nothing may be under way. Errors of a disk that is gone are no news."""
        with contextlib.ExitStack() as ending, contextlib.suppress(DiskError), disk_errors("close the folder"):
            ending.callback(self._lock.close)
            ending.callback(self._files.close)
            self._index.close()

    # ---- inside

    def _keep_what_fits(self, n_segments: int, segment_bytes: int) -> DiskPages:
        """Removes the files of segments that are not in use, or beyond the capacity, and opens the others."""
        index, pages = self._index, DiskPages(n_segments, segment_bytes)
        sizes = self._files.found()
        usable = {n for n in index.slot_bytes_of if n < n_segments and sizes.get(n) == segment_bytes}
        gone = set(index.slot_bytes_of) - usable
        index.drop_segments(gone)
        for number in sizes.keys() - usable:
            self._files.remove(number)
        for number in usable:
            self._files.prepare(number)
        slot_bytes_of = index.slot_bytes_of
        pages.restore(slot_bytes_of, (p for p in index.take_pages() if _has_place(p, slot_bytes_of, pages.segments)))
        return pages

    def _prepare(self, segment: int) -> bool:
        """Whether there is room for the segment's file."""
        try:
            with disk_errors("make room for pages"):
                self._files.prepare(segment)
        except DiskError as error:
            if error.condition is Condition.FULL:
                return False
            raise
        return True

    def _write_segment(self, segment: int, writes: Sequence[PageWrite]) -> None:
        """Pages that lie one behind the other go in one call."""
        pieces: list[memoryview] = []
        begin = end = 0
        for idx, write in enumerate(writes):
            if pieces and write.offset != end:
                self._files.write(segment, begin, pieces)
                pieces = []
            if not pieces:
                begin = end = write.offset
            facts, record = write.page.facts, self._records[idx * RECORD_BYTES : (idx + 1) * RECORD_BYTES]
            pack_record(facts, write.page.sequence, write.offer.parts, record)
            payload = memory_at(write.offer.address, _whole_blocks(facts.length))
            pieces += [record, payload]
            end += len(record) + len(payload)
        self._files.write(segment, begin, pieces)
        self._files.sync(segment)

    def _read_together(self, reads: Sequence[PageRead]) -> list[ReadPage | DiskError] | None:
        memory = self._read_records()
        records = [memory[at : at + RECORD_BYTES] for at in range(0, len(reads) * RECORD_BYTES, RECORD_BYTES)]
        payloads = [memory_at(read.address, _whole_blocks(read.page.facts.length)) for read in reads]
        pieces = [piece for pair in zip(records, payloads, strict=True) for piece in pair]
        try:
            if not self._files.read(reads[0].segment, reads[0].offset, pieces):
                return None
        except OSError:
            return None
        pages = [read.page for read in reads]
        return [_verified(*each) for each in zip(pages, records, payloads, strict=True)]

    def _read_alone(self, read: PageRead) -> ReadPage | DiskError:
        try:
            return self.read(read.page, read.segment, read.offset, read.address)
        except DiskError as error:
            return error

    def _read_records(self) -> memoryview:
        """Room of this thread for the records of one read, aligned for direct I/O."""
        records: memoryview | None = getattr(self._of_thread, "records", None)
        if records is None:
            records = self._of_thread.records = memoryview(mmap.mmap(-1, RUN_PAGES_MAX * RECORD_BYTES))
        return records


def _verified(page: DiskPage, record: memoryview, payload: memoryview) -> ReadPage:
    """What was read of a page."""
    parts = parts_of_record(record, page.facts, page.sequence)
    if parts is None:
        return ReadPage(Outcome.STALE)
    if not bytes_are_right(payload[: page.facts.length], parts):
        return ReadPage(Outcome.CORRUPT)
    return ReadPage(Outcome.HIT, parts)


def _whole_blocks(n_bytes: int) -> int:
    return -(-n_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _has_place(page: DiskPage, slot_bytes_of: dict[int, int], room: Segments) -> bool:
    """Whether the page can lie where the index says."""
    segment, idx = divmod(page.slot, SLOTS_PER_SEGMENT)
    slot_bytes = slot_bytes_of.get(segment)
    return slot_bytes == room.slot_bytes(page.facts.length) and idx < room.segment_bytes // (slot_bytes or 1)
