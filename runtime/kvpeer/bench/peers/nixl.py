"""NIXL with its UCX backend over tcp.

Its progress thread, which is on by default, spins on a core; without it, the same transfers are two to three times
as fast where cores are few. So it is off, and the server's process drives progress in a loop, as NIXL then asks of it.
The bindings are used directly: what `nixl` has above them needs torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvpeer.bench.peers.pages import PageMemory
from kvpeer.bench.peers.system import Pages, Reader, Serving, Way, missing_package
from kvpeer.model import InternalError
from kvpeer.native import monotonic_ns

__all__ = ["Nixl"]

MODULE = "nixl_cu12"

READ_DEADLINE_NS = 10_000_000_000
"""A batch takes milliseconds; one that takes this long has failed."""


class _Address(NamedTuple):
    metadata: bytes
    base: int


@dataclass(frozen=True, slots=True)
class Nixl:
    """See the module docstring."""

    name: str = "nixl.tcp"
    way: Way = Way.TCP

    def missing(self) -> str | None:
        """See `System`."""
        return missing_package(MODULE, "nixl-cu12")

    @contextmanager
    def serve(self, memory: PageMemory) -> Iterator[Serving]:
        """See `System`."""
        _, agent = _agent("server", memory)

        def attend() -> None:
            while True:
                agent.getNotifs({}, [])

        yield Serving(_Address(agent.getLocalMD(), memory.address), attend)

    def connect(self, serving: _Address, memory: PageMemory, number: int) -> Reader:
        """See `System`."""
        bindings, agent = _agent(f"reader{number}", memory)
        return _Reader(bindings, agent, agent.loadRemoteMD(serving.metadata).decode(), serving.base, memory)


def _agent(name: str, memory: PageMemory) -> tuple[Any, Any]:
    os.environ["UCX_TLS"] = "tcp,self"
    from nixl_cu12 import _bindings as bindings

    config = bindings.nixlAgentConfig()
    config.useProgThread = False
    config.useListenThread = False
    config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
    agent = bindings.nixlAgent(name, config)
    backend = agent.createBackend("UCX", {})
    region = (memory.address, memory.n_pages * memory.page_bytes, 0, "")
    agent.registerMem(bindings.nixlRegDList(bindings.DRAM_SEG, [region]), [backend])
    return bindings, agent


class _Reader:
    def __init__(self, bindings: Any, agent: Any, server: str, base: int, memory: PageMemory) -> None:
        self._bindings, self._agent, self._server, self._base, self._memory = bindings, agent, server, base, memory

    def move(self, thread: int, pages: Pages, slots: Pages) -> Callable[[], None]:
        page_bytes = self._memory.page_bytes
        to = self._descriptors(self._memory.addresses(slots))
        source = self._descriptors((self._base + pages * page_bytes).astype(np.uint64))

        def read() -> None:
            agent, bindings = self._agent, self._bindings
            request = agent.createXferReq(bindings.NIXL_READ, to, source, self._server)
            status, deadline_ns = agent.postXferReq(request), monotonic_ns() + READ_DEADLINE_NS
            while status == bindings.NIXL_IN_PROG and monotonic_ns() < deadline_ns:
                status = agent.getXferStatus(request)
            if status != bindings.NIXL_SUCCESS:
                raise InternalError(f"NIXL read no batch: {status}")
            agent.releaseXferReq(request)

        return read

    def _descriptors(self, addresses: Any) -> Any:
        rows = np.zeros((len(addresses), 3), np.uint64)
        rows[:, 0], rows[:, 1] = addresses, self._memory.page_bytes
        return self._bindings.nixlXferDList(self._bindings.DRAM_SEG, rows)
