"""kvpeer within one host: pages of a pool, copied and verified by a client, as `Client.fetch` does it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from kvpeer.bench.peers.kvpeer_pool import Published, layout_of, published
from kvpeer.bench.peers.pages import PageMemory, Place
from kvpeer.bench.peers.system import Pages, Reader, Serving, Way
from kvpeer.model import InternalError, Outcome, Verify
from kvpeer.native import PoolMap

__all__ = ["KvPeerShm"]


class _Address(NamedTuple):
    payload: Place
    headers: Place
    extent_bytes: int
    pages: Published


@dataclass(frozen=True, slots=True)
class KvPeerShm:
    """See the module docstring. With the agents' default way to verify, which is in full."""

    name: str = "kvpeer.shm"
    way: Way = Way.MEMORY

    def missing(self) -> str | None:
        """Nothing."""
        return None

    @contextmanager
    def serve(self, memory: PageMemory) -> Iterator[Serving]:
        """See `System`."""
        with published(memory) as (pool, pages):
            payload, headers = (Place(os.getpid(), fd) for fd in pool.fds)
            yield Serving(_Address(payload, headers, pool.extent_bytes, pages))

    def connect(self, serving: _Address, memory: PageMemory, number: int) -> Reader:
        """See `System`."""
        return _Reader(serving, memory)


class _Reader:
    def __init__(self, address: _Address, memory: PageMemory) -> None:
        self._published = address.pages
        fds = [address.payload.open(), address.headers.open()]
        self._map = PoolMap(fds[0], fds[1], address.extent_bytes, address.pages.run_id)
        for fd in fds:
            os.close(fd)
        self._map.payload_view()[:: os.sysconf("SC_PAGE_SIZE")].sum()  # maps all of it, as the other memories are
        self._layout = layout_of(memory)

    def move(self, thread: int, pages: Pages, slots: Pages) -> Callable[[], None]:
        of = self._published
        columns = of.slots[pages], of.generations[pages], of.offsets[pages], of.keys[pages].tobytes()

        def scatter() -> None:
            if (self._map.scatter(*columns, 0, self._layout, slots, Verify.FULL) != Outcome.HIT).any():
                raise InternalError("a page was not read by shared memory")

        return scatter
