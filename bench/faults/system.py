"""What a fault needs of a system under test: nodes that start, share pages, freeze, die and come back.

A node is what serves one rank of an engine: the engine process with the storage object in it, and whatever process the
system has beside it. All of them are real processes on this host.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.protocol import Backend, Identity, serve

__all__ = ["BlockedError", "DiedError", "EngineProcess", "Footprint", "Node", "Shape", "System", "eventually"]

START_S_MAX = 120.0
"""For a fork of a process that has imported SGLang already, or for the import itself, on a busy machine."""

ANSWER_S_MAX = 60.0
"""For calls that no fault is about; a system that does not answer by then fails the try."""

SETTLE_S_MAX = 30.0
"""For members to see each other, or to notice that one is gone. PeerCache takes 6 s (member_ttl), kvpeer 1 to 3."""


class BlockedError(Exception):
    """An engine's call did not return in time."""


class DiedError(Exception):
    """The engine process ended during a call."""


@dataclass(frozen=True)
class Shape:
    """The room that a node has for pages."""

    page_bytes: int
    n_pages: int

    @property
    def pool_bytes(self) -> int:
        return self.page_bytes * self.n_pages


@dataclass(frozen=True)
class Footprint:
    """What processes hold: threads, open descriptors, and memory without what is shared between processes."""

    n_threads: int
    n_fds: int
    resident_bytes: int


class EngineProcess:
    """An `engine.Engine` in a process of its own, forked from one that has imported SGLang."""

    def __init__(self, identity: Identity, page_bytes: int, folder: Path, log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["faults.engine"])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, identity, page_bytes, folder, log), daemon=True)
        self._process.start()
        theirs.close()
        self._is_blocked = False
        self._answer(START_S_MAX, "start")

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, method: str, *arguments: Any, seconds_max: float = ANSWER_S_MAX) -> Any:
        """The answer of a method of the engine.

        Raises:
            BlockedError: there was none in time. The call goes on, so nothing more can be asked.
            DiedError: the process ended.
            RuntimeError: the method raised.
        """
        assert not self._is_blocked, "an earlier call still runs"
        self._connection.send((method, arguments))
        return self._answer(seconds_max, method)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)

    def _answer(self, seconds_max: float, what: str) -> Any:
        if not self._connection.poll(seconds_max):
            self._is_blocked = True
            raise BlockedError(f"{what} did not return within {seconds_max:g} s")
        try:
            is_good, answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(10)
            raise DiedError(f"the process ended with {self._process.exitcode} in {what}") from None
        if not is_good:
            raise RuntimeError(f"{what} raised:\n{answer}")
        return answer


class Node(ABC):
    """One node, started and with its storage attached."""

    engine: EngineProcess
    is_running = True

    @abstractmethod
    def backend(self) -> Backend:
        """What is attached to the engine."""

    @abstractmethod
    def pids(self) -> list[int]:
        """All processes of this node, the engine's first."""

    @abstractmethod
    def n_members(self) -> int:
        """How many nodes this one believes to be there, itself included."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the node in order, as a server does that is shut down."""

    @abstractmethod
    def start(self) -> None:
        """Starts it, also again after `stop`, with the same settings, and attaches the storage."""

    def attach(self, seconds_max: float = ANSWER_S_MAX) -> float:
        """Attaches the storage; the seconds that took. Raises as `EngineProcess.ask`."""
        return float(self.engine.ask("attach", self.backend(), seconds_max=seconds_max))

    def kill(self) -> None:
        """Ends all its processes without giving them a chance to say anything."""
        self.is_running = False
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        self.engine.kill()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """All its processes stand still meanwhile."""
        for pid in self.pids():
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in self.pids():
                os.kill(pid, signal.SIGCONT)

    def footprints(self) -> list[Footprint]:
        """Of each of its processes, in the order of `pids`."""
        return [_footprint(pid) for pid in self.pids()]


class System(ABC):
    """A system under test. A fault gets a new one and its nodes end with it."""

    name: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[Node] = []
        self._engines: list[EngineProcess] = []

    @abstractmethod
    def make_node(self, shape: Shape, identity: Identity, disk: Path | None) -> Node:
        """A started node. disk: the folder of its disk tier; None for none."""

    def start(
        self, n: int, shape: Shape, identities: Sequence[Identity] = (), disks: Sequence[Path | None] = ()
    ) -> list[Node]:
        """n further nodes; returns when all that run see each other.

        The first of a PeerCache cluster is the one that the others find each other by, so no fault ends it.
        """
        started = []
        for idx in range(n):
            identity = identities[idx] if identities else Identity()
            started.append(self.make_node(shape, identity, disks[idx] if disks else None))
            self.nodes.append(started[-1])
        self.settle()
        return started

    def settle(self) -> None:
        """Returns when all nodes that run see each other and nobody else."""
        running = [node for node in self.nodes if node.is_running]
        for node in running:
            eventually(lambda node=node: node.n_members() == len(running), SETTLE_S_MAX, "members see each other")

    def engine(self, shape: Shape, identity: Identity) -> EngineProcess:
        """A started engine of this kind, without storage."""
        log = self.folder / f"engine-{len(self._engines)}.log"
        self._engines.append(EngineProcess(identity, shape.page_bytes, self.folder, log))
        return self._engines[-1]

    def close(self) -> None:
        """Ends all processes, at once."""
        for engine in self._engines:
            engine.kill()


def eventually(condition: Callable[[], object], seconds_max: float, what: str, poll_s: float = 0.1) -> None:
    """Returns when the condition holds.

    Raises:
        RuntimeError: it does not within the time; names `what` should have come.
    """
    deadline = time.monotonic() + seconds_max
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {seconds_max:g} s: {what}")
        time.sleep(poll_s)


def _footprint(pid: int) -> Footprint:
    folder = Path(f"/proc/{pid}")
    fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return Footprint(
        int(fields["Threads"]), len(list((folder / "fd").iterdir())), int(fields["RssAnon"].split()[0]) << 10
    )
