"""The agent's Unix socket for engines: who may connect, the hello with its file descriptors, and the life of a
connection.

A connection is one client (an engine's scheduler or one rank). Its requests are answered by
`requests.ClientRequests`, several at a time and each by its deadline. When it closes, everything that the client held
is given back. What a client can make this agent hold is bounded: connections, requests under way, frame sizes, and
unread answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvpeer.agent.pool import Locator, PoolService, Puller
from kvpeer.agent.requests import Client, ClientRequests
from kvpeer.agent.socket_path import prepare_socket_path
from kvpeer.agent.tasks import BackgroundTasks, escalate
from kvpeer.core.traces import TraceRing
from kvpeer.metrics import Metrics
from kvpeer.model import AgentId, CapacityError, KvPeerError, RemoteProtocolError, Verify
from kvpeer.wire.codec import decode_client, encode
from kvpeer.wire.framing import Frame, FrameKind, FrameReader, pack_frame
from kvpeer.wire.messages import (
    ClientHello,
    ClientMessage,
    ClientWelcome,
    Inspect,
    Inspected,
    PolicyTold,
    Refusal,
    RefusalCode,
)

__all__ = ["ClientLimits", "ClientServer"]

BACKLOG = 128
"""Connections that wait for accept: all ranks of the largest pod start at once."""

HELLO_TIMEOUT_S = 2.0
"""From connect to a whole hello; a client sends it at once."""

READ_BYTES = 64 << 10
"""One read from a client; a batch of 4,096 keys fits."""

REQUESTS_MAX = 32
"""Requests of one client under way at once: a connector has one a load thread, one for publishing and one for its
scheduler."""

TELL_TIMEOUT_S = 2.0
"""For whoever asked to take a report of a mebibyte from the socket."""

UNREAD_BYTES_MAX = 8 << 20
"""Answers that a client has not read. More than two of the largest frames: it does not read at all and is dropped."""

Inspector = Callable[[Inspect], Awaitable[Inspected]]
"""Answers a question about the agent, within seconds."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """clients_max: connections at once, further ones are refused. batch_pages_max: pages in one request."""

    clients_max: int = 64
    batch_pages_max: int = 4096


class ClientServer:
    """Serves the clients of one agent. Belongs to one event loop.

    on_clients_changed: called with the number of clients after every change. is_private: whether folder and socket
    are for this user alone; in a pod they are shared by containers that run as different users. traces: what requests
    leave behind for people. inspect: answers connections that ask instead of saying hello.
    """

    def __init__(
        self,
        path: str,
        agent_id: AgentId,
        pool: PoolService,
        capacity_bytes: int,
        extent_bytes: int,
        verify: Verify,
        locator: Locator,
        puller: Puller,
        clock: Callable[[], float],
        metrics: Metrics,
        limits: ClientLimits = ClientLimits(),
        *,
        is_private: bool = True,
        on_clients_changed: Callable[[int], None] = lambda n_clients: None,
        traces: TraceRing | None = None,
        inspect: Inspector | None = None,
    ) -> None:
        self._path = path
        self._agent_id = agent_id
        self._pool = pool
        self._capacity_bytes = capacity_bytes
        self._extent_bytes = extent_bytes
        self._verify = verify
        self._clock = clock
        self._limits = limits
        self._is_private = is_private
        self._on_clients_changed = on_clients_changed
        self._inspect = inspect
        ring = TraceRing() if traces is None else traces
        self._requests = ClientRequests(pool, locator, puller, clock, limits.batch_pages_max, metrics, ring)
        self._listener: socket.socket | None = None
        self._path_lock = -1
        self._accepting: asyncio.Task[None] | None = None
        self._tasks = BackgroundTasks(metrics)
        self._connections: set[asyncio.Task[None]] = set()
        self._n_clients = 0
        self._last_client = 0
        self._refusals = metrics.counter("kvpeer_agent_client_refusals_total")
        self._writers: set[asyncio.StreamWriter] = set()
        self._policy: PolicyTold | None = None

    @property
    def n_clients(self) -> int:
        """Clients whose hello was accepted and that are still connected."""
        return self._n_clients

    def tell(self, policy: PolicyTold) -> None:
        """Every client gets to know the policy, now or after its hello."""
        self._policy = policy
        for writer in self._writers:
            self._write(writer, FrameKind.NOTICE, 0, policy)

    async def start(self) -> None:
        """Listens. Raises as `prepare_socket_path`."""
        self._path_lock = prepare_socket_path(self._path, is_private=self._is_private)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        listener.bind(self._path)
        os.chmod(self._path, 0o600 if self._is_private else 0o666)
        listener.listen(BACKLOG)
        self._listener = listener
        self._accepting = self._tasks.spawn("accept clients", self._accept(listener), is_vital=True)

    async def close(self) -> None:
        """Stops listening, closes every connection, and waits until all that clients held was given back."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        if self._listener is not None:
            self._listener.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        if self._path_lock >= 0:
            os.close(self._path_lock)
            self._path_lock = -1
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    # ---- connections

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:
                _log.exception("a client could not be accepted")
                await asyncio.sleep(0.1)  # out of descriptors: do not spin
                continue
            sock.setblocking(False)
            task = self._tasks.spawn("serve a client", self._serve(sock))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, sock: socket.socket) -> None:
        """One connection from accept to its end."""
        with sock:
            try:
                frame = await asyncio.wait_for(self._first_frame(sock), HELLO_TIMEOUT_S)
                if self._inspect is not None and (question := _question(frame)):
                    await self._tell(sock, frame.id, self._inspect(question))
                    return
                client = self._greet(sock, frame)
            except asyncio.TimeoutError:  # an OSError, too, from Python 3.11 on
                self._refused("hello_timeout")
                _log.warning("a client was not let in: no hello within %s s", HELLO_TIMEOUT_S)
                return
            except OSError as error:  # also who only looks whether an agent serves here
                _log.debug("a connection ended before its hello: %s", error)
                return
            except KvPeerError as error:
                self._refused("busy" if isinstance(error, CapacityError) else "refused")
                _log.warning("a client was not let in: %s", error)
                return
            self._n_clients += 1
            self._on_clients_changed(self._n_clients)
            try:
                await self._converse(client, sock)
            finally:
                self._pool.leave(client.number, client.cohort)
                self._n_clients -= 1
                self._on_clients_changed(self._n_clients)
                _log.info("client %s left", client.name)

    async def _tell(self, sock: socket.socket, frame_id: int, answering: Awaitable[Inspected]) -> None:
        try:
            frame = pack_frame(FrameKind.REPLY, frame_id, encode(await answering))
        except CapacityError as error:
            frame = pack_frame(FrameKind.ERROR, frame_id, encode(Refusal(RefusalCode.BUSY, str(error))))
        await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(sock, frame), TELL_TIMEOUT_S)

    def _greet(self, sock: socket.socket, frame: Frame) -> Client:
        """The client, after its hello was checked and answered. A refusal is sent before the error is raised."""
        try:
            hello = self._checked_hello(frame)
            cohort = self._pool.join(hello)
        except (CapacityError, RemoteProtocolError) as error:
            code = RefusalCode.BUSY if isinstance(error, CapacityError) else RefusalCode.REFUSED
            with contextlib.suppress(OSError):
                sock.send(pack_frame(FrameKind.ERROR, frame.id, encode(Refusal(code, str(error)))))
            raise
        self._last_client += 1
        client = Client(self._last_client, hello.name, cohort, hello.part)
        try:
            self._welcome(sock, client, frame.id)
        except OSError:
            self._pool.leave(client.number, cohort)
            raise
        _log.info("client %s joined namespace %s as part %d", hello.name, hello.namespace.hex()[:16], hello.part)
        return client

    def _checked_hello(self, frame: Frame) -> ClientHello:
        if len(self._connections) > self._limits.clients_max:
            raise CapacityError(f"this agent serves at most {self._limits.clients_max} clients (limits.clients_max)")
        hello = decode_client(frame.body)
        if not isinstance(hello, ClientHello):
            raise RemoteProtocolError(f"the first message is a {type(hello).__name__} instead of a ClientHello")
        return hello

    def _welcome(self, sock: socket.socket, client: Client, frame_id: int) -> None:
        welcome = ClientWelcome(
            self._agent_id,
            self._extent_bytes,
            self._capacity_bytes,
            self._pool.slot_bytes(client.cohort),
            self._verify,
            self._limits.batch_pages_max,
        )
        frame = pack_frame(FrameKind.REPLY, frame_id, encode(welcome))
        # Nothing was sent on this socket before, so that the kernel has room for all of it.
        n_sent = socket.send_fds(sock, [frame], list(self._pool.native.fds))
        if n_sent != len(frame):
            raise OSError("the welcome did not fit into the socket's buffer")

    @staticmethod
    async def _first_frame(sock: socket.socket) -> Frame:
        """The hello's frame, read without a stream: a stream could not send descriptors afterwards."""
        loop = asyncio.get_running_loop()
        reader = FrameReader()
        while True:
            chunk = await loop.sock_recv(sock, READ_BYTES)
            if not chunk:
                raise ConnectionResetError("closed by the client")
            frames = reader.feed(chunk)
            if not frames:
                continue
            if len(frames) > 1 or reader.n_buffered or frames[0].kind is not FrameKind.REQUEST:
                raise RemoteProtocolError("a client sends one request, its hello, and waits for the answer")
            return frames[0]

    # ---- requests

    async def _converse(self, client: Client, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        under_way: set[asyncio.Task[None]] = set()
        frames = FrameReader()
        self._writers.add(writer)
        if self._policy is not None:
            self._write(writer, FrameKind.NOTICE, 0, self._policy)
        try:
            while chunk := await reader.read(READ_BYTES):
                for frame in frames.feed(chunk):
                    self._begin(client, frame, writer, under_way)
        except ConnectionError as error:
            _log.debug("client %s: %s", client.name, error)
        except RemoteProtocolError as error:
            self._refused("protocol")
            _log.warning("client %s is dropped: %s", client.name, error)
        finally:
            self._writers.discard(writer)
            for task in under_way:
                task.cancel()
            if under_way:
                await asyncio.wait(under_way)
            writer.transport.abort()

    def _begin(
        self, client: Client, frame: Frame, writer: asyncio.StreamWriter, under_way: set[asyncio.Task[None]]
    ) -> None:
        message = decode_client(frame.body)
        if frame.kind is FrameKind.NOTICE:
            self._requests.notice(client, message)
            return
        if frame.kind is not FrameKind.REQUEST:
            raise RemoteProtocolError(f"a client does not send {frame.kind.name} frames")
        if len(under_way) >= REQUESTS_MAX:
            refusal = Refusal(RefusalCode.BUSY, f"{REQUESTS_MAX} requests are under way on this connection")
            self._reply(writer, frame.id, refusal)
            return
        deadline = self._clock() + frame.deadline_ms / 1000
        task = asyncio.get_running_loop().create_task(self._answer(client, frame.id, message, deadline, writer))
        under_way.add(task)
        task.add_done_callback(under_way.discard)

    async def _answer(
        self, client: Client, frame_id: int, message: ClientMessage, deadline: float, writer: asyncio.StreamWriter
    ) -> None:
        try:
            answer = await self._requests.answer(client, message, deadline)
        except RemoteProtocolError as error:
            self._refused("protocol")
            _log.warning("client %s is dropped: %s", client.name, error)
            writer.transport.abort()
            return
        except CapacityError as error:
            answer = Refusal(RefusalCode.BUSY, str(error))
        except Exception as error:  # noqa: BLE001 - the root of this task
            self._refused("internal")
            _log.exception("a %s of client %s failed", type(message).__name__, client.name)
            escalate(error)
            writer.transport.abort()
            return
        self._reply(writer, frame_id, answer)

    def _refused(self, reason: str) -> None:
        self._refusals.labels(reason=reason).inc()

    def _reply(self, writer: asyncio.StreamWriter, frame_id: int, answer: ClientMessage) -> None:
        self._write(writer, FrameKind.ERROR if isinstance(answer, Refusal) else FrameKind.REPLY, frame_id, answer)

    def _write(self, writer: asyncio.StreamWriter, kind: FrameKind, frame_id: int, message: ClientMessage) -> None:
        if writer.transport.is_closing():
            return
        writer.write(pack_frame(kind, frame_id, encode(message)))
        if writer.transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
            self._refused("protocol")
            _log.warning("a client does not read its answers and is dropped")
            writer.transport.abort()


def _question(frame: Frame) -> Inspect | None:
    """The first message, if it is a question; what is wrong with another one is said to whoever says hello."""
    try:
        message = decode_client(frame.body)
    except RemoteProtocolError:
        return None
    return message if isinstance(message, Inspect) else None
