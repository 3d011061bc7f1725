"""What an operator may tell an agent, and what its clients get to know of it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from kvpeer.agent.config import AgentSettings
from kvpeer.agent.told_policy import DOCUMENT_BYTES_MAX, PolicyRefusedError, ToldPolicy, policy_key, signature
from kvpeer.client import Client, ClientSettings, Registration
from kvpeer.model import RemoteProtocolError
from kvpeer.wire.messages import PolicyTold
from whole_agents import NAMESPACE, PAGE_BYTES, WholeAgent, with_agents

KEY = policy_key(b"a secret of the cluster", "chat")
ON, OFF = {"KVPEER_CONNECTOR_MODE": "on"}, {"KVPEER_CONNECTOR_MODE": "off"}
SECRET = "ab" * 32


def posted(revision: int, variables: dict[str, str], key: bytes = KEY, **changes: Any) -> bytes:
    told = {"cluster": "chat", "agent": "pod-1", "revision": revision, "policy": "p/1", "variables": variables}
    document = json.dumps({**told, **changes})
    return json.dumps({"document": document, "signature": signature(key, document)}).encode()


class Told(list[PolicyTold]):
    """What clients were told, by an agent of this folder."""

    def __init__(self, folder: Path, key: bytes = KEY) -> None:
        self.policy = ToldPolicy(AgentSettings(name="pod-1", cluster="chat"), key, folder, self.append)


def test_the_highest_revision_wins_whatever_comes_late(tmp_path: Path) -> None:
    told = Told(tmp_path)
    assert told.policy.accept(posted(5, ON)) == 5
    assert told.policy.accept(posted(7, OFF, policy="")) == 7  # the policy was deleted
    assert told.policy.accept(posted(6, ON)) == 7
    assert [each.variables for each in told] == [ON, OFF]


def test_what_is_told_again_at_a_later_revision_is_no_news_and_still_rules_out_older_words(tmp_path: Path) -> None:
    told = Told(tmp_path)
    for revision in (5, 5, 9):
        told.policy.accept(posted(revision, ON))
    assert told.policy.accept(posted(8, OFF)) == 9
    assert len(told) == 1


def test_of_one_revision_the_last_word_counts(tmp_path: Path) -> None:
    """Labels of the pod changed, and with them the policy that governs it."""
    told = Told(tmp_path)
    told.policy.accept(posted(5, ON))
    told.policy.accept(posted(5, OFF, policy="p/2"))
    assert told[-1] == PolicyTold(5, "p/2", OFF)


@pytest.mark.parametrize(
    "body",
    [
        posted(5, ON, policy_key(b"another secret", "chat")),
        posted(5, ON, policy_key(b"a secret of the cluster", "other")),
        posted(5, ON, agent="pod-2"),
        posted(5, ON, cluster="other"),
        posted(5, ON).replace(b'\\"on\\"', b'\\"no\\"'),
    ],
    ids=["other secret", "key of another cluster", "other agent", "other cluster", "changed"],
)
def test_what_is_not_proved_or_not_for_this_agent_is_refused(tmp_path: Path, body: bytes) -> None:
    told = Told(tmp_path)
    with pytest.raises(PolicyRefusedError):
        told.policy.accept(body)
    assert told == []


def test_without_a_secret_nothing_is_taken(tmp_path: Path) -> None:
    told = Told(tmp_path, key=b"")
    with pytest.raises(PolicyRefusedError, match="no secret"):
        told.policy.accept(posted(5, ON, b""))


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{}", b"\xff", b"[" * 10_000, posted(-1, ON), posted(1 << 63, ON), posted(1, {"A": "x" * 254}),
        posted(1, {f"A{index}": "1" for index in range(65)}), b" " * (DOCUMENT_BYTES_MAX + 1),
        posted(1, {"A": 1}),  # type: ignore[dict-item]
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_a_message(tmp_path: Path, body: bytes) -> None:
    told = Told(tmp_path)
    with pytest.raises(RemoteProtocolError):
        told.policy.accept(body)
    assert told.policy.current is None


def test_an_agent_that_is_started_again_still_knows(tmp_path: Path) -> None:
    Told(tmp_path).policy.accept(posted(5, OFF))
    again = Told(tmp_path)
    assert again == [PolicyTold(5, "p/1", OFF)]
    assert again.policy.accept(posted(4, ON)) == 5


def test_a_kept_document_that_does_not_prove_itself_is_not_used(tmp_path: Path) -> None:
    Told(tmp_path).policy.accept(posted(5, OFF))
    assert Told(tmp_path, policy_key(b"the next secret", "chat")) == []


def test_a_client_is_told_after_its_hello_and_of_each_change(tmp_path: Path) -> None:
    """By HTTP from outside, as an operator does, to a client with a socket of its own."""
    key = policy_key(bytes.fromhex(SECRET), "chat")
    settings = {"agent.cluster": "chat", "security.secret": SECRET, "metrics.enabled": "true"}

    async def scenario(agent: WholeAgent) -> None:
        port = agent.agent.config.metrics.port

        def post(revision: int, variables: dict[str, str], signed_with: bytes = key) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("POST", "/policy", posted(revision, variables, signed_with))
            return connection.getresponse().status

        assert await asyncio.to_thread(post, 1, ON) == 200
        registration = Registration("scheduler", NAMESPACE, {}, PAGE_BYTES, 1, -1, 0, 0)
        client = await asyncio.to_thread(Client.connect, ClientSettings(agent.agent.config.agent.socket), registration)
        try:
            await _told(client, PolicyTold(1, "p/1", ON))
            assert await asyncio.to_thread(post, 2, OFF, KEY) == 403
            assert await asyncio.to_thread(post, 2, OFF) == 200
            await _told(client, PolicyTold(2, "p/1", OFF))
        finally:
            await asyncio.to_thread(client.close)

    with_agents(tmp_path, "pod-1", scenario, **{"pod-1": settings | {"metrics.port": str(_free_port())}})


async def _told(client: Client, wanted: PolicyTold) -> None:
    async def wait() -> None:
        while client.policy != wanted:
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), 10)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
