"""Who is admitted to an agent's data port."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from kvpeer.agent.data_peers import DataAdmissions
from kvpeer.agent.links import PeerRefusedError
from kvpeer.model import CapacityError, PeerUnavailableError
from kvpeer.wire.messages import OpenData
from whole_agents import WholeAgent, with_agents

READER_CAPABILITIES_MAX = 64


def test_members_get_capabilities_and_strangers_none(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        answer = await reader.agent._links.request(producer.id, OpenData(2), 5)
        assert len(answer.capabilities) == 64
        admissions = DataAdmissions(producer.agent._server, producer.agent._view)
        stranger = msgspec.structs.replace(reader.agent.info, agent_id=b"s" * 16)
        with pytest.raises(PeerUnavailableError, match="no member"):
            await admissions._open(stranger, OpenData(1))

    with_agents(tmp_path, "reader producer", scenario)


@pytest.mark.parametrize("n", [0, 17])
def test_nobody_gets_more_capabilities_at_once_than_a_reader_may_have_connections(tmp_path: Path, n: int) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        with pytest.raises(PeerRefusedError, match="1 to 16"):
            await reader.agent._links.request(producer.id, OpenData(n), 5)

    with_agents(tmp_path, "reader producer", scenario)


def test_one_reader_cannot_take_the_capabilities_of_all(tmp_path: Path) -> None:
    async def scenario(greedy: WholeAgent, other: WholeAgent, producer: WholeAgent) -> None:
        admissions = DataAdmissions(producer.agent._server, producer.agent._view)
        for _ in range(READER_CAPABILITIES_MAX):
            await admissions._open(greedy.agent.info, OpenData(1))
        with pytest.raises(CapacityError):
            await admissions._open(greedy.agent.info, OpenData(1))
        assert await admissions._open(other.agent.info, OpenData(1))

    with_agents(tmp_path, "greedy other producer", scenario)


def test_a_producer_that_ended_is_not_connected_to_again(tmp_path: Path) -> None:
    async def scenario(reader: WholeAgent, producer: WholeAgent) -> None:
        await producer.publish(1)
        await reader.finds(1)
        assert await reader.pull(1) == ["HIT"]
        peers = reader.agent._peers
        assert producer.id in peers._peers
        reader.agent._view.update([reader.agent.info], [], 0.0)
        peers.forget(producer.id)
        assert peers._peer(producer.id) is None
        assert not peers._peers

    with_agents(tmp_path, "reader producer", scenario)
