"""What happens to an agent is seen in its metrics."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import msgspec
import pytest
from kvpeer.agent import clients
from kvpeer.wire.codec import encode
from kvpeer.wire.framing import FrameKind, pack_frame
from kvpeer.wire.messages import Message, Ok
from link_nodes import HOST, until
from whole_agents import HELLO, WholeAgent, with_agents


async def talk(agent: WholeAgent, *frames: bytes) -> None:
    """Sends each frame after the answer to the one before; returns when the agent ended the connection."""
    reader, writer = await asyncio.open_unix_connection(agent.agent.config.agent.socket)
    for frame in frames:
        writer.write(frame)
        await reader.read(1 << 16)
    while await reader.read(1 << 16):
        pass
    writer.transport.abort()


def request(number: int, message: Message) -> bytes:
    return pack_frame(FrameKind.REQUEST, number, encode(message), 5000)


def refusals(agent: WholeAgent) -> dict[str, float]:
    reasons = ("busy", "refused", "hello_timeout", "protocol", "internal")
    return {reason: agent.count("kvpeer_agent_client_refusals_total", reason=reason) for reason in reasons}


@pytest.mark.parametrize(
    ("reason", "frames"),
    [
        ("refused", [request(1, msgspec.structs.replace(HELLO, part=7))]),
        ("refused", [request(1, msgspec.structs.replace(HELLO, name="n" * 254))]),
        ("refused", [b"GET / HTTP/1.1\r\n\r\n" * 4]),
        ("hello_timeout", []),
        ("protocol", [request(1, HELLO), request(2, Ok())]),
    ],
    ids=["wrong part", "long name", "garbage", "silent", "no request"],
)
def test_clients_that_are_not_let_in_or_dropped_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, frames: list[bytes]
) -> None:
    monkeypatch.setattr(clients, "HELLO_TIMEOUT_S", 0.2)

    async def scenario(agent: WholeAgent) -> None:
        await talk(agent, *frames)
        assert refusals(agent) == {**dict.fromkeys(refusals(agent), 0), reason: 1}

    with_agents(tmp_path, "agent", scenario)


def test_clients_beyond_the_limit_are_counted_as_busy(tmp_path: Path) -> None:
    async def scenario(agent: WholeAgent) -> None:
        reader, writer = await asyncio.open_unix_connection(agent.agent.config.agent.socket)
        writer.write(request(1, HELLO))
        await reader.read(1 << 16)
        await talk(agent, request(1, HELLO))
        assert refusals(agent)["busy"] == 1
        writer.transport.abort()

    with_agents(tmp_path, "agent", scenario, agent={"limits.clients_max": "1"})


def test_what_the_data_server_refuses_and_serves_is_counted(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(1)
        await reader.finds(1)
        assert await reader.pull(1) == ["HIT"]
        with socket.create_connection((HOST, producer.agent._server.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n".ljust(72))
            await until(lambda: producer.agent._server.stats().protocol_errors == 1)
        producer.agent._observer.observe()
        assert producer.count("kvpeer_transport_served_pages_total", outcome="sent", transport="tcp") == 1
        assert producer.count("kvpeer_transport_served_refusals_total", reason="protocol", transport="tcp") == 1
        assert producer.count("kvpeer_transport_served_connections", transport="tcp") >= 1

    with_agents(tmp_path, "reader producer", scenario)


def test_seeds_that_cannot_be_joined_and_messages_sent_again_are_counted(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as closed_soon:
        port = closed_soon.getsockname()[1]

    async def scenario(agent: WholeAgent, other: WholeAgent) -> None:
        await until(lambda: agent.agent._membership.n_join_failures > 0)
        await other.agent._links.close(1.0)
        await agent.publish(1)
        await until(lambda: agent.agent._directory.n_send_failures > 0)
        agent.agent._observer.observe()
        assert agent.count("kvpeer_membership_join_failures_total") > 0
        assert agent.count("kvpeer_directory_send_failures_total") > 0

    with_agents(tmp_path, "agent other", scenario, agent={"agent.seeds": f"{HOST}:{port}"})
