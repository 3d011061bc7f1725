"""What the benchmark needs of a system: a process that serves pages, and processes that read batches of them."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpeer.bench.peers.pages import PageMemory
from kvpeer.model import KvPeerError

__all__ = [
    "READERS_MAX",
    "THREADS_MAX",
    "Pages",
    "Reader",
    "Serving",
    "System",
    "Way",
    "missing_package",
]

READERS_MAX = 4
"""Processes that read from one that serves."""

THREADS_MAX = 4
"""Threads that read in one process."""

Pages: TypeAlias = npt.NDArray[np.int64]
"""Numbers of pages in a `PageMemory`."""


class SystemFailedError(KvPeerError):
    """A system did not start, did not answer, or brought other bytes than it was asked for."""

    def __init__(self, system: str, reason: str) -> None:
        super().__init__(f"{system}: {reason}")
        self.system = system
        self.reason = reason


class Way(Enum):
    """What the bytes pass through. Only systems of one way are held against each other."""

    MEMORY = "shared memory"
    TCP = "tcp"
    RDMA = "rdma"


def _rest() -> None:
    """Never returns: the process is killed. For servers whose own threads serve."""
    while True:
        signal.pause()


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that is up. address: what a reader must know, picklable. attend: serves, and never returns."""

    address: Any
    attend: Callable[[], None] = _rest


class Reader(Protocol):
    """A reader's connection to the server. `move` may be called by THREADS_MAX threads at a time."""

    def move(self, thread: int, pages: Pages, slots: Pages) -> Callable[[], None]:
        """Prepares the reading of these pages of the server into these slots of the reader's memory by thread number
        `thread`: the call that it returns is what is timed, and when that returns, the bytes are there.

        The call raises:
            InternalError: a page was not read.
        """


class System(Protocol):
    """One system by one way. Its instances are sent to processes, so they are picklable and hold settings alone."""

    @property
    def name(self) -> str:
        """In rows: lower case, dotted."""

    @property
    def way(self) -> Way:
        """See `Way`."""

    def missing(self) -> str | None:
        """Returns why it cannot run here, as far as that can be told without trying; None if nothing is known."""

    def serve(self, memory: PageMemory) -> AbstractContextManager[Serving]:
        """Serves all pages of the memory, which is filled, until the context ends. Called once in a process of its own;
        raises what it likes."""

    def connect(self, serving: Any, memory: PageMemory, number: int) -> Reader:
        """Connects reader number `number` to the `Serving.address`. The memory is what it reads into. Called once in a
        process of its own; raises what it likes."""


def missing_package(module: str, package: str) -> str | None:
    """Returns why a system cannot run whose Python module is not installed."""
    if importlib.util.find_spec(module) is not None:
        return None
    return f"{package} is not installed: `make bench-peers` installs it"
