"""A member of the cluster whose data server lies: no lie becomes a hit, and honest holders are asked instead."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from kvpeer.core.sources import Holding, choose_sources
from kvpeer.model import HOLDER_DTYPE, AgentId

from processes import liar
from processes.agents import POLL_S, AgentProcess, Cluster, finds, publish_all
from processes.engine import Engine
from processes.handles import FOLDER, eventually

pytestmark = pytest.mark.process

N_PAGES = 8
DEADLINE_S = 3.0
SLACK_S = 2.0
"""What a loaded machine may take beyond a deadline, before a test calls it missed."""


@dataclass
class Scene:
    """Two producers, one of which lies, and a reader. All pages are asked for once."""

    reader_agent: AgentProcess
    liar_agent: AgentProcess
    honest_agent: AgentProcess
    reader: Engine
    liar: Engine
    honest: Engine
    lie_path: Path
    numbers: itertools.count = field(default_factory=itertools.count)

    def chain(self, n_pages: int = N_PAGES) -> list[int]:
        return list(itertools.islice(self.numbers, n_pages))

    def tell(self, lie: str) -> None:
        """From now on this lie is told, to a reader that trusts the liar until then."""
        self.lie_path.write_text(liar.HONEST)
        eventually(self._is_trusted, poll_s=POLL_S)
        self.lie_path.write_text(lie)

    def _is_trusted(self) -> bool:
        chain = self.chain(1)
        publish_all(self.liar, chain)
        finds(self.reader, chain)
        return self.reader.fetch(*chain, deadline_s=DEADLINE_S) == ["HIT"]

    def n_told(self, lie: str) -> int:
        return self.liar_agent.log.count(f"and tells: {lie}\n")

    def request_to_liar(self) -> str:
        """A request's id by which a reader who may choose asks the liar first."""
        holders = np.zeros(2, HOLDER_DTYPE)
        holders["agent"] = [0, 1]
        agents = [AgentId(self.liar_agent.agent_id), AgentId(self.honest_agent.agent_id)]
        holding = Holding(
            np.array([2], np.uint8), holders, agents, np.ones(2, bool), np.zeros(2, bool), np.zeros(2, np.int64)
        )
        requests = (f"request {n} of {self.numbers}" for n in itertools.count())
        return next(request for request in requests if choose_sources(holding, request)[0].producer == agents[0])


@pytest.fixture(scope="module")
def scene(shared_cluster: Cluster) -> Scene:
    lie_path = shared_cluster.folder / "lie"
    lie_path.write_text(liar.HONEST)
    agents = [
        shared_cluster.launch("reader"),
        shared_cluster.launch("liar", command=(sys.executable, str(FOLDER / "liar.py"), str(lie_path))),
        shared_cluster.launch("honest"),
    ]
    for agent in agents:
        agent.wait_serving()
    shared_cluster.wait_members()
    return Scene(*agents, *(shared_cluster.engine(agent) for agent in agents), lie_path)


def fetch_in_time(engine: Engine, chain: list[int], request: str) -> list[str]:
    outcomes = engine.fetch(*chain, deadline_s=DEADLINE_S, request=request)
    assert engine.last_fetch_s < DEADLINE_S + SLACK_S
    assert "WRONG" not in outcomes
    return outcomes


@pytest.mark.parametrize("lie", [*liar.PAGE_LIES, *liar.HELLO_LIES, liar.SILENT, *liar.RIGHT_PAGES_LIES])
def test_no_lie_is_a_hit_and_an_honest_holder_is_asked_instead(scene: Scene, lie: str) -> None:
    alone, both = scene.chain(), scene.chain()
    publish_all(scene.honest, both)
    publish_all(scene.liar, both)
    publish_all(scene.liar, alone)
    scene.tell(lie)
    finds(scene.reader, both)
    assert fetch_in_time(scene.reader, both, scene.request_to_liar()) == ["HIT"] * N_PAGES
    finds(scene.reader, alone)
    outcomes = fetch_in_time(scene.reader, alone, f"{lie}: alone")
    assert "HIT" not in outcomes or lie in liar.RIGHT_PAGES_LIES
    assert scene.n_told(lie), "the liar was not asked"
    assert scene.reader_agent.is_running
