"""PeerCache's transport alone, without its directory: locations are known, as they are for the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvpeer.bench.peers.pages import PageMemory
from kvpeer.bench.peers.rdma import RdmaAddress, missing_rdma, rdma_address
from kvpeer.bench.peers.system import Pages, Reader, Serving, Way, missing_package
from kvpeer.model import InternalError

__all__ = ["PeerCache"]

LOOPBACK = RdmaAddress("", 0, "127.0.0.1")
"""By tcp."""

NODE = "server"


class _Address(NamedTuple):
    base: int
    endpoints: list[str]
    rkeys: list[int]


@dataclass(frozen=True, slots=True)
class PeerCache:
    """See the module docstring. way: TCP or RDMA."""

    way: Way = Way.TCP

    @property
    def name(self) -> str:
        """See `System`."""
        return f"peercache.{self.way.value}"

    def missing(self) -> str | None:
        """See `System`."""
        return missing_package("peercache", "peercache") or (missing_rdma() if self.way is Way.RDMA else None)

    @contextmanager
    def serve(self, memory: PageMemory) -> Iterator[Serving]:
        """See `System`."""
        transport, registered = self._transport(memory)
        yield Serving(_Address(memory.address, transport.local_endpoints(), list(registered.rkeys)))

    def connect(self, serving: _Address, memory: PageMemory, number: int) -> Reader:
        """See `System`."""
        return _Reader(self._transport(memory)[0], serving, memory)

    def _transport(self, memory: PageMemory) -> tuple[Any, Any]:
        from peercache.config import PeerCacheConfig
        from peercache.transport import RdmaTransport, TcpTransport

        at = (rdma_address() if self.way is Way.RDMA else None) or LOOPBACK
        config = PeerCacheConfig(
            discovery_addr=f"{at.host}:0",
            protocol=self.way.value,
            device_name=at.device,
            gid_index=at.gid_index,
            local_hostname=at.host,
            rdma_bind_host=at.host,
        )
        # By class and not by its own choice, which falls back to tcp without an error.
        transport = RdmaTransport(config) if self.way is Way.RDMA else TcpTransport(config)
        return transport, transport.register_mr(memory.address, memory.n_pages * memory.page_bytes)


class _Reader:
    def __init__(self, transport: Any, address: _Address, memory: PageMemory) -> None:
        self._transport, self._address, self._memory = transport, address, memory

    def move(self, thread: int, pages: Pages, slots: Pages) -> Callable[[], None]:
        page_bytes = self._memory.page_bytes
        arguments = (
            [NODE] * len(pages),
            self._memory.addresses(slots).tolist(),
            (self._address.base + pages * page_bytes).tolist(),
            [page_bytes] * len(pages),
            {NODE: self._address.endpoints},
            {NODE: self._address.rkeys},
        )

        def read() -> None:
            if not all(self._transport.batch_read_multi(*arguments)):
                raise InternalError("PeerCache did not read a page")

        return read
