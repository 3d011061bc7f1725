"""The folder of the disk tier, as calls that block: for threads of their own.

`open`, `write`, `commit`, `forget`, `check` and `close` are called from one thread; `read` from any, meanwhile. Every
error of the file system or of SQLite is a DiskError.
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

__all__ = ["DiskFolder", "PageWrite", "ReadPage"]


@dataclass(frozen=True, slots=True, eq=False)
class PageWrite:
    """Write this page of the pool to its place: `offset` in the file of a segment."""

    page: DiskPage
    offer: Offer
    segment: int
    offset: int


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
        self._blocks = threading.local()
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
        facts = page.facts
        record = self._block()
        payload = memory_at(address, -(-facts.length // BLOCK_BYTES) * BLOCK_BYTES)
        with disk_errors("read a page"):
            is_whole = self._files.read(segment, offset, [record, payload])
        parts = parts_of_record(record, facts, page.sequence) if is_whole else None
        if parts is None:
            return ReadPage(Outcome.STALE)
        if not bytes_are_right(payload[: facts.length], parts):
            return ReadPage(Outcome.CORRUPT)
        return ReadPage(Outcome.HIT, parts)

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
            payload = memory_at(write.offer.address, -(-facts.length // BLOCK_BYTES) * BLOCK_BYTES)
            pieces += [record, payload]
            end += len(record) + len(payload)
        self._files.write(segment, begin, pieces)
        self._files.sync(segment)

    def _block(self) -> memoryview:
        """A block of this thread, aligned for direct I/O."""
        block: memoryview | None = getattr(self._blocks, "block", None)
        if block is None:
            block = self._blocks.block = memoryview(mmap.mmap(-1, RECORD_BYTES))
        return block


def _has_place(page: DiskPage, slot_bytes_of: dict[int, int], room: Segments) -> bool:
    """Whether the page can lie where the index says."""
    segment, idx = divmod(page.slot, SLOTS_PER_SEGMENT)
    slot_bytes = slot_bytes_of.get(segment)
    return slot_bytes == room.slot_bytes(page.facts.length) and idx < room.segment_bytes // (slot_bytes or 1)
