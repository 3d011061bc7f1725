"""Mooncake's transfer engine: addresses of the server's memory, read in batches. Peers find each other by a handshake
of its own (P2PHANDSHAKE), so that it needs no metadata server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvpeer.bench.peers.pages import PageMemory
from kvpeer.bench.peers.rdma import RdmaAddress, missing_rdma, rdma_address
from kvpeer.bench.peers.system import Pages, Reader, Serving, Way, missing_package
from kvpeer.model import InternalError

__all__ = ["Mooncake"]

LOOPBACK = RdmaAddress("", 0, "127.0.0.1")
"""By tcp."""


class _Address(NamedTuple):
    segment: str
    base: int


@dataclass(frozen=True, slots=True)
class Mooncake:
    """See the module docstring. way: TCP or RDMA."""

    way: Way = Way.TCP

    @property
    def name(self) -> str:
        """See `System`."""
        return f"mooncake.{self.way.value}"

    def missing(self) -> str | None:
        """See `System`."""
        absent = missing_package("mooncake", "mooncake-transfer-engine-non-cuda")
        return absent or (missing_rdma() if self.way is Way.RDMA else None)

    @contextmanager
    def serve(self, memory: PageMemory) -> Iterator[Serving]:
        """See `System`."""
        engine, host = self._engine(memory)
        yield Serving(_Address(f"{host}:{engine.get_rpc_port()}", memory.address))

    def connect(self, serving: _Address, memory: PageMemory, number: int) -> Reader:
        """See `System`."""
        return _Reader(self._engine(memory)[0], serving, memory)

    def _engine(self, memory: PageMemory) -> tuple[Any, str]:
        at = (rdma_address() if self.way is Way.RDMA else None) or LOOPBACK
        os.environ["MC_GID_INDEX"] = str(at.gid_index)
        from mooncake.engine import TransferEngine

        engine = TransferEngine()
        if engine.initialize(at.host, "P2PHANDSHAKE", self.way.value, at.device) != 0:
            raise InternalError(f"Mooncake's engine does not start by {self.way.value}")
        if engine.register_memory(memory.address, memory.n_pages * memory.page_bytes) != 0:
            raise InternalError("Mooncake's engine does not take the memory")
        return engine, at.host


class _Reader:
    def __init__(self, engine: Any, address: _Address, memory: PageMemory) -> None:
        self._engine, self._address, self._memory = engine, address, memory

    def move(self, thread: int, pages: Pages, slots: Pages) -> Callable[[], None]:
        page_bytes = self._memory.page_bytes
        buffers = self._memory.addresses(slots).tolist()
        sources = (self._address.base + pages * page_bytes).tolist()
        lengths = [page_bytes] * len(pages)

        def read() -> None:
            status = self._engine.batch_transfer_sync_read(self._address.segment, buffers, sources, lengths)
            if status != 0:
                raise InternalError(f"Mooncake read no batch: status {status}")

        return read
