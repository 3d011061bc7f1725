"""`Proxy`: accepts connections to one agent and carries them there and back, faults included."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvpeer.chaos.faults import Direction, Fault, FaultKind
from kvpeer.chaos.pump import Pump
from kvpeer.chaos.scenario import Address, Route
from kvpeer.chaos.stream import End, Stream
from kvpeer.model import ConfigError

__all__ = ["Proxy"]

CONNECTIONS_MAX = 1024
"""Open at a time on one route; each may hold 8 MiB (two full lines). Further ones are closed at once, and counted."""

BACKLOG = 512
"""As many as an agent's own listener has."""

CONNECT_S = 5.0
"""For the agent to accept: on the same host it takes no time, and no dial of another agent waits longer than 2 s."""

LINGER_S = 120.0
"""For the other direction to end after the first one did: agents close what is idle after 60 s."""

ACCEPT_PAUSE_S = 0.1
"""After the kernel could not give a connection (no file descriptors): nothing tells when it can again."""

_WAYS = (Direction.TO_AGENT, Direction.FROM_AGENT)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Tally:
    """What happened on a route."""

    connections: int = 0
    refused: int = 0
    unreachable: int = 0
    errors: int = 0
    n_bytes: Counter[Direction] = field(default_factory=Counter)
    faults: dict[Direction, Counter[FaultKind]] = field(default_factory=lambda: {way: Counter() for way in _WAYS})


class Proxy:
    """One route. Life: construct (listens, so that the address is known), `run` until cancelled, `close`. Belongs to
    one event loop.

    Each direction of each connection has random numbers of its own, made of the seed, the route's name and the number
    of the connection: what one connection does changes nothing for another.
    """

    def __init__(self, route: Route, seed: int) -> None:
        """Raises:
        ConfigError: the address to listen on cannot be had.
        """
        self.route = route
        self._seed = seed
        self._faults = route.faults
        self._since = time.monotonic()
        self._changed = asyncio.Event()
        self._tally = _Tally()
        self._streams: set[Stream] = set()
        self._serving: set[asyncio.Task[None]] = set()
        listen = route.listen
        try:
            self._listener = socket.create_server((listen.host, listen.port), family=_family(listen), backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(f"route {route.name} cannot listen on {listen}: {error.strerror}") from error
        self._listener.setblocking(False)

    @property
    def address(self) -> Address:
        """Where it listens."""
        host, port, *_ = self._listener.getsockname()
        return Address(host, port)

    async def run(self) -> None:
        """Accepts until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                _log.warning("route %s cannot accept a connection: %s", self.route.name, error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._serving) >= CONNECTIONS_MAX:
                self._tally.refused += 1
                client.close()
                continue
            self._tally.connections += 1
            task = loop.create_task(self._root(client, self._tally.connections))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    def change(self, faults: Iterable[Fault]) -> None:
        """From now on injects these faults instead, on open connections too; their times count from now."""
        self._faults, self._since = tuple(faults), time.monotonic()
        for stream in self._streams:
            stream.change(self._faults, self._since)
        self._changed.set()
        self._changed = asyncio.Event()

    def status(self) -> dict[str, Any]:
        """Where the proxy stands and what it did, for JSON."""
        tally = self._tally
        ways = {
            way.value: {"bytes": tally.n_bytes[way], **{kind.value: tally.faults[way][kind] for kind in FaultKind}}
            for way in _WAYS
        }
        return {
            "listen": str(self.address),
            "to": str(self.route.to),
            "connections": tally.connections,
            "open": len(self._serving),
            "refused": tally.refused,
            "unreachable": tally.unreachable,
            "errors": tally.errors,
            **ways,
        }

    async def close(self) -> None:
        """Stops listening and resets all connections."""
        self._listener.close()
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    # ---- one connection

    async def _root(self, client: socket.socket, number: int) -> None:
        end = End.RESET
        with contextlib.ExitStack() as streams, client:
            try:
                end = await self._serve(client, [self._stream(way, number, streams) for way in _WAYS])
            except Exception:  # noqa: BLE001 - a root
                self._tally.errors += 1
                _log.exception("route %s: connection %d ended by an unexpected error", self.route.name, number)
            finally:
                if end is End.RESET:
                    _reset_at_close(client)

    async def _serve(self, client: socket.socket, streams: list[Stream]) -> End:
        """How the connection ended. The agent's side is closed; the client's is left to be closed likewise."""
        to_agent, from_agent = streams
        with socket.socket(_family(self.route.to), socket.SOCK_STREAM) as agent:
            for end_of in (client, agent):
                end_of.setblocking(False)
                end_of.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pumps = [self._pump(client, agent, to_agent), self._pump(agent, client, from_agent)]
            await pumps[0].thawed()  # as nobody behind a frozen network hears of a new connection
            try:
                target = (self.route.to.host, self.route.to.port)
                await asyncio.wait_for(asyncio.get_running_loop().sock_connect(agent, target), CONNECT_S)
            except (OSError, asyncio.TimeoutError):
                self._tally.unreachable += 1
                return End.RESET
            end = End.RESET
            try:
                end = await _carry(pumps)
            finally:
                if end is End.RESET:
                    _reset_at_close(agent)
            return end

    def _stream(self, way: Direction, number: int, streams: contextlib.ExitStack) -> Stream:
        name = f"{self._seed}/{self.route.name}/{number}/{way.value}"
        rng, jitter = random.Random(name), random.Random(f"{name}/jitter")  # noqa: S311 - to be repeated, not secret
        stream = Stream(way, self._faults, self._since, rng, jitter, self._tally.faults[way])
        self._streams.add(stream)
        streams.callback(self._streams.discard, stream)
        return stream

    def _pump(self, source: socket.socket, sink: socket.socket, stream: Stream) -> Pump:
        def forwarded(n_bytes: int) -> None:
            self._tally.n_bytes[stream.direction] += n_bytes

        return Pump(source, sink, stream, self._wait_change, forwarded)

    async def _wait_change(self, timeout_s: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), None if timeout_s == float("inf") else timeout_s)


async def _carry(pumps: list[Pump]) -> End:
    """Carries both directions until the connection ends; whether that is in order or by a reset."""
    loop = asyncio.get_running_loop()
    tasks = {loop.create_task(pump.run()) for pump in pumps}
    try:
        done, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if running and all(task.result() in (End.HALF, End.SILENT) for task in done):
            finished, _ = await asyncio.wait(running, timeout=LINGER_S)
            done |= finished
        return End.RESET if any(task.result() is End.RESET for task in done) else End.CLOSE
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reset_at_close(connection: socket.socket) -> None:
    """Lingering for no time at all: closing sends a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address.host else socket.AF_INET
