"""The processes of one system: one that serves, several that read. They stand still but for their own turns."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvpeer.bench.memory import BATCH_PAGES
from kvpeer.bench.peers.pages import PageMemory, Place
from kvpeer.bench.peers.system import READERS_MAX, THREADS_MAX, Pages, Reader, System, SystemFailedError
from kvpeer.model import InternalError

__all__ = ["RunningSystem"]

ANSWER_S_MAX = 60.0
"""For a start, which imports packages, and for a turn, which takes a second, on a busy machine."""

SAMPLE_BYTES = 128 << 20
"""Read in one turn by all readers together: a tenth of a second, against which starting them is nothing. Not more for
more readers: on a busy machine a longer turn gets less of the processors."""

CHECKED_PAGES = 4
"""Of each turn, its last batch; the first batches of every thread are checked as a whole, before anything counts."""

OUTPUT_BYTES_MAX = 1000
"""Of the end of what a process wrote, in which its last line is looked for."""

PR_SET_PDEATHSIG = 1

_processes = multiprocessing.get_context("forkserver")


class RunningSystem:
    """A system that serves and is read. Close it to end its processes, at once.

    Raises:
        SystemFailedError: it does not start, or does not bring the right bytes; the message says what it said.
    """

    def __init__(self, system: System, page_bytes: int) -> None:
        self._name = system.name
        _processes.set_forkserver_preload([__name__])
        self._children: list[_Child] = []
        try:
            server = self._child(_serve, system, page_bytes)
            address = server.answer()
            readers = [self._child(_read, system, page_bytes, address, number) for number in range(READERS_MAX)]
            for reader in readers:
                reader.answer()
        except BaseException:
            self.close()
            raise
        self._readers = readers
        self._signal(signal.SIGSTOP)

    def bandwidth(self, n_processes: int, n_threads: int) -> Callable[[], float]:
        """Returns a subject: GB/s of so many readers of so many threads together, from when the first begins to when
        the last ends."""
        n_readers = n_processes * n_threads
        return lambda: SAMPLE_BYTES / self._turn(self._readers[:n_processes], n_threads, SAMPLE_BYTES // n_readers)

    def close(self) -> None:
        """Kills the processes."""
        for child in self._children:
            child.kill()

    def _turn(self, readers: list[_Child], n_threads: int, thread_bytes: int) -> int:
        """Nanoseconds."""
        self._signal(signal.SIGCONT)
        try:
            for reader in readers:
                reader.ask((n_threads, thread_bytes))
            for reader in readers:
                reader.answer()
            for reader in readers:
                reader.ask("go")
            times = np.array([reader.answer() for reader in readers])
        finally:
            self._signal(signal.SIGSTOP)
        return int(times[:, 1].max() - times[:, 0].min())

    def _signal(self, number: int) -> None:
        for child in self._children:
            child.signal(number)

    def _child(self, main: Callable[..., None], *arguments: Any) -> _Child:
        self._children.append(_Child(self._name, main, *arguments))
        return self._children[-1]


class _Child:
    """A process and the pipe to it."""

    def __init__(self, name: str, main: Callable[..., None], *arguments: Any) -> None:
        self._name = name
        self._output = os.memfd_create("output")
        self._connection, theirs = _processes.Pipe()
        self._process = _processes.Process(
            target=_run, args=(theirs, Place(os.getpid(), self._output), main, *arguments), daemon=True
        )
        self._process.start()
        theirs.close()

    def ask(self, what: object) -> None:
        """Raises SystemFailedError."""
        try:
            self._connection.send(what)
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self) -> Any:
        """Raises SystemFailedError."""
        if not self._connection.poll(ANSWER_S_MAX):
            raise self._failure(f"no answer within {ANSWER_S_MAX:g} s")
        try:
            is_good, answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._ended() from None
        if not is_good:
            raise self._failure(answer)
        return answer

    def signal(self, number: int) -> None:
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()
        os.close(self._output)

    def _ended(self) -> SystemFailedError:
        self._process.join(1)
        return self._failure(f"a process ended with {self._process.exitcode}")

    def _failure(self, reason: str) -> SystemFailedError:
        n_bytes = os.fstat(self._output).st_size
        end = os.pread(self._output, OUTPUT_BYTES_MAX, max(0, n_bytes - OUTPUT_BYTES_MAX))
        lines = end.decode(errors="replace").strip().splitlines()
        return SystemFailedError(self._name, f"{reason} ({lines[-1]})" if lines else reason)


# ---- in the processes


def _run(connection: Connection, output: Place, main: Callable[..., None], *arguments: Any) -> None:
    # What systems log is not the benchmark's output; the last line of it is told if they fail.
    opened = output.open()
    os.dup2(opened, sys.stdout.fileno())
    os.dup2(opened, sys.stderr.fileno())
    # A process that stands still would otherwise outlive a benchmark that was killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        main(connection, *arguments)
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:  # noqa: BLE001 - the root of a process that runs what others wrote: why it ends is told
        connection.send((False, f"{type(error).__name__}: {error}"))


def _serve(connection: Connection, system: System, page_bytes: int) -> None:
    memory = PageMemory(page_bytes)
    memory.fill()
    with system.serve(memory) as serving:
        connection.send((True, serving.address))
        serving.attend()


def _read(connection: Connection, system: System, page_bytes: int, address: Any, number: int) -> None:
    memory = PageMemory(page_bytes)
    walk = _Walk(system.connect(address, memory, number), memory, number)
    for thread in range(THREADS_MAX):
        walk.prepare(1, thread)()
        walk.check(BATCH_PAGES)
    with ThreadPoolExecutor(THREADS_MAX) as threads:
        connection.send((True, None))
        while True:
            n_threads, thread_bytes = connection.recv()
            work = walk.prepare_all(n_threads, thread_bytes)
            connection.send((True, None))
            connection.recv()
            started = time.monotonic_ns()
            if n_threads == 1:
                work[0]()
            else:
                for done in [threads.submit(share) for share in work]:
                    done.result()
            ended = time.monotonic_ns()
            walk.check(CHECKED_PAGES)
            connection.send((True, (started, ended)))


class _Walk:
    """Goes through all pages in an order of its own, over and over, into slots that go round, too: what is read and
    written was not touched for a while, and readers do not read the same at a time."""

    def __init__(self, reader: Reader, memory: PageMemory, number: int) -> None:
        order = np.random.default_rng(number).permutation(memory.n_pages).astype(np.int64)
        self._reader = reader
        self._memory = memory
        self._pages = cycle(order.reshape(-1, BATCH_PAGES))
        slots = np.arange(memory.n_pages, dtype=np.int64).reshape(-1, BATCH_PAGES)
        self._slots = cycle(slots)
        self._slots_of = [cycle(own) for own in np.array_split(slots, THREADS_MAX)]
        self._last: tuple[Pages, Pages]

    def prepare_all(self, n_threads: int, thread_bytes: int) -> list[Callable[[], None]]:
        """Returns the work of so many threads for one turn; each has slots of its own."""
        n_batches = thread_bytes // (BATCH_PAGES * self._memory.page_bytes)
        return [self.prepare(n_batches, thread, alone=n_threads == 1) for thread in range(n_threads)]

    def prepare(self, n_batches: int, thread: int, *, alone: bool = False) -> Callable[[], None]:
        """Returns the reading of the next batches by one thread."""
        slots_of = self._slots if alone else self._slots_of[thread]
        moves = []
        for _ in range(n_batches):
            pages, slots = next(self._pages), next(slots_of)
            moves.append(self._reader.move(thread, pages, slots))
            self._last = pages, slots
        self._memory.spoil(slots)

        def perform() -> None:
            for move in moves:
                move()

        return perform

    def check(self, n_pages: int) -> None:
        """Compares the first pages of the batch that was prepared last.

        Raises:
            InternalError: other bytes are there.
        """
        pages, slots = self._last
        wrong = self._memory.n_wrong(slots[:n_pages], pages[:n_pages])
        if wrong:
            raise InternalError(f"{wrong} of {n_pages} pages have wrong bytes")
