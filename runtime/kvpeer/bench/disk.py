"""The disk tier against a bare sequential loop of direct I/O on the same file system, as fio runs it with one job: a
page after another, between the same memory and a file that is laid out before.

What is measured of the tier is what an agent waits for: its store, with its event loop and threads; pages are offered
until they are durable and in the index, and asked for until every checksum was verified.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import uvloop

from kvpeer.bench.rounds import Comparison, Experiment
from kvpeer.core.disk import Condition, DiskPage, Offer, PageFacts
from kvpeer.model import KEY_BYTES, InternalError, Outcome
from kvpeer.native import PART_DTYPE, crc64
from kvpeer.storage import DiskSettings, DiskStore
from kvpeer.storage.folder import ReadPage
from kvpeer.storage.segment_files import SegmentFiles

__all__ = ["DISK_BUDGET", "disk"]

DISK_BUDGET = "ratio >= 0.8"

SAMPLE_BYTES = 256 << 20
SEGMENT_BYTES = 512 << 20
"""One file takes all pages of a sample; the next sample writes over them, as an agent does whose disk is full."""

OPERATION_S_MAX = 60.0
"""Opening, writing or reading a sample; a disk that takes this long ends the benchmark with an error."""

POLL_S = 0.001
PROBE_BYTES = 1 << 20
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


class _Pool:
    """The pool above the tier: it holds whatever was offered, and keeps nothing from being evicted below."""

    def has(self, key: bytes) -> bool:
        """See PoolPages."""
        return False

    def holds(self, key: bytes, slot: int, generation: int) -> bool:
        """See PoolPages."""
        return True


class _Directory:
    """Nobody asks it."""

    def stored(self, pages: list[DiskPage]) -> None:
        """See DiskEvents."""

    def gone(self, pages: list[DiskPage]) -> None:
        """See DiskEvents."""


class _Tier:
    """The store of a disk tier with its event loop and threads, asked as an agent asks it."""

    def __init__(self, settings: DiskSettings, sample: _Sample) -> None:
        self._sample = sample
        self._keys: list[bytes] = []
        self._n_written = 0
        self._loop = uvloop.new_event_loop()
        self._loop.run_until_complete(self._open(settings))

    async def _open(self, settings: DiskSettings) -> None:
        self._store = DiskStore(settings, _Pool(), _Directory())
        self._serving = asyncio.ensure_future(self._store.run())
        await asyncio.wait_for(self._opened(), OPERATION_S_MAX)
        if self._store.condition is not Condition.OK:
            raise InternalError(f"the disk of the benchmark is {self._store.condition.value}")

    async def _opened(self) -> None:
        while self._store.condition is Condition.OPENING:
            await asyncio.sleep(POLL_S)

    def write(self) -> None:
        """Writes pages of new keys, over those of the sample before where there is no room left."""
        self._loop.run_until_complete(self._write())

    async def _write(self) -> None:
        sample = self._sample
        numbers = range(self._n_written, self._n_written + sample.n_pages)
        self._n_written = numbers.stop
        self._keys = [number.to_bytes(KEY_BYTES, "big") for number in numbers]
        facts = (PageFacts(key, 0, NAMESPACE, sample.page_bytes, 1) for key in self._keys)
        self._store.offer(
            Offer(each, 0, 1, sample.address + number * sample.page_bytes, sample.parts)
            for number, each in enumerate(facts)
        )
        await self._store.flush(OPERATION_S_MAX)
        if any(self._store.find(key) is None for key in self._keys):
            raise InternalError(f"a page of the benchmark was not written: {dict(self._store.outcomes)}")

    def read(self) -> None:
        """Reads them back, all asked for at once."""
        self._loop.run_until_complete(self._read())

    async def _read(self) -> None:
        reads = await asyncio.gather(*map(self._read_page, range(self._sample.n_pages)))
        if any(read.outcome is not Outcome.HIT for read in reads):
            raise InternalError("a page of the benchmark was not read")

    async def _read_page(self, number: int) -> ReadPage:
        page = self._store.find(self._keys[number])
        assert page is not None  # noqa: S101 - it was written
        return await self._store.read(page, self._sample.address + number * self._sample.page_bytes)

    def close(self) -> None:
        self._loop.run_until_complete(self._close())
        self._loop.close()

    async def _close(self) -> None:
        self._serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._serving
        await self._store.close(OPERATION_S_MAX)


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
        settings = DiskSettings(path / "tier", SEGMENT_BYTES, SEGMENT_BYTES)
        sample = _Sample(page_bytes)
        tier = enter(closing(_Tier(settings, sample)))
        tier.write()
        is_direct = _has_direct_io(path)
        bare = enter(closing(_Bare(path / "bare", sample, is_direct)))
        name = f"sequential {'direct' if is_direct else 'buffered'} I/O"
        moves = {"write": tier.write, "bare write": bare.write, "read": tier.read, "bare read": bare.read}
        rows = [
            Comparison(
                name=f"disk.{what}", unit="GB/s", subject=what, reference=f"bare {what}", reference_name=name,
                page_bytes=page_bytes, threads=settings.read_threads if what == "read" else 1, budget=DISK_BUDGET,
            )
            for what in ("write", "read")
        ]  # fmt: skip
        yield Experiment({subject: sample.bandwidth(move) for subject, move in moves.items()}, rows)


def _has_direct_io(path: Path) -> bool:
    """Whether the tier passes the page cache by on this file system."""
    probe = path / "probe"
    probe.mkdir()
    with closing(SegmentFiles(probe, PROBE_BYTES)) as files:
        files.prepare(0)
        return files.is_direct
