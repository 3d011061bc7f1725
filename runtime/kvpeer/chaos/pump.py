"""`Pump`: carries one direction of one connection, as its `Stream` decides.

Two tasks and a line of steps between them, so that a delay does not slow the flow: bytes wait in the line while later
ones are read. A full line stops the reading, and TCP then stops the sender.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable

from kvpeer.chaos.stream import End, Step, Stream

__all__ = ["Pump"]

READ_BYTES = 64 << 10
"""In one read: a connection under load is seldom read in less, and what one read holds is soon passed on."""

LINE_BYTES_MAX = 4 << 20
"""Waiting in one direction of one connection; one read may come on top. A delay of 50 ms so lets 80 MB/s through; a
faster stream is slowed down to that, as by a link with such buffers."""

STEP_BYTES = 256
"""What a step costs besides its data, so that many small ones are bounded too."""


class Pump:
    """Reads from `source`, writes to `sink`. `wait_change(timeout_s)` returns when the route's faults changed or the
    time is over; `forwarded(n_bytes)` is told what was sent. Belongs to one event loop; does not close the sockets."""

    def __init__(
        self,
        source: socket.socket,
        sink: socket.socket,
        stream: Stream,
        wait_change: Callable[[float], Awaitable[None]],
        forwarded: Callable[[int], None],
    ) -> None:
        self._source = source
        self._sink = sink
        self._stream = stream
        self._wait_change = wait_change
        self._forwarded = forwarded
        self._line: deque[Step] = deque()
        self._line_bytes = 0
        self._changed = asyncio.Condition()

    async def run(self) -> End:
        """Carries until the stream ends; how it ended. Lives as long as the two ends keep their connection."""
        loop = asyncio.get_running_loop()
        reading, writing = loop.create_task(self._read()), loop.create_task(self._write())
        try:
            done, _ = await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            if writing not in done:
                reading.result()
                await writing
            return writing.result()
        finally:
            reading.cancel()
            writing.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)  # nothing may use the sockets any more

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        has_ended = False
        while not has_ended:
            try:
                chunk = await loop.sock_recv(self._source, READ_BYTES)
            except OSError:
                steps = self._stream.broke(time.monotonic())
            else:
                now = time.monotonic()
                steps = self._stream.take(chunk, now) if chunk else self._stream.finish(now)
            has_ended = any(step.end is not None for step in steps)
            await self._put(steps)

    async def _write(self) -> End:
        loop = asyncio.get_running_loop()
        while True:
            step = await self._get()
            await self._wait_for(step)
            try:
                if step.data:
                    await loop.sock_sendall(self._sink, step.data)
                    self._forwarded(len(step.data))
                if step.end is End.HALF:
                    self._sink.shutdown(socket.SHUT_WR)
            except OSError:
                return End.RESET
            if step.end is not None:
                return step.end

    async def _wait_for(self, step: Step) -> None:
        """Returns when the step is due and nothing is held."""
        delay_s = step.at - time.monotonic()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        await self.thawed()

    async def thawed(self) -> None:
        """Returns when nothing is held in this direction."""
        while (left_s := self._stream.held_until(now := time.monotonic()) - now) > 0:
            await self._wait_change(left_s)

    # ---- the line

    async def _put(self, steps: list[Step]) -> None:
        """Returns when the line has room for more."""
        async with self._changed:
            self._line.extend(steps)
            self._line_bytes += sum(len(step.data) + STEP_BYTES for step in steps)
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._line_bytes < LINE_BYTES_MAX)

    async def _get(self) -> Step:
        async with self._changed:
            await self._changed.wait_for(lambda: self._line)
            step = self._line.popleft()
            self._line_bytes -= len(step.data) + STEP_BYTES
            self._changed.notify_all()
            return step
