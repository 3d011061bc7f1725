"""Whoever does not belong here, at every door of an agent: refused, counted, told once, and nobody else notices."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from kvpeer.agent.config import load
from kvpeer.agent.security import open_security
from kvpeer.model import AgentId

from processes.agents import HOST, POLL_S, AgentProcess, Cluster, finds, publish_all
from processes.engine import Engine
from processes.handles import DEADLINE_S, eventually

pytestmark = pytest.mark.process

RESIDENT_BYTES_MAX = 64 << 20
"""More than this on top of what an agent had, and a stranger made it hold something."""


@dataclass
class Scene:
    """A cluster of two, whose first agent the strangers go to, and an engine at each."""

    cluster: Cluster
    agent: AgentProcess
    peer: AgentProcess
    producer: Engine
    reader: Engine
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def assert_serves(self) -> None:
        """Engines, members and readers get what they got before."""
        chain = list(itertools.islice(self.numbers, 4))
        publish_all(self.producer, chain)
        finds(self.reader, chain)
        assert self.reader.fetch(*chain) == ["HIT"] * 4
        assert self.agent.knows(2)

    def n_refused(self, reason: str) -> int:
        return int(self.agent.metric("kvpeer_links_refusals_total", reason=reason))

    def n_logged(self, reason: str) -> int:
        return self.agent.log.count(f"no link with {HOST} ({reason};")


@pytest.fixture(scope="module")
def scene(shared_cluster: Cluster) -> Scene:
    agent, peer = shared_cluster.start("agent", "peer", settings={"transport.handshake_timeout": "500ms"})
    return Scene(shared_cluster, agent, peer, shared_cluster.engine(agent), shared_cluster.engine(peer))


@pytest.fixture
def guarded(scene: Scene) -> Iterator[Scene]:
    """The scene, which must be as good afterwards as before."""
    before = resident_bytes(scene.agent)
    yield scene
    scene.assert_serves()
    assert resident_bytes(scene.agent) - before < RESIDENT_BYTES_MAX
    assert "Traceback" not in scene.agent.log


def resident_bytes(agent: AgentProcess) -> int:
    """Memory of the agent's own, without the pool."""
    assert agent.process is not None
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{agent.process.pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


def test_agents_that_do_not_belong_to_the_cluster_are_no_members(guarded: Scene) -> None:
    secret = (guarded.cluster.runtime_dir / "secret").read_text().strip()
    foreign = {
        "other-cluster": {"agent.cluster": "another", "security.secret": secret},
        "other-secret": {"security.secret": "cd" * 32},
        "no-security": {"security.mode": "insecure"},
    }
    before = guarded.n_refused("tls")
    strangers = []
    for name, settings in foreign.items():
        folder = guarded.cluster.folder / f"run-{name}"
        folder.mkdir(mode=0o700)
        own = {"agent.runtime_dir": str(folder), "agent.seeds": f"{HOST}:{guarded.agent.control_port}"}
        strangers.append(guarded.cluster.launch(name, {**own, **settings}))
    try:
        for stranger in strangers:
            stranger.wait_serving()
            eventually(lambda stranger=stranger: "cannot be joined" in stranger.log, poll_s=POLL_S)
            assert stranger.knows(1)
        eventually(lambda: guarded.n_refused("tls") >= before + 2 * len(strangers), poll_s=POLL_S)
        assert guarded.n_logged("tls") == 1, "it is told once and then counted"
        assert guarded.agent.knows(2)
        engine = guarded.cluster.engine(strangers[0])
        publish_all(guarded.producer, [10_000])
        assert engine.fetch(10_000) == ["MISS"]
    finally:
        for stranger in strangers:
            stranger.kill()


# ---- raw connections


def frame_header(body_bytes: int, version: int = 1) -> bytes:
    return struct.pack("<I2sBBQI", body_bytes, b"KV", version, 1, 1, 1000)


SAYS = {
    "text": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20,
    "noise": bytes(range(256)) * 20,
    "a frame of 4 GiB": frame_header(0xFFFF_FFFF) + bytes(10_000),
    "a frame of wire version 0": frame_header(100, version=0) + bytes(100),
    "nothing": b"",
}


def to_control_port(scene: Scene) -> socket.socket:
    return socket.create_connection((HOST, scene.agent.control_port), DEADLINE_S)


def to_control_port_as_member(scene: Scene) -> socket.socket:
    """With a certificate of this cluster: an agent of another release, or one that went mad."""
    settings = {"KVPEER_AGENT_RUNTIME_DIR": str(scene.cluster.runtime_dir), "KVPEER_AGENT_HOST": HOST}
    context = open_security(load(None, settings), AgentId(os.urandom(16))).client_context
    assert context is not None
    return context.wrap_socket(to_control_port(scene), server_hostname=HOST)


def to_data_port(scene: Scene) -> socket.socket:
    return socket.create_connection((HOST, scene.agent.data_port), DEADLINE_S)


def to_engine_socket(scene: Scene) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(DEADLINE_S)
    connection.connect(scene.agent.socket)
    return connection


def assert_closed_by_agent(connection: socket.socket) -> None:
    """Reads to the end, which comes without our doing; what is said before it does not matter here."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass


@pytest.mark.parametrize(
    ("connect", "reasons"),
    [
        (to_control_port, dict.fromkeys(SAYS, "tls")),
        (
            to_control_port_as_member,
            {
                "text": "protocol",
                "noise": "protocol",
                "a frame of 4 GiB": "protocol",
                "a frame of wire version 0": "version",
                "nothing": "hello_timeout",
            },
        ),
        (to_data_port, {}),
        (to_engine_socket, {}),
    ],
    ids=["control port", "control port with a certificate", "data port", "engines' socket"],
)
def test_who_does_not_keep_the_protocol_is_put_out_and_nobody_else_notices(
    guarded: Scene, connect: Callable[[Scene], socket.socket], reasons: dict[str, str]
) -> None:
    before = {reason: guarded.n_refused(reason) for reason in set(reasons.values())}
    with contextlib.ExitStack() as open_connections:
        connections = [open_connections.enter_context(connect(guarded)) for _ in SAYS]
        for connection, said in zip(connections, SAYS.values(), strict=True):
            with contextlib.suppress(ConnectionError):
                connection.sendall(said)
        guarded.assert_serves()  # while the silent one is still there
        for connection in connections:
            assert_closed_by_agent(connection)
    expected = {reason: list(reasons.values()).count(reason) for reason in before}
    for reason, n_before in before.items():
        eventually(lambda reason=reason, n=n_before: guarded.n_refused(reason) >= n + expected[reason], poll_s=POLL_S)
        assert guarded.n_logged(reason) == 1, "it is told once and then counted"


@pytest.mark.parametrize("connect", [to_control_port, to_data_port, to_engine_socket])
def test_a_crowd_that_says_nothing_keeps_no_member_out(
    guarded: Scene, connect: Callable[[Scene], socket.socket]
) -> None:
    with contextlib.ExitStack() as open_connections:
        for _ in range(30):
            open_connections.enter_context(connect(guarded))
        guarded.assert_serves()
