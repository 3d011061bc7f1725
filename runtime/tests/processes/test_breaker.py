"""A member that answers on its control port and not on its data port is left alone like one that is all silent."""

from __future__ import annotations

import itertools
import sys

import pytest
from kvpeer.core.ring import Ring
from kvpeer.model import AgentId

from processes import liar
from processes.agents import Cluster, finds, publish_all
from processes.engine import chain_of
from processes.handles import FOLDER, eventually

pytestmark = pytest.mark.process

N_PAGES = 4
FAILURES_TO_OPEN = 3
FETCH_DEADLINE_S = 0.4
LONE_OWNERS = {"directory.replicas": "1"}


def test_lookups_that_a_peer_answers_do_not_excuse_its_silent_data_port(cluster: Cluster) -> None:
    lie_path = cluster.folder / "lie"
    lie_path.write_text(liar.HONEST)
    reader_agent = cluster.launch("reader", LONE_OWNERS)
    liar_agent = cluster.launch("liar", LONE_OWNERS, (sys.executable, str(FOLDER / "liar.py"), str(lie_path)))
    for agent in (reader_agent, liar_agent):
        agent.wait_serving()
    cluster.wait_members()
    reader, producer = cluster.engine(reader_agent), cluster.engine(liar_agent)
    ring = Ring.build([AgentId(agent.agent_id) for agent in (reader_agent, liar_agent)], replicas=1)

    def is_asked_of_the_liar(numbers: range) -> bool:
        (owner,) = ring.owners(chain_of(reader.namespace, *numbers).partitions())[0].tolist()
        return ring.members[owner] == liar_agent.agent_id

    chains = (range(start, start + N_PAGES) for start in itertools.count(step=N_PAGES))
    chains = list(itertools.islice(filter(is_asked_of_the_liar, chains), FAILURES_TO_OPEN + 1))
    for numbers in chains:
        publish_all(producer, numbers)
        finds(reader, numbers)
    lie_path.write_text(liar.SILENT)
    for number, numbers in enumerate(chains[:FAILURES_TO_OPEN]):
        assert reader.locate(*numbers, request=f"{number}") == [2] * N_PAGES, "the liar says what it holds"
        assert "HIT" not in reader.fetch(*numbers, deadline_s=FETCH_DEADLINE_S, request=f"{number}")

    def is_open() -> bool:
        """Asks once more. It is open for half a second at first, and metrics are renewed once a second."""
        reader.fetch(*chains[0], deadline_s=FETCH_DEADLINE_S, request="")
        return reader_agent.metric("kvpeer_breaker_peers", plane="data", state="open") == 1

    eventually(is_open, poll_s=0.1)
    assert reader_agent.metric("kvpeer_breaker_peers", plane="lookup", state="open") == 0
