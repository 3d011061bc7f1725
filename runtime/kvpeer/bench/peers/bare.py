"""What nothing can be faster than: memcpy out of shared memory, and a bare loop of readv and writev over loopback tcp.

The loop's writing end is a thread of the reader's process, which has the server's memory mapped: no system is under it
but the kernel's sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvpeer.bench import reference
from kvpeer.bench.peers.pages import PageMemory, Place
from kvpeer.bench.peers.system import THREADS_MAX, Pages, Reader, Serving, Way

__all__ = ["Bare", "memcpy", "sockets"]


@dataclass(frozen=True, slots=True)
class Bare:
    """See the module docstring; made by `memcpy` and `sockets`. reader: of the server's memory into its own."""

    name: str
    way: Way
    reader: Callable[[PageMemory, PageMemory], Reader]

    def missing(self) -> str | None:
        """Nothing: it is there on every machine."""
        return None

    @contextmanager
    def serve(self, memory: PageMemory) -> Iterator[Serving]:
        """See `System`."""
        yield Serving(memory.place)

    def connect(self, serving: Place, memory: PageMemory, number: int) -> Reader:
        """See `System`."""
        return self.reader(PageMemory(memory.page_bytes, serving.open()), memory)


def memcpy() -> Bare:
    """Copies out of shared memory."""
    return Bare("memcpy", Way.MEMORY, _Copying)


def sockets() -> Bare:
    """The bare loop."""
    return Bare("sockets", Way.TCP, _Looping)


class _Copying:
    def __init__(self, source: PageMemory, memory: PageMemory) -> None:
        self._source, self._memory = source, memory

    def move(self, thread: int, pages: Pages, slots: Pages) -> Callable[[], None]:
        to, source = self._memory.addresses(slots)[:, None], self._source.addresses(pages)[:, None]
        return lambda: reference.copy(to, source, self._memory.page_bytes)


class _Looping:
    def __init__(self, source: PageMemory, memory: PageMemory) -> None:
        self._source, self._memory = source, memory
        self._loopbacks = [reference.Loopback() for _ in range(THREADS_MAX)]

    def move(self, thread: int, pages: Pages, slots: Pages) -> Callable[[], None]:
        to, source = self._memory.addresses(slots), self._source.addresses(pages)
        return lambda: self._loopbacks[thread].fetch(to, source, self._memory.page_bytes)
