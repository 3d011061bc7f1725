"""Two doctors read pages from each other: the whole path that agents use between two hosts, and its speed.

A doctor is the part of an agent that moves pages: control channel with the cluster's certificates, data server,
`DataPeers`; without directory and membership. Agents and doctors refuse each other: whoever an agent has a link with is
a member to it, and would be given a share of the directory. What `DataPeers` can do, the
canary does: a new transport needs nothing here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import statistics
import time
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from prometheus_client import CollectorRegistry

from kvpeer.agent.config import AgentConfig
from kvpeer.agent.config.parts import link_settings, server_limits
from kvpeer.agent.data_peers import DataAdmissions, DataPeers
from kvpeer.agent.links import LinkEnd, PeerLinks
from kvpeer.agent.security import open_security
from kvpeer.core.extents import SLOTS_PER_EXTENT
from kvpeer.core.ring import Ring
from kvpeer.core.view import ClusterView
from kvpeer.metrics import build
from kvpeer.model import AGENT_ID_BYTES, AgentId, KvPeerError, Outcome, PeerUnavailableError, Verify
from kvpeer.native import PART_DTYPE, DataServer, Pool, crc64
from kvpeer.transport import FetchBatch
from kvpeer.wire.messages import ERROR_CHARACTERS_MAX, AgentInfo, Canary, CanaryRead, PeerMessage

__all__ = ["CanaryResult", "Doctor"]

SMALL_BYTES = 4096
"""Reading it is a round trip and little else."""

LARGE_BYTES = 8 << 20
"""As much as a transport asks for at a time: its rate is the path's."""

SMALL_READS = 101
LARGE_READS = 17
"""The first of each opens the connection, and is not counted."""

READ_DEADLINE_S = 5.0
"""For one page: 8 MiB at 14 Mbit/s."""

CANARY_DEADLINE_S = 60.0
"""For one way; a read that fails ends it, so only a path that is very slow comes near."""

CLOSE_S = 2.0

_GENERATION = 1
_SIZES = (SMALL_BYTES, LARGE_BYTES)


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """One way: median time of reading a small page, median rate of reading a large one; or why there is none."""

    transport: str
    latency_s: float
    rate_bytes_per_s: float
    error: str = ""


class Doctor:
    """One end. Belongs to one event loop. Life: construct, `start`, `examine` or wait for others to, `close`."""

    def __init__(self, config: AgentConfig, control_port: int) -> None:
        """Listens; control_port 0: any free port.

        Raises:
            ConfigError: an address, a port or a secret cannot be had.
        """
        agent = config.agent
        self.id = AgentId(os.urandom(AGENT_ID_BYTES))
        metrics = build(CollectorRegistry())
        security = dataclasses.replace(open_security(config, self.id), role="doctor")
        settings = link_settings(config.limits)
        rng = random.Random()  # noqa: S311 - schedules dials
        self._links = PeerLinks(agent.host, control_port, security, metrics, settings, rng)
        self._pool = _pool_with_pages(self.id)
        self._server = DataServer(self._pool, agent.host, 0, server_limits(config.transport))
        self.info = AgentInfo(self.id, agent.name, agent.advertise_host, self._links.control_port, self._server.port)
        self._known: dict[AgentId, AgentInfo] = {self.id: self.info}
        self._view = ClusterView(self.info, lambda members: Ring.build(list(members)))
        self._admissions = DataAdmissions(self._server, self._view)
        self._peers = DataPeers(self.id, self._view, self._links, Verify.FULL, config.transport)
        self._places = asyncio.Semaphore(1)  # one canary at a time, or they would measure each other

    def start(self) -> None:
        """Begins to serve others."""
        self._links.start(self.info, {**self._admissions.handlers(), Canary: self._read_for}, self)

    async def examine(self, host: str, port: int) -> tuple[AgentInfo, CanaryResult, CanaryResult]:
        """Who is there, what reading from there gives, and what reading from here gives them.

        Raises:
            PeerUnavailableError: nobody is there, or it is no doctor.
        """
        welcome = await self._links.join(host, port, READ_DEADLINE_S)
        there = AgentId(welcome.info.agent_id)
        from_here = await self._links.request(there, Canary(), 2 * CANARY_DEADLINE_S)
        if not isinstance(from_here, CanaryRead):
            raise PeerUnavailableError(f"{host}:{port} answered Canary with {type(from_here).__name__}")
        to_them = CanaryResult(
            from_here.transport, from_here.latency_ns / 1e9, from_here.rate_bytes_per_s, from_here.error
        )
        return welcome.info, await self.read(there), to_them

    async def read(self, producer: AgentId) -> CanaryResult:
        """Reads the other doctor's pages."""
        loop = asyncio.get_running_loop()
        async with self._places:
            try:
                latency_s = await loop.run_in_executor(None, self._median_s, producer, 0, SMALL_READS)
                large_s = await loop.run_in_executor(None, self._median_s, producer, 1, LARGE_READS)
            except KvPeerError as error:
                return CanaryResult(self._peers.transport, 0, 0, str(error))
        return CanaryResult(self._peers.transport, latency_s, LARGE_BYTES / large_s)

    async def close(self) -> None:
        """Ends all connections."""
        await self._links.close(CLOSE_S)
        self._peers.close()
        await asyncio.get_running_loop().run_in_executor(None, self._server.close)
        self._pool.close()

    async def _read_for(self, peer: AgentInfo, message: PeerMessage) -> PeerMessage:
        result = await self.read(AgentId(peer.agent_id))
        return CanaryRead(
            result.transport,
            round(result.latency_s * 1e9),
            round(result.rate_bytes_per_s),
            result.error[:ERROR_CHARACTERS_MAX],
        )

    def _median_s(self, producer: AgentId, page: int, n_reads: int) -> float:
        """On a thread: the median time of reading this page. Raises KvPeerError if a read fails."""
        destination = np.empty(_SIZES[page], np.uint8)
        batch = _batch(page, destination)
        ends_at = time.monotonic() + CANARY_DEADLINE_S / 2
        times_s: list[float] = []
        for _ in range(n_reads):
            began_at = time.monotonic()
            result = self._peers.fetch(producer, batch, began_at + READ_DEADLINE_S)
            times_s.append(time.monotonic() - began_at)
            if result.outcomes[0] != Outcome.HIT:
                outcome = Outcome(int(result.outcomes[0])).name.lower()
                raise PeerUnavailableError(
                    f"reading {_SIZES[page]} bytes: {outcome}: {result.error or 'no reason given'}"
                )
            if began_at > ends_at:
                break
        return statistics.median(times_s[1:] or times_s)

    # ---- what the links tell (LinkEvents)

    def members(self) -> Collection[AgentInfo]:
        """See LinkEvents: a doctor introduces nobody."""
        return [self.info]

    def link_up(self, info: AgentInfo) -> None:
        """See LinkEvents."""
        self._known[AgentId(info.agent_id)] = info
        self._view.update(self._known.values(), (), time.monotonic())

    def link_down(self, agent_id: AgentId, end: LinkEnd) -> None:
        """See LinkEvents."""
        self._known.pop(agent_id, None)
        self._view.update(self._known.values(), (), time.monotonic())
        self._peers.forget(agent_id)
        self._server.revoke(agent_id)

    def unreachable(self, agent_id: AgentId, reason: str) -> None:
        """See LinkEvents."""


def _pool_with_pages(run_id: AgentId) -> Pool:
    """A pool of two extents, with one page in each."""
    pool = Pool(2 * LARGE_BYTES, LARGE_BYTES, run_id)
    payload = pool.payload_view()
    for page, n_bytes in enumerate(_SIZES):
        pool.touch_extent(page)
        pool.assign_extent(page, n_bytes)
        start = page * LARGE_BYTES
        payload[start : start + n_bytes] = np.resize(np.arange(251, dtype=np.uint8), n_bytes)
        slots, generations = _slot(page), np.full(1, _GENERATION, np.uint32)
        parts = np.array([[(0, n_bytes, crc64(payload[start : start + n_bytes]))]], PART_DTYPE)
        pool.mark_writing(slots, generations)
        pool.mark_committed(slots, generations, _key(page), parts)
    return pool


def _batch(page: int, destination: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> FetchBatch:
    return FetchBatch(
        _slot(page),
        np.full(1, _GENERATION, np.uint32),
        _key(page),
        np.full(1, _SIZES[page], np.uint32),
        np.full(1, destination.ctypes.data, np.uint64),
    )


def _slot(page: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.full(1, page * SLOTS_PER_EXTENT, np.uint32)


def _key(page: int) -> bytes:
    return b"kvpeer canary %02d" % page
