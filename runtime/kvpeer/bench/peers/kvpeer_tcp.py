"""kvpeer's tcp: `TcpPeer` from a `DataServer`, as between agents."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvpeer.bench.peers.kvpeer_pool import Published, published
from kvpeer.bench.peers.pages import PageMemory
from kvpeer.bench.peers.system import READERS_MAX, THREADS_MAX, Pages, Reader, Serving, Way
from kvpeer.model import AGENT_ID_BYTES, InternalError, Outcome, Verify
from kvpeer.native import CAPABILITY_BYTES, DataServer, ServerLimits, monotonic_ns
from kvpeer.transport import FetchBatch, Producer, TcpPeer, Transport

__all__ = ["KvPeerTcp", "PeerReader", "reader_id"]

HOST = "127.0.0.1"

RUN_S_MAX = 3600
"""No run takes longer; connections are not closed for having waited for their next turn."""

LIMITS = ServerLimits(
    connections_max=64,
    pages_max=4096,
    idle_timeout_ms=RUN_S_MAX * 1000,
    io_timeout_ms=5_000,
    handshake_timeout_ms=2_000,
)
"""As agents have them by default, but for the idle time."""

FETCH_DEADLINE_NS = 10_000_000_000
"""A batch takes milliseconds; one that takes this long has failed."""


def reader_id(number: int) -> bytes:
    """Returns the id of reader number `number`."""
    return number.to_bytes(AGENT_ID_BYTES, "big")


class _Address(NamedTuple):
    port: int
    pages: Published
    capabilities: list[list[bytes]]
    """For each connection of each reader one."""


@dataclass(frozen=True, slots=True)
class KvPeerTcp:
    """See the module docstring. verify: in full is the agents' default."""

    name: str = "kvpeer.tcp"
    verify: Verify = Verify.FULL
    way: Way = Way.TCP

    def missing(self) -> str | None:
        """Nothing."""
        return None

    @contextmanager
    def serve(self, memory: PageMemory) -> Iterator[Serving]:
        """See `System`."""
        capabilities = [[os.urandom(CAPABILITY_BYTES) for _ in range(THREADS_MAX)] for _ in range(READERS_MAX)]
        expires_ns = monotonic_ns() + RUN_S_MAX * 10**9
        with published(memory) as (pool, pages), DataServer(pool, HOST, 0, LIMITS) as server:
            for number, several in enumerate(capabilities):
                for capability in several:
                    server.admit(capability, reader_id(number), expires_ns)
            yield Serving(_Address(server.port, pages, capabilities))

    def connect(self, serving: _Address, memory: PageMemory, number: int) -> Reader:
        """See `System`."""
        producer = Producer(HOST, serving.port, serving.pages.run_id, reader_id(number))
        capabilities = serving.capabilities[number]
        peer = TcpPeer(
            producer,
            lambda _: capabilities.pop(),
            verify=self.verify,
            connections_max=THREADS_MAX,
            idle_close_s=RUN_S_MAX,
        )
        return PeerReader(peer, serving.pages, memory)


class PeerReader:
    """Reads by a transport of kvpeer's."""

    def __init__(self, peer: Transport, published: Published, memory: PageMemory) -> None:
        self._peer, self._published, self._memory = peer, published, memory

    def move(self, thread: int, pages: Pages, slots: Pages) -> Callable[[], None]:
        """See `Reader`."""
        of = self._published
        batch = FetchBatch(
            slots=of.slots[pages],
            generations=of.generations[pages],
            keys=of.keys[pages].tobytes(),
            lengths=np.full(len(pages), self._memory.page_bytes, np.uint32),
            destinations=self._memory.addresses(slots),
        )

        def fetch() -> None:
            fetched = self._peer.fetch(batch, monotonic_ns() + FETCH_DEADLINE_NS)
            if (fetched.outcomes != Outcome.HIT).any():
                raise InternalError(f"a page was not fetched by {self._peer.name}: {fetched.error}")

        return fetch
