"""Messages of clients, answered by a whole agent."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from kvpeer.agent.requests import TEXT_CHARS_MAX, Client
from kvpeer.core.slots import PINS_PER_HOLDER_MAX
from kvpeer.model import CapacityError, Outcome, RemoteProtocolError
from kvpeer.wire.messages import ClientMessage, Fetch, Locate, Reserve
from whole_agents import WholeAgent, chain_of, with_agents


async def ask(agent: WholeAgent, message: ClientMessage) -> ClientMessage:
    client = Client(1, "test", agent.cohort, 0)
    return await agent.agent._clients._requests.answer(client, message, time.monotonic() + 5)


@pytest.mark.parametrize("kind", [Locate, Fetch, Reserve])
def test_a_key_that_comes_twice_in_a_request_is_refused_by_name(tmp_path: Path, kind: type) -> None:
    chain = chain_of(1, 2, 3)
    keys = chain.keys + chain.keys[16:32]
    fields = (0, keys, chain.anchors) if kind is Reserve else ("request", 0, keys, chain.anchors)

    async def scenario(agent: WholeAgent) -> None:
        with pytest.raises(RemoteProtocolError, match=f"keys: .*{chain.keys[16:32].hex()}"):
            await ask(agent, kind(*fields))

    with_agents(tmp_path, "agent", scenario)


def test_a_client_that_releases_nothing_is_refused_before_it_pins_the_whole_pool(tmp_path: Path) -> None:
    async def scenario(agent: WholeAgent) -> None:
        await agent.publish(1, 2)
        chain = chain_of(1, 2)
        fetch = Fetch("request", 0, chain.keys, chain.anchors)
        pins = [(await ask(agent, fetch)).pin for _ in range(PINS_PER_HOLDER_MAX)]
        with pytest.raises(CapacityError, match="not released"):
            await ask(agent, fetch)
        agent.pool.release(1, pins[0])
        assert (await ask(agent, fetch)).pin

    with_agents(tmp_path, "agent", scenario)


def test_what_is_kept_of_a_request_id_has_a_limit_and_the_id_works_all_the_same(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(1)
        await reader.finds(1)
        chain = chain_of(1)
        request = "r" * 1_000_000
        located = await ask(reader, Locate(request, 0, chain.keys, chain.anchors))
        assert located.statuses == bytes([2])
        assert max(map(len, reader.locator.recent._by_request)) <= TEXT_CHARS_MAX
        assert (await ask(reader, Fetch(request, 0, chain.keys, chain.anchors))).outcomes == bytes([Outcome.HIT])
        assert reader.count("kvpeer_fetch_pages_total", outcome="hit", transport="tcp") == 1

    with_agents(tmp_path, "reader producer", scenario)


def test_each_fetched_page_is_counted_once_by_what_the_engine_got(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(1, 2)
        await reader.finds(1, 2)
        chain = chain_of(1, 2, 3)
        for _ in range(2):
            await ask(reader, Fetch("", 0, chain.keys, chain.anchors))
        counted = {
            (outcome, transport): reader.count("kvpeer_fetch_pages_total", outcome=outcome, transport=transport)
            for outcome, transport in (("hit", "tcp"), ("hit", "shm"), ("miss", "tcp"))
        }
        assert counted == {("hit", "tcp"): 2, ("hit", "shm"): 2, ("miss", "tcp"): 2}

    with_agents(tmp_path, "reader producer", scenario)


def test_an_offer_counts_the_pages_of_the_own_pool_between_those_of_a_producer(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await reader.publish(1, 3)
        await producer.publish(1, 2, 3, 4)
        await reader.finds(1, 2, 3, 4)
        chain = chain_of(1, 2, 3, 4, 5)
        located = await ask(reader, Locate("request", 0, chain.keys, chain.anchors))
        assert located.statuses == bytes([1, 2, 1, 2, 0])
        assert located.producers == producer.id
        assert (located.reaches, located.in_flight) == ((4).to_bytes(4, "little"), bytes(4))

    with_agents(tmp_path, "reader producer", scenario)


def test_a_source_that_is_no_agent_id_is_refused_by_name(tmp_path: Path) -> None:
    async def scenario(agent: WholeAgent) -> None:
        chain = chain_of(1)
        with pytest.raises(RemoteProtocolError, match="source: 3 bytes"):
            await ask(agent, Fetch("request", 0, chain.keys, chain.anchors, b"who"))

    with_agents(tmp_path, "agent", scenario)
