"""Reads of peers are uses for the producer's eviction, and a notice of them is bounded."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from kvpeer.agent import touches
from kvpeer.agent.touches import SLOTS_MAX
from kvpeer.model import RemoteProtocolError
from kvpeer.wire.messages import Touch
from kvpeer.wire.packing import U4, pack
from link_nodes import until
from whole_agents import WholeAgent, chain_of, with_agents


def used_at(agent: WholeAgent, number: int) -> float:
    (page,) = (page for key, page in agent.pool._table._residents.by_key.items() if key == chain_of(number).keys)
    return page.used_at


def test_a_producer_hears_which_of_its_pages_were_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touches, "INTERVAL_S", 0.02)

    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(1)
        await producer.publish(2)
        await reader.finds(1)
        published_at = time.monotonic()
        assert await reader.pull(1) == ["HIT"]
        await until(lambda: used_at(producer, 1) > published_at)
        assert used_at(producer, 2) < published_at

    with_agents(tmp_path, "reader producer", scenario)


def test_a_notice_counts_each_slot_once_and_old_generations_not_at_all(tmp_path: Path) -> None:
    async def scenario(agent: WholeAgent) -> None:
        for number in (1, 2, 3):
            await agent.publish(number)
        found = agent.pool.find(chain_of(1).keys)
        other = agent.pool.find(chain_of(2).keys)
        noted: list[int] = []
        use = agent.pool.use

        def note(slots: np.ndarray, generations: np.ndarray) -> None:
            noted.append(len(slots))
            use(slots, generations)

        agent.pool.use = note  # type: ignore[method-assign]
        before = time.monotonic()
        slots = np.concatenate([np.tile(found.slots, SLOTS_MAX - 1), other.slots])
        generations = np.concatenate([np.tile(found.generations, SLOTS_MAX - 1), other.generations + np.uint32(1)])
        await agent.agent._touches._touched(agent.agent.info, Touch(pack(slots, U4), pack(generations, U4)))
        assert noted == [2]
        assert used_at(agent, 1) >= before > used_at(agent, 2)

    with_agents(tmp_path, "agent", scenario)


def test_a_notice_of_too_many_slots_breaks_the_protocol(tmp_path: Path) -> None:
    async def scenario(agent: WholeAgent) -> None:
        column = bytes(4 * (SLOTS_MAX + 1))
        with pytest.raises(RemoteProtocolError, match=f"at most {SLOTS_MAX}"):
            await agent.agent._touches._touched(agent.agent.info, Touch(column, column))

    with_agents(tmp_path, "agent", scenario)


def test_a_reader_remembers_a_bounded_number_of_slots_of_a_producer(tmp_path: Path) -> None:
    async def scenario(agent: WholeAgent) -> None:
        sent: list[Touch] = []
        parts = agent.agent._touches
        column = np.zeros(SLOTS_MAX // 2 + 1, dtype=np.uint32)
        parts._links = type("Recorder", (), {"notify": staticmethod(lambda agent_id, message: sent.append(message))})()
        for _ in range(3):
            parts.add(agent.id, column, column)
        await until(lambda: bool(sent))
        assert [len(touch.slots) for touch in sent] == [len(column) * 4]

    with_agents(tmp_path, "agent", scenario)
