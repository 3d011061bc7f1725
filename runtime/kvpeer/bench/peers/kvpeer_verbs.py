"""kvpeer's one-sided READs: `VerbsPeer` from a `VerbsDevice`, as between agents.

What agents say over their control channel goes over a Unix socket here, before anything is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Client, Listener
from typing import Any, NamedTuple

from kvpeer.bench.memory import EXTENT_BYTES
from kvpeer.bench.peers.kvpeer_pool import Published, published
from kvpeer.bench.peers.kvpeer_tcp import RUN_S_MAX, PeerReader, reader_id
from kvpeer.bench.peers.pages import PageMemory
from kvpeer.bench.peers.rdma import missing_rdma, rdma_address
from kvpeer.bench.peers.system import THREADS_MAX, Reader, Serving, Way
from kvpeer.model import PeerUnavailableError, Verify
from kvpeer.native import Pool, VerbsDevice, VerbsSettings
from kvpeer.transport import VerbsPeer

__all__ = ["KvPeerVerbs"]

CONTROL_S_MAX = 10.0
EXTENTS_MAX = 1024
"""More than a pool of this benchmark has."""


class _Address(NamedTuple):
    control: str
    pages: Published


@dataclass(frozen=True, slots=True)
class KvPeerVerbs:
    """See the module docstring."""

    name: str = "kvpeer.verbs"
    way: Way = Way.RDMA

    def missing(self) -> str | None:
        """See `System`."""
        return missing_rdma()

    @contextmanager
    def serve(self, memory: PageMemory) -> Iterator[Serving]:
        """See `System`."""
        with (
            published(memory) as (pool, pages),
            VerbsDevice(pool, _settings()) as device,
            Listener(family="AF_UNIX") as listener,
        ):
            yield Serving(_Address(str(listener.address), pages), lambda: _control(listener, device))

    def connect(self, serving: _Address, memory: PageMemory, number: int) -> Reader:
        """See `System`."""
        pool = Pool(EXTENT_BYTES, EXTENT_BYTES, reader_id(number))
        device = VerbsDevice(pool, _settings())
        device.register(memory.address, memory.n_pages * memory.page_bytes)
        control = _Control(serving.control, number)
        peer = VerbsPeer(
            [device],
            serving.pages.run_id,
            control,
            verify=Verify.FULL,
            connections_max=THREADS_MAX,
            idle_close_s=RUN_S_MAX,
        )
        return PeerReader(peer, serving.pages, memory)


def _settings() -> VerbsSettings:
    address = rdma_address()
    return VerbsSettings() if address is None else VerbsSettings(address.device, address.gid_index)


def _control(listener: Listener, device: VerbsDevice) -> None:
    while True:
        with listener.accept() as connection:
            kind, *arguments = connection.recv()
            if kind == "extents":
                connection.send((device.extents(arguments[0], EXTENTS_MAX), device.n_extents))
            else:
                connection.send(device.accept(*arguments))


class _Control:
    """See `ProducerControl`."""

    def __init__(self, address: str, number: int) -> None:
        self._address, self._number = address, number

    def open_queue_pair(self, reader_end: bytes, rail: int, deadline_ns: int) -> tuple[bytes, int]:
        producer_end: bytes = self._ask("open", reader_id(self._number), reader_end)
        return producer_end, 1

    def extents(self, first: int, rail: int, deadline_ns: int) -> tuple[bytes, int]:
        answer: tuple[bytes, int] = self._ask("extents", first)
        return answer

    def _ask(self, *question: object) -> Any:
        with Client(self._address) as connection:
            connection.send(question)
            if not connection.poll(CONTROL_S_MAX):
                raise PeerUnavailableError(f"the producer did not answer within {CONTROL_S_MAX:g} s")
            return connection.recv()
