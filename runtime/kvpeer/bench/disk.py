"""The disk tier against a bare sequential loop of direct I/O on the same file system, as fio runs it with one job: a
page after another, between the same memory and a file that is laid out before.

What is measured of the tier is all that its threads do: records, durable writes and commits to the index; reads by the
threads that an agent has, with every checksum verified.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np

from kvpeer.bench.rounds import Comparison, Experiment
from kvpeer.core.disk import DiskPage, Offer, PageFacts
from kvpeer.model import InternalError, Outcome
from kvpeer.native import PART_DTYPE, crc64
from kvpeer.storage import DiskFolder, DiskSettings
from kvpeer.storage.folder import PageWrite

__all__ = ["DISK_BUDGET", "disk"]

DISK_BUDGET = "ratio >= 0.8"

SAMPLE_BYTES = 256 << 20
SEGMENT_BYTES = 512 << 20
"""One file takes all pages of a sample; the next sample writes over them, as an agent does whose disk is full."""

BATCH_PAGES = 64
NAMESPACE = bytes(32)


class _Sample:
    """As many pages as a sample moves, in memory aligned for direct I/O; the same bytes in each."""

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.n_pages = SAMPLE_BYTES // page_bytes
        self._memory = mmap.mmap(-1, SAMPLE_BYTES)
        self.view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        page = np.random.default_rng(1).bytes(page_bytes)
        for number in range(self.n_pages):
            self.view[number * page_bytes : (number + 1) * page_bytes] = page
        self.parts = np.array([(0, page_bytes, crc64(page))], dtype=PART_DTYPE).tobytes()

    def piece(self, number: int) -> memoryview:
        return self.view[number * self.page_bytes : (number + 1) * self.page_bytes]

    def bandwidth(self, move: Callable[[], None]) -> Callable[[], float]:
        """Returns a subject: GB/s of moving all pages."""

        def sample() -> float:
            started = time.perf_counter()
            move()
            return SAMPLE_BYTES / 1e9 / (time.perf_counter() - started)

        return sample


class _Tier:
    """The folder of a disk tier, driven as `DiskStore` drives it."""

    def __init__(self, folder: DiskFolder, sample: _Sample, threads: ThreadPoolExecutor) -> None:
        self._folder = folder
        self._sample = sample
        self._threads = threads
        self._stored: list[DiskPage] = []
        self._n_written = 0

    def write(self) -> None:
        self._stored = []
        for first in range(0, self._sample.n_pages, BATCH_PAGES):
            self._write_batch(range(first, min(first + BATCH_PAGES, self._sample.n_pages)))

    def _write_batch(self, numbers: range) -> None:
        pages, sample = self._folder.pages, self._sample
        writes = []
        for number in numbers:
            self._n_written += 1
            facts = PageFacts(self._n_written.to_bytes(16, "big"), 0, NAMESPACE, sample.page_bytes, 1)
            page = pages.begin(facts)
            if page is None:
                raise InternalError("a page of the benchmark found no place")
            offer = Offer(facts, 0, 1, sample.address + number * sample.page_bytes, sample.parts)
            writes.append(PageWrite(page, offer, *pages.segments.place(page.slot)))
        if self._folder.write(writes):
            raise InternalError("the file system is full")
        segments = {write.segment: pages.segments.slot_bytes_of[write.segment] for write in writes}
        self._folder.commit(segments, [write.page for write in writes], [])
        for write in writes:
            pages.stored(write.page)
        self._stored += [write.page for write in writes]

    def read(self) -> None:
        if not all(self._threads.map(self._read_page, range(len(self._stored)))):
            raise InternalError("a page of the benchmark was not read")

    def _read_page(self, number: int) -> bool:
        page = self._stored[number]
        place = self._folder.pages.segments.place(page.slot)
        address = self._sample.address + number * self._sample.page_bytes
        return self._folder.read(page, *place, address).outcome is Outcome.HIT


class _Bare:
    """A file that is read and written by a loop."""

    def __init__(self, path: Path, sample: _Sample, is_direct: bool) -> None:
        self._sample = sample
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if is_direct else 0), 0o600)
        os.posix_fallocate(self._fd, 0, SAMPLE_BYTES)

    def write(self) -> None:
        for number in range(self._sample.n_pages):
            os.pwrite(self._fd, self._sample.piece(number), number * self._sample.page_bytes)

    def read(self) -> None:
        for number in range(self._sample.n_pages):
            os.preadv(self._fd, [self._sample.piece(number)], number * self._sample.page_bytes)

    def close(self) -> None:
        os.close(self._fd)


@contextmanager
def disk(page_bytes: int) -> Iterator[Experiment]:
    """Writing and reading, in a folder of the file system that TMPDIR names; 800 MB of it."""
    with ExitStack() as closing_all:
        enter = closing_all.enter_context
        path = Path(enter(tempfile.TemporaryDirectory(prefix="kvpeer-bench-")))
        n_threads = DiskSettings(path, 0, 0).read_threads
        threads = enter(ThreadPoolExecutor(n_threads))
        sample = _Sample(page_bytes)
        folder = enter(closing(DiskFolder(path / "tier", 1, SEGMENT_BYTES)))
        tier = _Tier(folder, sample, threads)
        tier.write()
        bare = enter(closing(_Bare(path / "bare", sample, folder.is_direct)))
        name = "sequential direct I/O" if folder.is_direct else "sequential buffered I/O"
        moves = {"write": tier.write, "bare write": bare.write, "read": tier.read, "bare read": bare.read}
        rows = [
            Comparison(
                name=f"disk.{what}", unit="GB/s", subject=what, reference=f"bare {what}", reference_name=name,
                page_bytes=page_bytes, threads=n_threads if what == "read" else 1, budget=DISK_BUDGET,
            )
            for what in ("write", "read")
        ]  # fmt: skip
        yield Experiment({subject: sample.bandwidth(move) for subject, move in moves.items()}, rows)
