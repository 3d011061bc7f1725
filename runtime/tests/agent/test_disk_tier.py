"""Pages that the pool evicted come back from the disk: for the own engine, for peers, and after a restart."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from kvpeer.agent import promotions as promotions_module
from kvpeer.core.disk import Condition
from kvpeer.model import Outcome, Tier
from kvpeer.storage.folder import ReadPage
from kvpeer.wire.messages import ClientHello, Lookup
from kvpeer.wire.packing import U2, pack, unpack_holders
from link_nodes import until
from msgspec.structs import replace
from whole_agents import DISK, HELLO, PAGE_BYTES, WholeAgent, chain_of, whole_agents, with_agents
from whole_agents import run as run_body

SMALL_POOL = {"pool.size": "1Mi", "pool.extent_size": "1Mi", "pool.lease_ttl": "1ms"}
OTHERS = range(1000, 1100)
"""More pages than the small pool has slots: they push out all others."""


def on_disk(folder: Path, **settings: str) -> dict[str, str]:
    return {**SMALL_POOL, **DISK, "disk.path": str(folder / "kv"), **settings}


def store_of(agent: WholeAgent):
    return agent.agent._disk.store


async def is_stored(agent: WholeAgent, *numbers: int) -> None:
    keys = [chain_of(number).keys for number in numbers]
    await until(lambda: all(store_of(agent).find(key) is not None for key in keys))


async def evict(agent: WholeAgent, *numbers: int) -> None:
    """Pushes these pages out of the pool, down to the disk."""
    await is_stored(agent, *numbers)
    for number in OTHERS:
        await agent.publish(number)
    for number in numbers:
        assert not agent.pool.has(chain_of(number).keys)


async def own_fetch(agent: WholeAgent, *numbers: int) -> list[str]:
    """As `WholeAgent.pull`, by the way that engines go: the own disk comes before peers."""
    agent.puller = agent.agent._clients._requests._puller
    return await agent.pull(*numbers)


async def tier_of(agent: WholeAgent, number: int) -> list[int]:
    """The tiers of the holders that the directory names, from the own shard."""
    chain = chain_of(number)
    answer = agent.agent._directory.shard.lookup(Lookup(chain.keys, pack(chain.partitions(), U2)))
    return unpack_holders(answer, 1)[2]["tier"].tolist()


def test_an_evicted_page_is_found_and_fetched_by_the_own_engine(tmp_path: Path) -> None:
    async def scenario(agent: WholeAgent) -> None:
        await agent.publish(1, 2, 3)
        assert await tier_of(agent, 1) == [Tier.HOST]
        await evict(agent, 1, 2, 3)
        assert await tier_of(agent, 1) == [Tier.DISK]
        agent.locator = agent.agent._clients._requests._locator
        assert await agent.locate(1, 2, 3, 9) == ([1, 1, 1, 0], "no_members")
        assert await own_fetch(agent, 1, 2, 3) == ["HIT"] * 3
        assert await tier_of(agent, 1) == [Tier.HOST]
        assert agent.count("kvpeer_disk_promoted_pages_total", outcome="hit", reader="own") == 3

    with_agents(tmp_path, "agent", scenario, agent=on_disk(tmp_path))


def test_an_evicted_page_is_pulled_by_a_peer_from_where_it_was_promoted_to(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(1, 2, 3)
        await evict(producer, 1, 2, 3)
        await producer.publish(4)
        for numbers in ((1, 2, 3), (4,)):
            await reader.finds(*numbers)
        assert await reader.pull(1, 2, 3) == ["HIT"] * 3
        assert await reader.pull(4) == ["HIT"]
        assert producer.count("kvpeer_disk_promoted_pages_total", outcome="hit", reader="peer") == 3
        assert producer.pool.has(chain_of(1).keys)

    with_agents(tmp_path, "reader producer", scenario, producer=on_disk(tmp_path))


def test_many_who_want_a_page_cost_one_read(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(1)
        await evict(producer, 1)
        await reader.finds(1)
        read_before = store_of(producer).n_bytes_read
        outcomes = await asyncio.gather(own_fetch(producer, 1), own_fetch(producer, 1), reader.pull(1), reader.pull(1))
        assert outcomes == [["HIT"]] * 4
        assert store_of(producer).n_bytes_read - read_before == 16 << 10

    with_agents(tmp_path, "reader producer", scenario, producer=on_disk(tmp_path))


def test_after_a_restart_what_was_on_the_disk_is_served_by_the_next_run(tmp_path: Path) -> None:
    async def first() -> None:
        async with whole_agents(tmp_path, "producer", producer=on_disk(tmp_path)) as (producer,):
            await producer.publish(1, 2, 3)
            await is_stored(producer, 1, 2, 3)

    async def second(reader: WholeAgent, producer: WholeAgent) -> None:
        await is_stored(producer, 1, 2, 3)
        await reader.finds(1, 2, 3)
        assert await reader.pull(1, 2, 3) == ["HIT"] * 3

    run_body(first())
    with_agents(tmp_path, "reader producer", second, producer=on_disk(tmp_path))


def test_what_the_disk_evicts_as_well_is_withdrawn(tmp_path: Path) -> None:
    async def scenario(agent: WholeAgent) -> None:
        await agent.publish(1)
        await evict(agent, 1)
        first = 2000
        while store_of(agent).find(chain_of(1).keys) is not None:
            await agent.publish(first)
            await is_stored(agent, first)
            first += 1
        assert await tier_of(agent, 1) == []
        assert await own_fetch(agent, 1) == ["MISS"]

    with_agents(tmp_path, "agent", scenario, agent=on_disk(tmp_path))


def test_a_reset_takes_the_pages_off_the_disk_too_also_for_the_next_run(tmp_path: Path) -> None:
    async def first() -> None:
        async with whole_agents(tmp_path, "agent", agent=on_disk(tmp_path)) as (agent,):
            await agent.publish(1)
            await evict(agent, 1)
            await agent.pool.reset(agent.cohort, "test", time.monotonic() + 5)
            assert await tier_of(agent, 1) == []
            assert await own_fetch(agent, 1, OTHERS[-1]) == ["MISS"] * 2

    async def second(agent: WholeAgent) -> None:
        await until(lambda: store_of(agent).condition is Condition.OK)
        assert store_of(agent).n_pages == 0

    run_body(first())
    with_agents(tmp_path, "agent", second, agent=on_disk(tmp_path))


def test_a_page_that_rotted_on_the_disk_is_no_hit_and_leaves_the_directory(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(1, 2)
        await evict(producer, 1, 2)
        await reader.finds(1, 2)
        page = store_of(producer).find(chain_of(1).keys)
        segment, offset = store_of(producer)._pages.segments.place(page.slot)
        with (tmp_path / "kv" / f"{segment}.pages").open("r+b") as file:
            file.seek(offset + 4096 + 77)
            file.write(b"rot")
        assert await reader.pull(1, 2) == ["CORRUPT", "HIT"]
        await until(lambda: not producer.pool.has(chain_of(1).keys))
        assert store_of(producer).find(chain_of(1).keys) is None
        assert await reader.pull(1) == ["MISS"]

    with_agents(tmp_path, "reader producer", scenario, producer=on_disk(tmp_path))


def test_promotions_for_peers_beyond_the_limit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(1, 2, 3)
        await evict(producer, 1, 2, 3)
        await reader.finds(1, 2, 3)
        assert sorted(await reader.pull(1, 2, 3)) == ["HIT", "REFUSED", "REFUSED"]
        assert await own_fetch(producer, 2, 3) == ["HIT"] * 2, "the own engine's share is left"
        assert reader.count("kvpeer_transport_unasked_pages_total", reason="not_promoted") == 2

    monkeypatch.setattr(promotions_module, "PEERS_PAGES_MAX", 1)
    with_agents(tmp_path, "reader producer", scenario, producer=on_disk(tmp_path))


def test_a_disk_that_hangs_costs_a_reader_its_deadline_and_the_slot_is_given_back_when_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(1)
        await evict(producer, 1)
        await reader.finds(1)
        folder = store_of(producer)._folder
        reading, hangs = folder.read, asyncio.get_running_loop().create_future()

        def read(*arguments):
            asyncio.run_coroutine_threadsafe(_wait(hangs), loop).result(20)
            return reading(*arguments)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(folder, "read", read)
        began = time.monotonic()
        assert await reader.pull(1, deadline_s=0.5) == ["TIMEOUT"]
        assert time.monotonic() - began < 1.0
        assert producer.pool.stats().n_writing == 1, "the disk may still write there"
        await producer.publish(7)
        hangs.set_result(None)
        await until(lambda: producer.pool.has(chain_of(1).keys))
        assert await reader.pull(1) == ["HIT"]

    with_agents(tmp_path, "reader producer", scenario, producer=on_disk(tmp_path))


async def _wait(future: asyncio.Future) -> None:
    await asyncio.shield(future)


def test_a_page_that_failed_can_be_wanted_anew_while_its_neighbours_are_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(agent: WholeAgent) -> None:
        await agent.publish(1, 2)
        await evict(agent, 1, 2)
        store, loop = store_of(agent), asyncio.get_running_loop()
        reading, hangs = store._folder.read, {n: loop.create_future() for n in (1, 2)}
        numbers = {chain_of(n).keys: n for n in (1, 2)}

        def read(page, *arguments):
            number = numbers[page.facts.key]
            if number == 1 and is_failing:
                return ReadPage(Outcome.STALE)
            asyncio.run_coroutine_threadsafe(_wait(hangs[number]), loop).result(20)
            return reading(page, *arguments)

        monkeypatch.setattr(store._folder, "read", read)
        is_failing = True
        first = asyncio.ensure_future(own_fetch(agent, 1, 2))
        await until(lambda: store.find(chain_of(1).keys) is None)
        is_failing = False
        await agent.publish(1)
        await evict(agent, 1)
        again = asyncio.ensure_future(own_fetch(agent, 1))
        await until(lambda: store.n_reading == 2)
        hangs[2].set_result(None)
        assert await first == ["MISS", "HIT"]
        assert not again.done()
        hangs[1].set_result(None)
        assert await again == ["HIT"]

    with_agents(tmp_path, "agent", scenario, agent=on_disk(tmp_path))


def test_a_disk_that_vanishes_is_withdrawn_from_the_directory_and_publishing_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(agent: WholeAgent) -> None:
        await agent.publish(1)
        await evict(agent, 1)
        (tmp_path / "kv").rename(tmp_path / "elsewhere")
        await until(lambda: store_of(agent).condition is Condition.VANISHED)
        await until(lambda: not store_of(agent).n_pages)
        await agent.publish(3000)
        assert agent.pool.has(chain_of(3000).keys)
        assert await own_fetch(agent, 1) == ["MISS"]
        assert await tier_of(agent, 1) == []
        assert agent.agent.health() == ""
        agent.agent._observer.observe()
        assert agent.count("kvpeer_disk_condition", condition="vanished") == 1
        assert agent.count("kvpeer_disk_condition", condition="ok") == 0

    monkeypatch.setattr("kvpeer.storage.store.CHECK_S", 0.05)
    monkeypatch.setattr("kvpeer.core.disk.health.RETRY_S_MIN", 60.0)
    with_agents(tmp_path, "agent", scenario, agent=on_disk(tmp_path))


def test_a_disk_that_cannot_be_had_at_start_is_no_reason_not_to_start(tmp_path: Path) -> None:
    async def scenario(agent: WholeAgent) -> None:
        await agent.publish(1)
        assert agent.pool.has(chain_of(1).keys)
        await until(lambda: store_of(agent).condition is Condition.VANISHED)
        assert agent.agent.health() == ""

    with_agents(tmp_path, "agent", scenario, agent=on_disk(tmp_path / "nowhere"))


def test_a_namespace_known_from_the_disk_alone_gives_way_to_what_its_engines_say(tmp_path: Path) -> None:
    async def scenario(agent: WholeAgent) -> None:
        namespace = b"x" * 32
        adopted = agent.pool.adopt(namespace, PAGE_BYTES, 2)
        assert agent.pool.adopt(namespace, PAGE_BYTES, 2) is adopted
        engine = ClientHello("engine", namespace, {"model": "x"}, PAGE_BYTES, 2, 0, 0, PAGE_BYTES // 2)
        joined = agent.pool.join(engine)
        assert joined is adopted
        assert joined.description == {"model": "x"}
        other = b"y" * 32
        agent.pool.adopt(other, 2 * PAGE_BYTES, 1)
        assert agent.pool.join(replace(HELLO, namespace=other)).shape.page_bytes == PAGE_BYTES

    with_agents(tmp_path, "agent", scenario, agent=on_disk(tmp_path))
