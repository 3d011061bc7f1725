"""Agents' control channels for tests: real sockets on loopback, real TLS, real metrics; and a raw peer that can
misbehave."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any

import uvloop
from kvpeer.agent.config import load
from kvpeer.agent.links import Handlers, LinkEnd, LinkSettings, PeerLinks
from kvpeer.agent.security import Security, open_security
from kvpeer.metrics import build
from kvpeer.model import AgentId
from kvpeer.wire.codec import decode_peer, encode
from kvpeer.wire.framing import Frame, FrameKind, FrameReader, pack_frame
from kvpeer.wire.messages import AgentInfo, Message, PeerHello, PeerMessage
from prometheus_client import CollectorRegistry

HOST = "127.0.0.1"
SECRET = "ab" * 32
DEADLINE_S = 10.0
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def run(new_loop: Callable[[], asyncio.AbstractEventLoop], main: Coroutine[Any, Any, None]) -> None:
    """Runs a test's body on a loop of this kind, with a deadline."""
    loop = new_loop()
    try:
        loop.run_until_complete(asyncio.wait_for(main, 30))
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def id_of(number: int) -> AgentId:
    return AgentId(bytes([number]) * 16)


def security_of(agent_id: AgentId, cluster: str = "c", secret: str = SECRET, mode: str = "shared_secret") -> Security:
    env = {"KVPEER_AGENT_CLUSTER": cluster, "KVPEER_SECURITY_MODE": mode}
    if mode == "shared_secret":
        env["KVPEER_SECURITY_SECRET"] = secret
    return open_security(load(None, env), agent_id)


async def until(is_true: Callable[[], bool]) -> None:
    """Lets the loop run until the condition holds; fails after DEADLINE_S."""

    async def poll() -> None:
        while not is_true():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(poll(), DEADLINE_S)


class Node:
    """One agent's PeerLinks, recording what it tells."""

    def __init__(
        self, number: int, settings: LinkSettings | None = None, security: Security | None = None, port: int = 0
    ) -> None:
        self.agent_id = id_of(number)
        self.registry = CollectorRegistry()
        self.ups: list[AgentInfo] = []
        self.downs: list[tuple[AgentId, LinkEnd]] = []
        self.unreachables: list[AgentId] = []
        self.known: list[AgentInfo] = []
        security = security or security_of(self.agent_id)
        rng = random.Random(number)
        self.links = PeerLinks(HOST, port, security, build(self.registry), settings or LinkSettings(), rng)
        self.info = AgentInfo(self.agent_id, f"node-{number}", HOST, self.links.control_port, 9)

    def start(self, handlers: Handlers | None = None) -> Node:
        self.links.start(self.info, handlers or {}, self)
        return self

    async def __aenter__(self) -> Node:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.links.close(2.0)

    def members(self) -> Collection[AgentInfo]:
        return [self.info, *self.known]

    def link_up(self, info: AgentInfo) -> None:
        self.ups.append(info)

    def link_down(self, agent_id: AgentId, end: LinkEnd) -> None:
        self.downs.append((agent_id, end))

    def unreachable(self, agent_id: AgentId, reason: str) -> None:
        self.unreachables.append(agent_id)

    def count(self, metric: str, **labels: str) -> float:
        return self.registry.get_sample_value(metric, labels) or 0.0

    def refused(self, reason: str) -> float:
        return self.count("kvpeer_links_refusals_total", reason=reason)


class RawPeer:
    """The other end of a connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._frames = FrameReader()
        self._ready: list[Frame] = []

    @classmethod
    async def dial(cls, port: int, security: Security | None) -> RawPeer:
        """A connection with little room in the kernel, so that a peer which does not read is felt soon."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (HOST, port))
        tls = {"ssl": security.client_context, "server_hostname": HOST} if security else {}
        return cls(*await asyncio.open_connection(sock=connection, **tls))

    def send(self, kind: FrameKind, frame_id: int, message: Message, deadline_ms: int = 0) -> None:
        self.writer.write(pack_frame(kind, frame_id, encode(message), deadline_ms))

    async def receive(self) -> tuple[Frame, PeerMessage]:
        """The next frame and its message; EOFError when the connection ended."""
        while not self._ready:
            chunk = await asyncio.wait_for(self.reader.read(65536), DEADLINE_S)
            if not chunk:
                raise EOFError
            self._ready += self._frames.feed(chunk)
        frame = self._ready.pop(0)
        return frame, decode_peer(frame.body)

    async def hello(self, info: AgentInfo, cluster: str = "c") -> tuple[Frame, PeerMessage]:
        self.send(FrameKind.REQUEST, 1, PeerHello(cluster, info), 5000)
        return await self.receive()

    async def ended(self) -> None:
        """Returns when the other side has ended the connection; reads and drops what it still sends."""
        try:
            while await asyncio.wait_for(self.reader.read(65536), DEADLINE_S):
                pass
        except OSError:
            pass

    def close(self) -> None:
        self.writer.transport.abort()


async def raw_server(
    security: Security | None, serve: Callable[[RawPeer], Awaitable[None]]
) -> tuple[asyncio.AbstractServer, int]:
    """Serves one connection after another; returns the server and its port."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = RawPeer(reader, writer)
        try:
            await serve(peer)
        finally:
            peer.close()

    context = security.server_context if security else None
    listening = socket.create_server((HOST, 0))
    return await asyncio.start_server(connected, sock=listening, ssl=context), listening.getsockname()[1]
