"""Pages that lie side by side are read in one call, and each still has the outcome that it has alone."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kvpeer.core.disk import DiskPage
from kvpeer.core.disk.segments import BLOCK_BYTES
from kvpeer.model import Outcome
from kvpeer.storage import DiskError, DiskFolder
from kvpeer.storage import read_threads as read_threads_module
from kvpeer.storage.folder import PageRead, ReadPage
from kvpeer.storage.read_threads import ReadThreads

from storage.pool_memory import N_SEGMENTS, SEGMENT_BYTES, SLOT_BYTES, PoolMemory, content, write

DEADLINE_S = 20.0
NUMBERS = range(1, 9)
FIRST_TARGET_SLOT = 40
PLACE_BYTES = SLOT_BYTES + BLOCK_BYTES
"""Of a page in a segment, with its record."""


class CountingFolder(DiskFolder):
    """A real folder that keeps how many pages each of its reads had; they wait for `go_on`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, N_SEGMENTS, SEGMENT_BYTES)
        self.go_on = threading.Event()
        self.go_on.set()
        self.runs: list[int] = []
        self.bad_sectors: set[int] = set()
        """Offsets in a file at which nothing can be read."""
        self._read_file, self._files.read = self._files.read, self._read_sectors

    def read_run(self, reads: Sequence[PageRead]) -> list[ReadPage | DiskError]:
        self.runs.append(len(reads))
        assert self.go_on.wait(DEADLINE_S)
        return super().read_run(reads)

    def _read_sectors(self, number: int, offset: int, pieces: Sequence[memoryview]) -> bool:
        if any(offset <= bad < offset + sum(map(len, pieces)) for bad in self.bad_sectors):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._read_file(number, offset, pieces)


@pytest.fixture
def memory() -> PoolMemory:
    return PoolMemory()


@pytest.fixture
def folder(tmp_path: Path):
    opened = CountingFolder(tmp_path / "kv")
    yield opened
    opened.close()


def reads_of(folder: DiskFolder, memory: PoolMemory, pages: Sequence[DiskPage]) -> list[PageRead]:
    """Each into a slot of its own."""
    places = [folder.pages.segments.place(page.slot) for page in pages]
    targets = range(FIRST_TARGET_SLOT, FIRST_TARGET_SLOT + len(pages))
    return [
        PageRead(page, *place, memory.address + slot * SLOT_BYTES)
        for page, place, slot in zip(pages, places, targets, strict=True)
    ]


def written(folder: DiskFolder, memory: PoolMemory) -> list[PageRead]:
    """Reads of the pages NUMBERS, which lie side by side."""
    reads = reads_of(folder, memory, write(folder, [memory.put(number) for number in NUMBERS]))
    assert all(after.offset == before.end for before, after in itertools.pairwise(reads))
    return reads


def outcomes(found: Sequence[ReadPage | DiskError]) -> list[Outcome | None]:
    """None for an error."""
    return [page.outcome if isinstance(page, ReadPage) else None for page in found]


def right_bytes(memory: PoolMemory, numbers: Sequence[int]) -> list[bool]:
    return [memory.bytes_of(FIRST_TARGET_SLOT + number - 1) == content(number) for number in numbers]


def damage(folder: Path, offset: int) -> None:
    with open(folder / "kv" / "0.pages", "r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * 8)


def test_pages_that_lie_side_by_side_come_in_one_read(folder: CountingFolder, memory: PoolMemory) -> None:
    reads = written(folder, memory)
    n_calls = 0
    reading = folder._files.read

    def count(*arguments: Any) -> bool:
        nonlocal n_calls
        n_calls += 1
        return reading(*arguments)

    folder._files.read = count
    assert outcomes(folder.read_run(reads)) == [Outcome.HIT] * len(reads)
    assert all(right_bytes(memory, NUMBERS))
    assert n_calls == 1


@pytest.mark.parametrize(("at", "outcome"), [(100, Outcome.STALE), (BLOCK_BYTES + 9000, Outcome.CORRUPT)])
def test_a_damaged_page_is_none_and_its_neighbours_are_hits(
    folder: CountingFolder, memory: PoolMemory, tmp_path: Path, at: int, outcome: Outcome
) -> None:
    reads = written(folder, memory)
    damage(tmp_path, reads[3].offset + at)
    assert outcomes(folder.read_run(reads)) == [outcome if n == 3 else Outcome.HIT for n in range(len(reads))]
    assert all(right_bytes(memory, [number for number in NUMBERS if number != 4]))


def test_a_bad_sector_costs_its_page_and_no_neighbour(folder: CountingFolder, memory: PoolMemory) -> None:
    reads = written(folder, memory)
    folder.bad_sectors = {reads[3].offset + BLOCK_BYTES}
    found = folder.read_run(reads)
    assert outcomes(found) == [None if n == 3 else Outcome.HIT for n in range(len(reads))]
    assert all(right_bytes(memory, [number for number in NUMBERS if number != 4]))


def test_a_file_that_ends_in_a_run_costs_what_is_behind_its_end(
    folder: CountingFolder, memory: PoolMemory, tmp_path: Path
) -> None:
    reads = written(folder, memory)
    os.truncate(tmp_path / "kv" / "0.pages", reads[5].offset)
    assert outcomes(folder.read_run(reads)) == [Outcome.HIT] * 5 + [Outcome.STALE] * 3


def runs_taken(folder: CountingFolder, reads: Sequence[PageRead], n_threads: int) -> list[int]:
    """The runs in which threads read these pages, which are all asked for before the first is read."""

    async def body() -> list[int]:
        folder.go_on.clear()
        threads = ReadThreads(n_threads)
        busy = [threads.submit(folder, reads[0]) for _ in range(n_threads)]  # one each: they follow nobody
        while len(folder.runs) < n_threads:
            await asyncio.sleep(0.001)
        wanted = [threads.submit(folder, read) for read in reads]
        folder.go_on.set()
        found = await asyncio.wait_for(asyncio.gather(*busy, *wanted), DEADLINE_S)
        threads.close()
        assert outcomes(found) == [Outcome.HIT] * len(found)
        return folder.runs[n_threads:]

    return asyncio.run(body())


def test_a_thread_takes_what_follows_each_other_in_the_file(folder: CountingFolder, memory: PoolMemory) -> None:
    reads = written(folder, memory)
    assert runs_taken(folder, [*reads[:3], *reads[4:6], reads[2], reads[1]], 1) == [3, 2, 1, 1]
    assert all(right_bytes(memory, [1, 2, 3, 5, 6]))


def test_a_run_leaves_the_other_threads_their_share(folder: CountingFolder, memory: PoolMemory) -> None:
    runs = runs_taken(folder, written(folder, memory), 2)
    assert sum(runs) == len(NUMBERS)
    assert max(runs) == len(NUMBERS) // 2


def test_a_run_is_bounded_in_bytes_and_in_pages(
    folder: CountingFolder, memory: PoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = written(folder, memory)
    monkeypatch.setattr(read_threads_module, "RUN_BYTES_MAX", 5 * PLACE_BYTES)
    assert runs_taken(folder, reads, 1) == [5, 3]
    monkeypatch.setattr(read_threads_module, "RUN_PAGES_MAX", 3)
    folder.runs.clear()
    assert runs_taken(folder, reads, 1) == [3, 3, 2]


def test_a_page_larger_than_a_run_is_read_alone(
    folder: CountingFolder, memory: PoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_threads_module, "RUN_BYTES_MAX", BLOCK_BYTES)
    assert runs_taken(folder, written(folder, memory), 1) == [1] * len(NUMBERS)


def test_an_error_of_ours_reaches_everybody_who_waits_for_the_run(folder: CountingFolder, memory: PoolMemory) -> None:
    class BrokenFolder:
        def read_run(self, reads: Sequence[PageRead]) -> list[ReadPage | DiskError]:
            raise ZeroDivisionError

    async def body() -> None:
        threads, broken = ReadThreads(1), BrokenFolder()
        wanted = [threads.submit(broken, read) for read in written(folder, memory)]
        failed = await asyncio.wait_for(asyncio.gather(*wanted, return_exceptions=True), DEADLINE_S)
        threads.close()
        assert [type(error) for error in failed] == [ZeroDivisionError] * len(NUMBERS)

    asyncio.run(body())


def test_what_was_asked_for_is_read_although_the_threads_are_to_end(folder: CountingFolder, memory: PoolMemory) -> None:
    async def body() -> None:
        threads = ReadThreads(2)
        wanted = [threads.submit(folder, read) for read in written(folder, memory)]
        threads.close()
        found = await asyncio.wait_for(asyncio.gather(*wanted), DEADLINE_S)
        assert outcomes(found) == [Outcome.HIT] * len(NUMBERS)
        for thread in threads._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()

    asyncio.run(body())
