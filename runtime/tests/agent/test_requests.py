"""Messages of clients, answered by a whole agent."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from kvpeer.agent.requests import Client
from kvpeer.model import RemoteProtocolError
from kvpeer.wire.messages import ClientMessage, Fetch, Locate, Reserve
from whole_agents import WholeAgent, chain_of, with_agents


async def ask(agent: WholeAgent, message: ClientMessage) -> ClientMessage:
    client = Client(1, "test", agent.cohort, 0)
    return await agent.agent._clients._requests.answer(client, message, time.monotonic() + 5)


@pytest.mark.parametrize("kind", [Locate, Fetch, Reserve])
def test_a_key_that_comes_twice_in_a_request_is_refused_by_name(tmp_path: Path, kind: type) -> None:
    chain = chain_of(1, 2, 3)
    keys = chain.keys + chain.keys[16:32]
    fields = (0, keys, chain.anchors) if kind is Reserve else ("request", 0, keys, chain.anchors)

    async def scenario(agent: WholeAgent) -> None:
        with pytest.raises(RemoteProtocolError, match=f"keys: .*{chain.keys[16:32].hex()}"):
            await ask(agent, kind(*fields))

    with_agents(tmp_path, "agent", scenario)
