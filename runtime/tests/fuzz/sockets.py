"""What comes in on sockets that are no links between agents: a client's frames, an agent's answers to a client, a
scraper's HTTP.

The first byte says which. The real servers and clients read it, from real sockets.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import queue
import random
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path

from kvpeer.agent import http
from kvpeer.agent.clients import ClientServer
from kvpeer.agent.config import AgentSettings
from kvpeer.agent.pool import NoPeers, PoolService
from kvpeer.agent.told_policy import ToldPolicy
from kvpeer.client import session
from kvpeer.client.link import open_link
from kvpeer.client.settings import Registration
from kvpeer.core.slots import SlotSettings, SlotTable
from kvpeer.metrics import build
from kvpeer.model import AgentId, KvPeerError, Verify
from kvpeer.native import Pool
from kvpeer.wire.codec import encode
from kvpeer.wire.framing import FrameKind, pack_frame
from kvpeer.wire.messages import ClientHello
from prometheus_client import CollectorRegistry

from fuzz.shapes import changed_frames

__all__ = [
    "AGENT",
    "AGENT_ID",
    "CLIENT",
    "EXTENT_BYTES",
    "GREETED_CLIENT",
    "HTTP",
    "POLICY_AGENT",
    "POLICY_CLUSTER",
    "POLICY_KEY",
    "REGISTRATION",
    "changed",
    "take",
]

CLIENT, GREETED_CLIENT, AGENT, HTTP = range(4)

POLICY_AGENT, POLICY_CLUSTER, POLICY_KEY = "fuzz", "fuzz", bytes(32)

EXTENT_BYTES = 1 << 20
AGENT_ID = AgentId(b"a" * 16)
REGISTRATION = Registration("fuzz", b"n" * 32, {}, 4096, 1, 0, 0, 4096)

LOOP_TURNS = 12
"""So often the server may run before the client leaves: enough for every answer that waits for nobody."""

END_S = 5.0
"""Whatever came in, a connection that the other side closed ends sooner than this."""


def take(data: bytes) -> None:
    if not data:
        return
    kind, content = data[0], data[1:]
    if kind == CLIENT:
        agent().serve(content)
    elif kind == GREETED_CLIENT:
        hello = pack_frame(FrameKind.REQUEST, 0, encode(ClientHello(**vars(REGISTRATION))), 1000)
        agent().serve(hello, content)
    elif kind == AGENT:
        talk_to(content)
    elif kind == HTTP:
        scrape(content)


def changed(data: bytes, rng: random.Random) -> bytes:
    """Another input that is as well formed as this one."""
    if data[0] == HTTP:
        return data
    n_ahead = 2 if data[0] == AGENT else 1
    return data[:n_ahead] + changed_frames(data[n_ahead:], rng)


class _Agent:
    """What of an agent serves clients, on an event loop that runs while a client is there."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(self._start())

    async def _start(self) -> ClientServer:
        table = SlotTable(SlotSettings(EXTENT_BYTES, 1))
        self._native = Pool(EXTENT_BYTES, EXTENT_BYTES, AGENT_ID)
        pool = PoolService(self._native, table, time.monotonic, NoPeers(), lambda: None)
        pool.start()
        await pool.ready()
        self._registry = CollectorRegistry()
        peers, metrics = NoPeers(), build(self._registry)
        return ClientServer(
            "", AGENT_ID, pool, EXTENT_BYTES, EXTENT_BYTES, Verify.FULL, peers, peers, time.monotonic, metrics
        )

    def serve(self, *sent: bytes) -> None:
        """One client that sends these and leaves."""
        self._loop.run_until_complete(asyncio.wait_for(self._one_client(sent), END_S))
        assert self._server.n_clients == 0
        assert not self._registry.get_sample_value("kvpeer_agent_client_refusals_total", {"reason": "internal"})

    async def _one_client(self, sent: tuple[bytes, ...]) -> None:
        theirs, ours = socket.socketpair()
        with theirs:
            theirs.setblocking(False)
            ours.setblocking(False)
            serving = self._loop.create_task(self._server._serve(ours))
            for piece in sent:
                with contextlib.suppress(OSError):
                    theirs.send(piece)
                for _ in range(LOOP_TURNS):
                    await asyncio.sleep(0)
            with contextlib.suppress(OSError):
                theirs.shutdown(socket.SHUT_WR)
            await serving


@functools.cache
def agent() -> _Agent:
    return _Agent()


class _Answering:
    """Sends one prepared answer to whoever connects next, from a thread of its own."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvpeer-fuzz-")
        self.path = f"{self._folder.name}/agent.sock"
        self.answers: queue.Queue[tuple[bytes, list[int]]] = queue.Queue()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            content, fds = self.answers.get()
            with connection, contextlib.suppress(OSError):
                socket.send_fds(connection, [content or b"\0"], fds)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass


@functools.cache
def answering() -> _Answering:
    return _Answering()


@functools.cache
def shared_fds() -> tuple[int, int, int]:
    """The two files of a pool, and one that is none."""
    native = Pool(EXTENT_BYTES, EXTENT_BYTES, AGENT_ID)
    payload, headers = (os.dup(fd) for fd in native.fds)
    return payload, headers, os.open(os.devnull, os.O_RDONLY)


def talk_to(content: bytes) -> None:
    """An agent that answers the hello with these bytes; their first one says which descriptors come with them."""
    payload, headers, other = shared_fds()
    choices = [[payload, headers], [], [payload], [headers, payload], [payload, other], [payload, headers, other]]
    peer = answering()
    n_open = len(os.listdir("/proc/self/fd"))
    peer.answers.put((content[1:], choices[content[0] % len(choices)] if content else []))
    try:
        link = open_link(peer.path, REGISTRATION, time.monotonic() + END_S)
    except KvPeerError:
        link = None
    if link is not None:
        link.serve(lambda late: session._give_back(link, late))
        link.close()
    deadline = time.monotonic() + END_S
    while len(os.listdir("/proc/self/fd")) > n_open:  # the answering thread closes its own end at its own time
        assert time.monotonic() < deadline, "descriptors are left open"
        time.sleep(0)


def scrape(request: bytes) -> None:
    """A request gets an answer or the end of its connection."""
    theirs, ours = socket.socketpair()
    with theirs, ours:
        theirs.send(request)
        theirs.shutdown(socket.SHUT_WR)
        theirs.setblocking(False)
        http_handler()(ours, ("fuzz", 0), None)  # type: ignore[arg-type]  # it never looks at its server
        with contextlib.suppress(BlockingIOError):
            answer = theirs.recv(1 << 16)
            assert not answer or request.strip(), answer


@functools.cache
def http_handler() -> type:
    folder = Path(tempfile.mkdtemp(prefix="kvp-", dir="/tmp"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    told = ToldPolicy(AgentSettings(name=POLICY_AGENT, cluster=POLICY_CLUSTER), POLICY_KEY, folder, lambda told: None)
    page = http.HttpAnswer("text/plain", b"a page")
    return http._handler(CollectorRegistry(), lambda: "", told.accept, {"/": lambda: page})
