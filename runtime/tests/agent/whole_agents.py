"""Whole agents on the loop of a test: real pools, data servers and control channels, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
from kvpeer.agent.config import load
from kvpeer.agent.main import Agent
from kvpeer.core.chain import Chain, ChainSlice, namespace_digest
from kvpeer.core.slot_effects import ReserveStatus
from kvpeer.model import AgentId, Outcome
from kvpeer.native import DataServer, crc64
from kvpeer.wire.messages import ClientHello
from link_nodes import DEADLINE_S, HOST, until

PAGE_BYTES = 16 << 10
NAMESPACE = namespace_digest({"n": "whole agents"})
SETTINGS = {
    "agent.host": HOST,
    "pool.size": "4Mi",
    "pool.extent_size": "1Mi",
    "metrics.enabled": "false",
    "directory.virtual_nodes": "16",
    "directory.anti_entropy_interval": "200ms",
    "directory.partition_records_max": "64",
}
DISK = {"disk.size": "4Mi", "disk.segment_size": "2Mi"}
"""Of an agent with `disk.path`: it takes some 200 pages."""

HELLO = ClientHello("test", NAMESPACE, {}, PAGE_BYTES, 1, 0, 0, PAGE_BYTES)
WRITER = 1


def chain_of(*numbers: int) -> ChainSlice:
    """A slice whose pages are these numbers."""
    chain = Chain(NAMESPACE)
    chain.extend(number.to_bytes(8, "big") for number in numbers)
    return chain.slice(0, len(numbers))


def content(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, PAGE_BYTES, dtype=np.uint8)


class SilentAgent(Agent):
    """Its data port takes connections and never says a word; all else is as it should be."""

    def _build_server(self) -> DataServer:
        server = super()._build_server()
        self._listener = socket.create_server((HOST, 0))
        self._closing.callback(self._listener.close)
        server.port = self._listener.getsockname()[1]
        return server


class WholeAgent:
    """One agent and a client of it that needs no socket. Its parts, by names that tests use."""

    def __init__(self, folder: Path, name: str, settings: dict[str, str]) -> None:
        kind = SilentAgent if name.startswith("silent") else Agent
        chosen = {
            **SETTINGS, "agent.name": name, "agent.runtime_dir": str(folder / "run"),
            "agent.socket": str(folder / f"{name}.sock"), **settings,
        }  # fmt: skip
        config = load(None, {"KVPEER_" + key.replace(".", "_").upper(): value for key, value in chosen.items()})
        self.agent = kind(config)
        self.id: AgentId = self.agent.agent_id
        self.pool = self.agent._pool_service
        self.puller = self.agent._puller
        self.locator = self.agent._locator
        self.cohort = self.pool.join(HELLO)

    def count(self, metric: str, **labels: str) -> float:
        """One series of this agent's metrics, 0 where there is none."""
        return self.agent._registry.get_sample_value(metric, labels) or 0.0

    @property
    def n_members(self) -> int:
        return len(self.agent._view.alive)

    async def publish(self, *numbers: int) -> None:
        """Puts these pages, one chain, into the pool and the directory. They are found as parts of this chain only: its
        anchors say who owns their records."""
        await self.publish_chain(chain_of(*numbers), *numbers)

    async def publish_chain(self, chain: ChainSlice, *numbers: int) -> None:
        """The same for a chain of the cohort, whose pages have the content of these numbers, or of any."""
        reservation = await self.pool.reserve(WRITER, self.cohort, 0, chain, time.monotonic() + 5)
        assert (reservation.statuses == ReserveStatus.WRITE).all()
        payload = self.agent._pool.payload_view()
        pages = [content(number) for number in numbers or range(len(chain))]
        for page, offset in zip(pages, reservation.offsets.tolist(), strict=True):
            payload[offset : offset + PAGE_BYTES] = page
        checksums = np.array([crc64(page) for page in pages], dtype=np.uint64)
        self.pool.commit(WRITER, self.cohort, 0, reservation.slots, reservation.generations, checksums)
        await self.agent._directory.flush(time.monotonic() + 5)

    async def locate(self, *numbers: int, request: str = "", deadline_s: float = 5.0) -> tuple[list[int], str]:
        """Statuses and reason, as the agent answers them to engines; none of the pages is in the own pool."""
        deadline = time.monotonic() + deadline_s
        found = await self.locator.locate(chain_of(*numbers), np.arange(len(numbers)), request, deadline)
        return found.statuses.tolist(), found.reason

    async def finds(self, *numbers: int) -> None:
        """Returns when this agent finds all these pages at peers: owners that are new answer so only once repaired."""

        async def ask() -> None:
            while (await self.locate(*numbers))[0] != [2] * len(numbers):
                await asyncio.sleep(0.01)

        await asyncio.wait_for(ask(), DEADLINE_S)

    async def pull(self, *numbers: int, request: str = "", deadline_s: float = 5.0) -> list[str]:
        """The outcome of each page; one that hit and has other bytes than were published is WRONG."""
        chain, deadline = chain_of(*numbers), time.monotonic() + deadline_s
        outcomes = await self.puller.pull(self.cohort, chain, np.arange(len(numbers)), request, deadline)
        found = self.pool.find(chain.keys)
        payload = self.agent._pool.payload_view()
        names = [Outcome(outcome).name for outcome in outcomes.tolist()]
        for place, number in enumerate(numbers):
            offset = int(found.offsets[place])
            is_right = np.array_equal(payload[offset : offset + PAGE_BYTES], content(number))
            if names[place] == "HIT" and found.resident[place] and not is_right:
                names[place] = "WRONG"
        return names


@contextlib.asynccontextmanager
async def whole_agents(folder: Path, *names: str, **settings: dict[str, str]) -> AsyncIterator[list[WholeAgent]]:
    """Agents that serve and know each other; those whose name begins with "silent" are. `settings`: by name."""
    (folder / "run").mkdir(mode=0o700, exist_ok=True)
    made: list[WholeAgent] = []
    try:
        for name in names:
            made.append(WholeAgent(folder, name, settings.get(name, {})))
            await made[-1].agent.start()
            await made[-1].pool.ready()
        for each in made:
            await until(lambda each=each: each.n_members == len(names))
        yield made
    finally:
        for each in made:
            await each.agent.close()


def run(main: Coroutine[Any, Any, None]) -> None:
    """Runs a test's body, with a deadline."""
    asyncio.run(asyncio.wait_for(main, 40))


def with_agents(
    folder: Path, names: str, scenario: Callable[..., Coroutine[Any, Any, None]], **settings: dict[str, str]
) -> None:
    """Runs a scenario with agents of these names."""

    async def body() -> None:
        async with whole_agents(folder, *names.split(), **settings) as made:
            await scenario(*made)

    run(body())
