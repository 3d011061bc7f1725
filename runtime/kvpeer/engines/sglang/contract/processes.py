"""Processes that hold caches: started once, asked one thing at a time, ended whatever happens.

Importing SGLang takes most of a test's time, so a process stays for the whole session and a cache is closed after its
test. What is asked is a method of `engine.Engine`.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from kvpeer.engines.sglang.contract.kinds import Attachment

__all__ = ["CacheProcess", "RemoteCache"]

START_DEADLINE_S = 300.0
"""For the imports, on a machine that may be busy."""

ANSWER_DEADLINE_S = 120.0


class RemoteCache:
    """An `engine.Engine` in another process: attributes are its methods."""

    def __init__(self, process: CacheProcess, number: int) -> None:
        self._process = process
        self._number = number

    def __getattr__(self, method: str) -> Any:
        return lambda *arguments: self._process.ask(self._number, method, *arguments)


class CacheProcess:
    """One process with any number of caches. Thread-safe, one question at a time."""

    def __init__(self, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._lock = threading.Lock()
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name=f"contract-{name}", daemon=True)
        self._process.start()
        theirs.close()
        self._is_ready = False

    def open(self, kind: str, attachment: Attachment) -> RemoteCache:
        """A new cache with the backend attached."""
        return RemoteCache(self, self.ask(0, "open", kind, attachment))

    def ask(self, number: int, method: str, *arguments: Any) -> Any:
        """The answer of a method of a cache.

        Raises:
            AssertionError: the method raised, or did not answer in time.
        """
        with self._lock:
            self._wait_ready()
            self._connection.send((number, method, arguments))
            return self._answer(ANSWER_DEADLINE_S, method)

    def end(self) -> None:
        self._process.kill()
        self._process.join(10)

    def _wait_ready(self) -> None:
        if not self._is_ready:
            self._answer(START_DEADLINE_S, "start")
            self._is_ready = True

    def _answer(self, deadline_s: float, what: str) -> Any:
        assert self._connection.poll(deadline_s), f"no answer to {what!r} within {deadline_s} s"
        is_good, answer = self._connection.recv()
        assert is_good, f"{what!r} failed in the other process:\n{answer}"
        return answer


def _serve(connection: Connection) -> None:
    """The life of a process."""
    os.setpgid(0, 0)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from kvpeer.engines.sglang.contract.engine import Engine

    caches: dict[int, Any] = {}
    connection.send((True, None))
    while True:
        try:
            number, method, arguments = connection.recv()
        except EOFError:
            return
        try:
            if method == "open":
                number = len(caches) + 1
                caches[number], answer = Engine(*arguments), number
            else:
                answer = getattr(caches[number], method)(*arguments)
            connection.send((True, answer))
        except Exception:  # noqa: BLE001 - whatever it is, the asking side reports it
            connection.send((False, traceback.format_exc()))
