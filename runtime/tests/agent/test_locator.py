"""What a locate promises: pages that a pull would ask for now, and why the others are missing."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from kvpeer.core.reasons import MissReason
from kvpeer.model import HOLDER_DTYPE
from whole_agents import WholeAgent, chain_of, with_agents


def location_of(reader: WholeAgent, producer: WholeAgent, number: int) -> np.ndarray:
    found = producer.pool.find(chain_of(number).keys)
    return np.array([(0, found.slots[0], found.generations[0], producer.cohort.shape.page_bytes, 2)], HOLDER_DTYPE)


def test_pages_at_a_peer_are_found_and_the_first_miss_has_its_reason(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(1, 2)
        await reader.finds(1, 2)
        assert await reader.locate(1, 2, 3) == ([2, 2, 0], MissReason.MISS.value)

    with_agents(tmp_path, "reader producer", scenario)


def test_pages_of_a_producer_that_fails_are_not_promised(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(1, 2)
        await reader.finds(1, 2)
        for _ in range(3):
            reader.agent._fetches.failed(producer.id, time.monotonic())
        assert await reader.locate(1, 2) == ([0, 0], MissReason.NO_HOLDER.value)
        assert reader.count("kvpeer_locate_misses_total", reason="no_holder") == 2
        assert await reader.pull(1, 2) == ["MISS"] * 2, "the pull sees it the same way"
        reader.agent._fetches.succeeded(producer.id)
        assert await reader.locate(1, 2) == ([2, 2], "")

    with_agents(tmp_path, "reader producer", scenario)


def test_a_location_that_just_failed_is_not_promised_and_its_neighbours_are(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(1, 2, 3)
        await reader.finds(1, 2, 3)
        failed = location_of(reader, producer, 2)
        reader.locator._producers.negative.add_locations(chain_of(2).keys, failed, producer.id, time.monotonic())
        assert await reader.locate(1, 2, 3, 4) == ([2, 0, 2, 0], MissReason.NO_HOLDER.value)

    with_agents(tmp_path, "reader producer", scenario)


def test_a_miss_before_the_lost_page_keeps_its_reason(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(5, 1)
        await reader.finds(5, 1)
        gone = producer.pool.find(chain_of(5).keys)
        producer.pool.quarantine(gone.slots, gone.generations)
        await producer.agent._directory.flush(time.monotonic() + 5)
        for _ in range(3):
            reader.agent._fetches.failed(producer.id, time.monotonic())
        assert await reader.locate(5, 1) == ([0, 0], MissReason.MISS.value)
        assert reader.count("kvpeer_locate_misses_total", reason="no_holder") == 1

    with_agents(tmp_path, "reader producer", scenario)
