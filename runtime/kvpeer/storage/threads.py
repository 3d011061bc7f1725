"""Threads for calls that may hang as long as a disk does, and the patience with them."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from kvpeer.core.disk import Condition
from kvpeer.storage.conditions import DiskError
from kvpeer.storage.folder import PageRead, ReadPage
from kvpeer.storage.read_threads import PageReader, ReadThreads

__all__ = ["DiskThreads"]

_T = TypeVar("_T")
_Work = tuple["asyncio.Future[Any]", Callable[[], Any]]


class DiskThreads:
    """One thread that writes, in order, and some that read. Belongs to one event loop. `slow_s`: see `in_time`."""

    def __init__(self, n_readers: int, slow_s: float) -> None:
        self._writer = _Writer()
        self._readers = ReadThreads(n_readers)
        self._slow_s = slow_s
        self._under_way: set[asyncio.Future[Any]] = set()

    def begin_write(self, call: Callable[..., _T], *arguments: Any) -> asyncio.Future[_T]:
        """The result to be, of the thread that writes."""
        return self._begun(self._writer.submit(call, *arguments))

    def begin_read(self, reader: PageReader, read: PageRead) -> asyncio.Future[ReadPage]:
        """The page to be, of a thread that reads."""
        return self._begun(self._readers.submit(reader, read))

    async def write(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """The result. Raises as the call, and as `in_time`."""
        return await self.in_time(self.begin_write(call, *arguments))

    async def in_time(self, future: asyncio.Future[_T]) -> _T:
        """The result.

        Raises:
            DiskError: the disk takes longer than `slow_s`; the call goes on.
        """
        await asyncio.wait([future], timeout=self._slow_s)
        if not future.done():
            raise DiskError(Condition.SLOW, f"the disk did not answer within {self._slow_s:g} s")
        return future.result()

    async def idle(self) -> None:
        """Returns when no call is under way, however long that takes."""
        while self._under_way:
            await asyncio.wait(set(self._under_way))

    def close(self) -> None:
        """The threads end when they have nothing more to do."""
        self._writer.close()
        self._readers.close()

    def _begun(self, future: asyncio.Future[_T]) -> asyncio.Future[_T]:
        self._under_way.add(future)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._under_way.discard(future)
        if not future.cancelled():
            future.exception()  # who gave up on it does not ask any more


class _Writer:
    """Runs calls on one thread, in the order in which they were submitted.

    It is a daemon, unlike those of an executor: a disk that hangs must not keep the process from ending. What waits is
    bounded by the callers.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="kvpeer-disk-write-0", daemon=True).start()

    def submit(self, call: Callable[..., _T], *arguments: Any) -> asyncio.Future[_T]:
        """The result to be. Cancelling it does not stop the call."""
        future: asyncio.Future[_T] = self._loop.create_future()
        self._work.put((future, lambda: call(*arguments)))
        return future

    def close(self) -> None:
        """The thread ends when it has nothing more to do."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            future, call = work
            result: Any = None
            error: BaseException | None = None
            try:
                result = call()
            except BaseException as raised:  # noqa: BLE001 - handed to who waits for it
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(_settle, future, result, error)
            del work, future, call, result, error


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
