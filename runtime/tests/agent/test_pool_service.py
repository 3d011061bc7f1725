"""The pool service over a real native pool, and what it tells the rest of the agent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from kvpeer.agent.cohorts import COHORTS_MAX
from kvpeer.agent.pool import HEADROOM_BYTES, NoPeers, PoolService
from kvpeer.client.device import EngineLayout
from kvpeer.core.chain import Chain, ChainSlice, namespace_digest
from kvpeer.core.slot_effects import NoRoom, Reservation, ReserveStatus
from kvpeer.core.slots import SlotSettings, SlotTable
from kvpeer.model import CapacityError, Outcome, RemoteProtocolError, Verify
from kvpeer.native import PART_DTYPE, Pool, PoolMap
from kvpeer.wire.messages import ClientHello

EXTENT_BYTES = 1 << 20
PAGE_BYTES = 64 << 10
AGENT = b"a" * 16
WRITE, PRESENT, NO_ROOM, BUSY = (int(status) for status in ReserveStatus)


class Hooks(NoPeers):
    """Remembers what is published, as the directory's publisher would."""

    def __init__(self) -> None:
        self.pages: dict[bytes, tuple[int, int, int]] = {}

    def published(self, keys: bytes, partitions: Any, slots: Any, generations: Any, lengths: Any) -> None:
        for idx in range(len(slots)):
            self.pages[keys[idx * 16 : idx * 16 + 16]] = (int(slots[idx]), int(generations[idx]), int(partitions[idx]))
            assert lengths[idx] == PAGE_BYTES

    def withdrawn(self, keys: bytes, partitions: Any, slots: Any, generations: Any) -> None:
        for idx in range(len(slots)):
            location = (int(slots[idx]), int(generations[idx]), int(partitions[idx]))
            assert self.pages.pop(keys[idx * 16 : idx * 16 + 16]) == location


class Agent:
    def __init__(self, n_extents: int, memory: Callable[[], int | None], **settings: float) -> None:
        self.native = Pool(n_extents * EXTENT_BYTES, EXTENT_BYTES, AGENT)
        self.table = SlotTable(SlotSettings(EXTENT_BYTES, n_extents, **settings))
        self.hooks = Hooks()
        self.pool = PoolService(self.native, self.table, time.monotonic, self.hooks, memory)
        self.cohort = self.pool.join(hello())

    async def write(self, chain: ChainSlice) -> Reservation:
        reservation = await self.pool.reserve(1, self.cohort, 0, chain, time.monotonic() + 5)
        mine = reservation.statuses == WRITE
        checksums = np.zeros(int(mine.sum()), dtype=np.uint64)
        self.pool.commit(1, self.cohort, 0, reservation.slots[mine], reservation.generations[mine], checksums)
        return reservation


def hello(
    namespace: str = "n", page_bytes: int = PAGE_BYTES, n_parts: int = 1, part: int = 0, **other: Any
) -> ClientHello:
    part_bytes = other.get("part_bytes", page_bytes // max(n_parts, 1))
    offset = other.get("part_offset", part * part_bytes)
    return ClientHello("e", namespace_digest({"n": namespace}), {}, page_bytes, n_parts, part, offset, part_bytes)


def chain_of(*numbers: int) -> ChainSlice:
    chain = Chain(namespace_digest({"n": "n"}))
    chain.extend(number.to_bytes(8, "big") for number in numbers)
    return chain.slice(0, len(numbers))


def with_agent(
    scenario: Callable[[Agent], Coroutine[Any, Any, None]],
    n_extents: int = 1,
    memory: Callable[[], int | None] = lambda: None,
    **settings: float,
) -> None:
    async def run() -> None:
        agent = Agent(n_extents, memory, **settings)
        agent.pool.start()
        try:
            await asyncio.wait_for(scenario(agent), 20)
        finally:
            await agent.pool.close()
            agent.native.close()

    asyncio.run(run())


def test_the_hooks_know_exactly_the_pages_that_are_here_through_eviction_and_reset() -> None:
    async def scenario(agent: Agent) -> None:
        for first in range(0, 60, 6):
            await agent.write(chain_of(*range(first, first + 6)))
        resident = agent.pool.find(chain_of(*range(60)).keys).resident
        assert int(resident.sum()) == len(agent.hooks.pages)
        assert 8 <= len(agent.hooks.pages) <= 16, "16 slots"
        assert agent.pool.cohorts()[0].n_pages == len(agent.hooks.pages)
        await agent.pool.reset(agent.cohort, "test", 0.0)
        assert agent.hooks.pages == {}

    with_agent(scenario)


def test_a_reservation_waits_for_room_that_is_on_its_way() -> None:
    async def scenario(agent: Agent) -> None:
        first = await agent.write(chain_of(*range(16)))
        assert (first.statuses == WRITE).all(), "it waited for the extent to be opened"
        second = await agent.write(chain_of(*range(100, 116)))
        assert (second.statuses == WRITE).all(), "it waited for the evicted slots"
        assert len(agent.hooks.pages) >= 14

    with_agent(scenario, lease_ttl_s=0.1)


def test_a_reservation_never_waits_beyond_its_deadline() -> None:
    async def scenario(agent: Agent) -> None:
        await agent.write(chain_of(*range(16)))
        started = time.monotonic()
        late = await agent.pool.reserve(1, agent.cohort, 0, chain_of(50, 51, 52, 53), started + 0.05)
        assert time.monotonic() - started < 0.3
        assert late.no_room is NoRoom.QUARANTINED

    with_agent(scenario, lease_ttl_s=5.0)


def test_the_pool_grows_by_extents_and_stops_while_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpeer.agent.pool.GROWTH_RETRY_S", 0.05)
    left = [HEADROOM_BYTES + 2 * EXTENT_BYTES]

    def memory() -> int:
        left[0] -= EXTENT_BYTES
        return left[0] + EXTENT_BYTES

    async def scenario(agent: Agent) -> None:
        await agent.pool.ready()
        assert agent.pool.stats().unopened_bytes == 3 * EXTENT_BYTES, "one extent ahead, and no more"
        for first in range(0, 64, 8):
            await agent.write(chain_of(*range(first, first + 8)))
        await agent.pool.ready()
        assert agent.pool.stats().assigned_bytes == 2 * EXTENT_BYTES
        left[0] = HEADROOM_BYTES + 100 * EXTENT_BYTES
        deadline = time.monotonic() + 10
        while agent.pool.stats().unopened_bytes == 2 * EXTENT_BYTES:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    with_agent(scenario, n_extents=4, memory=memory)


def test_a_pulled_page_can_be_read_by_a_client_and_a_failed_pull_leaves_nothing() -> None:
    async def scenario(agent: Agent) -> None:
        await agent.pool.ready()
        chain = chain_of(1, 2, 3)
        pulled = await agent.pool.reserve_for_pull(agent.cohort, chain, np.array([0, 2]), time.monotonic() + 5)
        assert pulled.statuses.tolist() == [WRITE, WRITE]
        again = await agent.pool.reserve_for_pull(agent.cohort, chain, np.array([0, 1]), time.monotonic() + 5)
        assert again.statuses.tolist() == [BUSY, WRITE]
        payload = agent.native.payload_view()
        page = np.random.default_rng(1).integers(0, 256, PAGE_BYTES, dtype=np.uint8)
        payload[int(pulled.offsets[0]) : int(pulled.offsets[0]) + PAGE_BYTES] = page
        with PoolMap(*agent.native.fds, EXTENT_BYTES, AGENT) as pool_map:
            parts = np.zeros((1, 1), dtype=PART_DTYPE)
            parts[0, 0] = (0, PAGE_BYTES, pool_map.checksums(pulled.offsets[:1], 0, PAGE_BYTES)[0])
            assert agent.pool.commit_pulled(pulled.slots[:1], pulled.generations[:1], parts).tolist() == [True]
            agent.pool.fail_pull(pulled.slots[1:], pulled.generations[1:])
            agent.pool.fail_pull(again.slots[1:], again.generations[1:])
            found = agent.pool.pin(1, chain.keys)
            assert found.resident.tolist() == [True, False, False]
            block = np.zeros(PAGE_BYTES, dtype=np.uint8)
            layout = EngineLayout(
                np.array([block.ctypes.data], np.uint64), np.array([0], np.uint64), np.array([PAGE_BYTES], np.uint32)
            )
            outcomes = pool_map.scatter(
                found.slots[:1],
                found.generations[:1],
                found.offsets[:1],
                chain.keys[:16],
                0,
                layout,
                np.zeros(1, np.int64),
                Verify.FULL,
            )
            assert outcomes.tolist() == [Outcome.HIT]
            assert np.array_equal(block, page)
        del payload
        assert set(agent.hooks.pages) == {chain.keys[:16]}

    with_agent(scenario)


def test_a_page_that_was_pulled_too_late_is_not_published() -> None:
    async def scenario(agent: Agent) -> None:
        await agent.pool.ready()
        pulled = await agent.pool.reserve_for_pull(agent.cohort, chain_of(1), np.array([0]), time.monotonic() + 5)
        await asyncio.sleep(0.15)
        parts = np.zeros((1, 1), dtype=PART_DTYPE)
        parts[0, 0] = (0, PAGE_BYTES, 0)
        assert agent.pool.commit_pulled(pulled.slots, pulled.generations, parts).tolist() == [False]
        assert agent.hooks.pages == {}
        assert agent.pool._part_tables == {}

    with_agent(scenario, reserve_deadline_s=0.1)


def test_the_checksums_of_a_page_that_was_never_completed_are_forgotten() -> None:
    async def scenario(agent: Agent) -> None:
        await agent.pool.ready()
        cohort = agent.pool.join(hello("two", n_parts=2))
        half = await agent.pool.reserve(1, cohort, 0, chain_of(1), time.monotonic() + 1)
        agent.pool.commit(1, cohort, 0, half.slots, half.generations, np.ones(1, dtype=np.uint64))
        assert len(agent.pool._part_tables) == 1
        await agent.pool.reset(cohort, "test", 0.0)
        assert agent.pool._part_tables == {}

    with_agent(scenario)


def test_expired_reservations_and_pins_end_without_anybody_asking() -> None:
    async def scenario(agent: Agent) -> None:
        await agent.write(chain_of(1))
        agent.pool.pin(7, chain_of(1).keys)
        await agent.pool.reserve(7, agent.cohort, 0, chain_of(2), time.monotonic() + 1)
        assert (agent.pool.stats().n_pins, agent.pool.stats().n_writing) == (1, 1)
        deadline = time.monotonic() + 10
        while agent.pool.stats().n_pins or agent.pool.stats().n_writing:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert agent.pool.stats().n_expired == 1

    with_agent(scenario, reserve_deadline_s=0.1, pin_ttl_s=0.2)


IMPOSSIBLE = {
    "a page beyond the extent": (hello("x", page_bytes=EXTENT_BYTES + 1), "extent_size"),
    "a part that does not exist": (hello("x", n_parts=2, part=2), "part: 2"),
    "too many parts": (hello("x", n_parts=65), "n_parts: 65"),
    "a part beyond the page": (hello("x", part_offset=1), "not within the page"),
    "an empty part": (hello("x", part_bytes=0), "not within the page"),
    "another page size": (hello(page_bytes=PAGE_BYTES * 2), "other engines of this namespace"),
    "other bytes of the same part": (hello(part_bytes=100), "other bytes of the page"),
    "parts that overlap": (hello("two", n_parts=2, part=1, part_offset=100), "overlap"),
    "parts that leave a gap": (
        hello("two", n_parts=2, part=1, part_bytes=100, part_offset=PAGE_BYTES // 2),
        "together",
    ),
}


@pytest.mark.parametrize(("impossible", "words"), IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_a_client_with_pages_that_cannot_be_is_refused_by_name(impossible: ClientHello, words: str) -> None:
    async def scenario(agent: Agent) -> None:
        agent.pool.join(hello("two", n_parts=2, part=0))
        with pytest.raises(RemoteProtocolError, match=words):
            agent.pool.join(impossible)
        assert sum(cohort.n_clients for cohort in agent.pool.cohorts()) == 2

    with_agent(scenario)


def test_namespaces_without_clients_make_room_for_new_ones() -> None:
    async def scenario(agent: Agent) -> None:
        await agent.write(chain_of(1))
        cohorts = [agent.pool.join(hello(str(number))) for number in range(COHORTS_MAX - 1)]
        with pytest.raises(CapacityError, match="namespaces"):
            agent.pool.join(hello("one too many"))
        agent.pool.leave(1, agent.cohort)
        agent.pool.join(hello("one more"))
        assert agent.hooks.pages == {}, "the pages of the namespace that had to go"
        assert len(cohorts) == COHORTS_MAX - 1

    with_agent(scenario)
