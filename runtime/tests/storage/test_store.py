"""The store on real files: what it holds is found and read; whatever the disk does, nobody waits for it."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from kvpeer.core.disk import Condition, DiskPage
from kvpeer.core.disk.write_queue import QUEUE_PAGES_MAX
from kvpeer.model import Outcome
from kvpeer.storage import DiskFolder, DiskSettings, DiskStore
from kvpeer.storage import store as store_module

from storage.pool_memory import N_SEGMENTS, NAMESPACE, SEGMENT_BYTES, SLOT_BYTES, PoolMemory, content, key_of

TARGET_SLOT = 40
DEADLINE_S = 20.0


class Directory:
    """Which pages the store says are there."""

    def __init__(self) -> None:
        self.pages: dict[bytes, DiskPage] = {}

    def stored(self, pages: list[DiskPage]) -> None:
        for page in pages:
            assert page.facts.key not in self.pages
            self.pages[page.facts.key] = page

    def gone(self, pages: list[DiskPage]) -> None:
        for page in pages:
            assert self.pages.pop(page.facts.key, page) is page


class HeldFolder(DiskFolder):
    """A real folder whose writes and reads wait for `go_on`, and raise `error` if there is one."""

    go_on = threading.Event()
    error: OSError | None = None

    def write(self, *arguments: Any) -> Any:
        assert self.go_on.wait(DEADLINE_S)
        return super().write(*arguments)

    def read(self, *arguments: Any) -> Any:
        assert self.go_on.wait(DEADLINE_S)
        if HeldFolder.error is not None:
            self._files.read = self._fail
        return super().read(*arguments)

    @staticmethod
    def _fail(*_: Any) -> Any:
        raise HeldFolder.error


class Tier:
    """A store that runs, with its pool and the directory."""

    def __init__(self, path: Path, slow_s: float = 10.0) -> None:
        self.memory = PoolMemory()
        self.directory = Directory()
        settings = DiskSettings(path, N_SEGMENTS * SEGMENT_BYTES, SEGMENT_BYTES, 2, slow_s)
        self.store = DiskStore(settings, self.memory, self.directory, time.monotonic, HeldFolder)
        self._running = asyncio.ensure_future(self.store.run())

    async def is_in(self, *conditions: Condition) -> None:
        await self.until(lambda: self.store.condition in conditions)

    async def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, "not so by the deadline"
            if self._running.done():
                self._running.result()
            await asyncio.sleep(0.002)

    async def write(self, *numbers: int, namespace: bytes = NAMESPACE) -> None:
        self.store.offer([self.memory.put(number, namespace) for number in numbers])
        await self.until(lambda: all(key_of(number) in self.directory.pages for number in numbers))

    async def read(self, number: int) -> bytes | Outcome:
        page = self.store.find(key_of(number))
        if page is None:
            return Outcome.MISS
        self.memory.view[TARGET_SLOT * SLOT_BYTES : (TARGET_SLOT + 1) * SLOT_BYTES] = bytes(SLOT_BYTES)
        read = await self.store.read(page, self.memory.address + TARGET_SLOT * SLOT_BYTES)
        return self.memory.bytes_of(TARGET_SLOT) if read.outcome is Outcome.HIT else read.outcome

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.wait([self._running])
        await self.store.close(5.0)


@pytest.fixture(autouse=True)
def _open_gates(monkeypatch: pytest.MonkeyPatch):
    HeldFolder.go_on.set()
    HeldFolder.error = None
    monkeypatch.setattr(store_module, "CHECK_S", 0.05)
    yield
    HeldFolder.go_on.set()


def with_tier(path: Path, scenario: Callable[[Tier], Coroutine[Any, Any, None]], slow_s: float = 10.0) -> None:
    async def body() -> None:
        tier = Tier(path, slow_s)
        try:
            await scenario(tier)
        finally:
            HeldFolder.go_on.set()
            await tier.close()

    asyncio.run(asyncio.wait_for(body(), 40))


def test_what_was_offered_is_read_back_also_by_the_next_run(tmp_path: Path) -> None:
    async def first(tier: Tier) -> None:
        await tier.is_in(Condition.OK)
        await tier.write(1, 2, 3)
        assert [await tier.read(number) for number in (1, 2, 3)] == [content(number) for number in (1, 2, 3)]
        tier.store.offer([tier.memory.put(1)])
        assert tier.store.n_queued == 0, "what is there already is not written again"
        assert tier.store.outcomes["written"] == 3

    async def second(tier: Tier) -> None:
        await tier.until(lambda: len(tier.directory.pages) == 3)
        assert [await tier.read(number) for number in (1, 2, 3)] == [content(number) for number in (1, 2, 3)]
        assert await tier.read(4) is Outcome.MISS

    with_tier(tmp_path / "kv", first)
    with_tier(tmp_path / "kv", second)


def test_the_directory_knows_exactly_what_is_there_while_pages_are_evicted(tmp_path: Path) -> None:
    async def scenario(tier: Tier) -> None:
        await tier.is_in(Condition.OK)
        for first in range(0, 200, 8):
            await tier.write(*range(first, first + 8))
            assert set(tier.directory.pages) == {page.facts.key for page in tier.store._pages.all()}
        assert tier.store.n_evicted == 200 - tier.store.n_pages > 100
        assert tier.store.used_bytes == N_SEGMENTS * SEGMENT_BYTES

    with_tier(tmp_path / "kv", scenario)


def test_what_the_pool_still_has_is_not_evicted_from_the_disk(tmp_path: Path) -> None:
    async def scenario(tier: Tier) -> None:
        await tier.is_in(Condition.OK)
        await tier.write(1, 2)
        tier.memory.pinned.add(key_of(1))
        for first in range(100, 200, 8):
            await tier.write(*range(first, first + 8))
        assert tier.store.find(key_of(1)) is not None
        assert tier.store.find(key_of(2)) is None

    with_tier(tmp_path / "kv", scenario)


def test_an_orderly_end_writes_what_was_offered_and_a_hanging_disk_does_not_hold_it_up(tmp_path: Path) -> None:
    async def scenario(tier: Tier) -> None:
        await tier.is_in(Condition.OK)
        tier.store.offer([tier.memory.put(number) for number in range(20)])
        await tier.store.flush(10.0)
        assert tier.store.n_pages == 20
        HeldFolder.go_on.clear()
        tier.store.offer([tier.memory.put(20)])
        started = time.monotonic()
        await tier.store.flush(0.1)
        assert time.monotonic() - started < 2.0

    with_tier(tmp_path / "kv", scenario)


def test_a_full_queue_drops_and_counts_and_offering_never_waits(tmp_path: Path) -> None:
    async def scenario(tier: Tier) -> None:
        await tier.is_in(Condition.OK)
        HeldFolder.go_on.clear()
        offer = tier.memory.put(0)
        tier.store.offer([offer])
        await tier.until(lambda: not tier.store.n_queued)  # it is being written, and hangs
        fresh = [tier.memory.put(number) for number in range(1, 60)]
        started = time.monotonic()
        for n in range(QUEUE_PAGES_MAX + 10):
            facts = fresh[n % 59].facts
            copied = type(facts)(key_of(10_000 + n), 0, facts.namespace, facts.length, facts.n_parts)
            tier.store.offer([type(offer)(copied, 1, 1, fresh[0].address, fresh[0].parts)])
        assert time.monotonic() - started < 2.0
        assert tier.store.n_queued == QUEUE_PAGES_MAX
        assert tier.store.outcomes["queue_full"] == 10

    with_tier(tmp_path / "kv", scenario)


def test_a_page_that_moved_while_it_was_written_is_not_taken(tmp_path: Path) -> None:
    async def scenario(tier: Tier) -> None:
        await tier.is_in(Condition.OK)
        HeldFolder.go_on.clear()
        tier.store.offer([tier.memory.put(1), tier.memory.put(2)])
        await tier.until(lambda: not tier.store.n_queued)
        del tier.memory.there[key_of(1)]  # evicted from the pool: its slot may hold anything by now
        HeldFolder.go_on.set()
        await tier.until(lambda: key_of(2) in tier.directory.pages)
        assert tier.store.find(key_of(1)) is None
        assert tier.store.outcomes["moved"] == 1

    with_tier(tmp_path / "kv", scenario)


def test_a_disk_that_hangs_is_given_up_and_used_again_when_it_answers(tmp_path: Path) -> None:
    async def scenario(tier: Tier) -> None:
        await tier.is_in(Condition.OK)
        await tier.write(1)
        HeldFolder.go_on.clear()
        tier.store.offer([tier.memory.put(2)])
        await tier.is_in(Condition.SLOW)
        await tier.until(lambda: not tier.directory.pages)
        assert tier.store.find(key_of(1)) is None
        tier.store.offer([tier.memory.put(3)])
        assert tier.store.outcomes["disk_off"] == 1
        HeldFolder.go_on.set()
        await tier.is_in(Condition.OK)
        await tier.until(lambda: key_of(1) in tier.directory.pages)
        assert await tier.read(1) == content(1)

    with_tier(tmp_path / "kv", scenario, slow_s=0.2)


def test_a_read_that_hangs_gives_the_disk_up_and_ends_only_when_nothing_writes_any_more(tmp_path: Path) -> None:
    async def scenario(tier: Tier) -> None:
        await tier.is_in(Condition.OK)
        await tier.write(1)
        HeldFolder.go_on.clear()
        reading = asyncio.ensure_future(tier.read(1))
        await tier.is_in(Condition.SLOW)
        assert not reading.done()
        HeldFolder.go_on.set()
        assert await reading in (content(1), Outcome.MISS)

    with_tier(tmp_path / "kv", scenario, slow_s=0.2)


def test_a_folder_that_vanishes_is_no_disk_tier_until_it_is_back(tmp_path: Path) -> None:
    async def scenario(tier: Tier) -> None:
        await tier.is_in(Condition.OK)
        await tier.write(1)
        (tmp_path / "disk").rename(tmp_path / "gone")
        await tier.is_in(Condition.VANISHED)
        await tier.until(lambda: not tier.directory.pages)
        (tmp_path / "gone").rename(tmp_path / "disk")
        await tier.is_in(Condition.OK)
        await tier.until(lambda: key_of(1) in tier.directory.pages)
        assert await tier.read(1) == content(1)

    (tmp_path / "disk").mkdir()
    with_tier(tmp_path / "disk" / "kv", scenario)


def test_a_folder_of_another_agent_is_taken_when_that_one_ends(tmp_path: Path) -> None:
    async def scenario(tier: Tier) -> None:
        await tier.is_in(Condition.LOCKED)
        other.close()
        await tier.is_in(Condition.OK)

    other = DiskFolder(tmp_path / "kv", N_SEGMENTS, SEGMENT_BYTES)
    with_tier(tmp_path / "kv", scenario)


def test_a_namespace_that_is_forgotten_is_gone_at_once_and_after_a_restart(tmp_path: Path) -> None:
    other = b"o" * 32

    async def first(tier: Tier) -> None:
        await tier.is_in(Condition.OK)
        await tier.write(1)
        await tier.write(2, namespace=other)
        tier.store.forget(other)
        assert tier.store.find(key_of(2)) is None
        assert await tier.store.forgotten(other, time.monotonic() + 5)

    async def second(tier: Tier) -> None:
        await tier.until(lambda: key_of(1) in tier.directory.pages)
        assert tier.store.n_pages == 1

    with_tier(tmp_path / "kv", first)
    with_tier(tmp_path / "kv", second)


def test_what_is_forgotten_while_it_is_written_does_not_appear(tmp_path: Path) -> None:
    async def scenario(tier: Tier) -> None:
        await tier.is_in(Condition.OK)
        HeldFolder.go_on.clear()
        tier.store.offer([tier.memory.put(1)])
        await tier.until(lambda: not tier.store.n_queued)
        tier.store.forget(NAMESPACE)
        HeldFolder.go_on.set()
        assert await tier.store.forgotten(NAMESPACE, time.monotonic() + 10)
        await tier.write(2)
        assert tier.store.find(key_of(1)) is None
        assert set(tier.directory.pages) == {key_of(2)}

    with_tier(tmp_path / "kv", scenario)


def test_what_is_forgotten_while_the_disk_is_away_does_not_come_back_with_it(tmp_path: Path) -> None:
    async def scenario(tier: Tier) -> None:
        await tier.is_in(Condition.OK)
        await tier.write(1)
        (tmp_path / "kv").rename(tmp_path / "gone")
        await tier.is_in(Condition.VANISHED)
        tier.store.forget(NAMESPACE)
        assert not await tier.store.forgotten(NAMESPACE, time.monotonic() + 0.02), "nobody can promise it now"
        (tmp_path / "gone").rename(tmp_path / "kv")
        await tier.is_in(Condition.OK)
        assert tier.store.n_pages == 0

    with_tier(tmp_path / "kv", scenario)


def test_a_page_that_rotted_is_corrupt_once_and_then_gone_for_good(tmp_path: Path) -> None:
    async def first(tier: Tier) -> None:
        await tier.is_in(Condition.OK)
        await tier.write(1)
        with (tmp_path / "kv" / "0.pages").open("r+b") as file:
            file.seek(4096 + 5000)
            file.write(b"rot")
        assert await tier.read(1) is Outcome.CORRUPT
        assert tier.store.n_corrupt == 1
        assert await tier.read(1) is Outcome.MISS
        assert not tier.directory.pages
        await tier.until(lambda: not tier.store._dropped)

    async def second(tier: Tier) -> None:
        await tier.is_in(Condition.OK)
        assert tier.store.n_pages == 0

    with_tier(tmp_path / "kv", first)
    with_tier(tmp_path / "kv", second)


def test_one_bad_sector_costs_its_page_and_a_disk_full_of_them_is_given_up(tmp_path: Path) -> None:
    async def scenario(tier: Tier) -> None:
        await tier.is_in(Condition.OK)
        await tier.write(1, 2, 3, 4)
        HeldFolder.error = OSError(errno.EIO, os.strerror(errno.EIO))
        assert await tier.read(1) is Outcome.MISS
        assert tier.store.condition is Condition.OK
        assert set(tier.directory.pages) == {key_of(number) for number in (2, 3, 4)}
        assert await tier.read(2) is Outcome.MISS
        assert await tier.read(3) is Outcome.MISS
        await tier.is_in(Condition.FAILING)
        HeldFolder.error = None
        await tier.is_in(Condition.OK)
        assert await tier.read(4) == content(4)

    with_tier(tmp_path / "kv", scenario)


def test_reads_beyond_the_limit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(tier: Tier) -> None:
        await tier.is_in(Condition.OK)
        await tier.write(1)
        HeldFolder.go_on.clear()
        reading = [asyncio.ensure_future(tier.read(1)) for _ in range(4)]
        await tier.until(lambda: sum(each.done() for each in reading) == 2)
        assert sorted(each.result() for each in reading if each.done()) == [Outcome.REFUSED] * 2
        HeldFolder.go_on.set()
        await asyncio.gather(*reading)

    monkeypatch.setattr(store_module, "READS_MAX", 2)
    with_tier(tmp_path / "kv", scenario)


def test_closing_does_not_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    async def body() -> None:
        tier = Tier(tmp_path / "kv")
        await tier.is_in(Condition.OK)
        HeldFolder.go_on.clear()
        tier.store.offer([tier.memory.put(1)])
        await tier.until(lambda: not tier.store.n_queued)
        tier._running.cancel()
        started = time.monotonic()
        await tier.store.close(0.2)
        assert time.monotonic() - started < 2.0
        HeldFolder.go_on.set()

    asyncio.run(asyncio.wait_for(body(), 20))
