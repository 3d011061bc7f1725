"""A producer whose memory rots is told by its readers, looks for itself, and offers the pages no longer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from engines.pools import flip_pool

from processes.agents import POLL_S, AgentProcess, Cluster, finds, publish_all
from processes.handles import FOLDER, eventually

pytestmark = pytest.mark.process

PAGES = range(6)


def reported(producer: AgentProcess, outcome: str) -> float:
    return producer.metric("kvpeer_pool_reported_pages_total", outcome=outcome)


def test_rotted_pages_are_corrupt_for_one_reader_and_a_miss_for_all_after_it(cluster: Cluster) -> None:
    agents = cluster.start("producer", "first", "second")
    producer, first, second = (cluster.engine(agent) for agent in agents)
    publish_all(producer, PAGES)
    finds(first, PAGES)
    finds(second, PAGES)
    flip_pool(Path(agents[0].socket))
    assert first.fetch(*PAGES) == ["CORRUPT"] * len(PAGES)

    eventually(lambda: reported(agents[0], "confirmed") == len(PAGES), poll_s=POLL_S)
    assert agents[0].log.count("its memory was damaged") == len(PAGES)
    eventually(lambda: agents[0].metric("kvpeer_pool_corrupt_pages_total") == len(PAGES), poll_s=POLL_S)
    eventually(lambda: agents[0].metric("kvpeer_pool_bytes", state="quarantined") > 0, poll_s=POLL_S)
    eventually(lambda: second.locate(*PAGES, request="another") == [0] * len(PAGES), poll_s=POLL_S)
    assert second.fetch(*PAGES, request="another") == ["MISS"] * len(PAGES)
    assert agents[2].metric("kvpeer_fetch_pages_total", outcome="corrupt", transport="tcp") == 0

    publish_all(producer, PAGES)
    finds(second, PAGES)
    assert second.fetch(*PAGES) == ["HIT"] * len(PAGES), "published anew, in other slots"


def test_a_reader_that_slanders_right_pages_removes_none_of_them(cluster: Cluster) -> None:
    producer_agent, honest_agent = cluster.start("producer", "honest")
    slanderer_agent = cluster.launch("slanderer", command=(sys.executable, str(FOLDER / "slanderer.py")))
    slanderer_agent.wait_serving()
    cluster.wait_members()
    producer, honest, slanderer = (cluster.engine(agent) for agent in (producer_agent, honest_agent, slanderer_agent))
    publish_all(producer, PAGES)
    finds(slanderer, PAGES)
    assert slanderer.fetch(*PAGES) == ["HIT"] * len(PAGES)

    eventually(lambda: reported(producer_agent, "false") == len(PAGES), poll_s=POLL_S)
    assert f"agent {slanderer_agent.agent_id.hex()} reported 1 pages corrupt that are right" in producer_agent.log
    assert reported(producer_agent, "confirmed") == 0
    assert producer_agent.metric("kvpeer_pool_corrupt_pages_total") == 0
    assert producer.fetch(*PAGES) == ["HIT"] * len(PAGES)
    slanderer_agent.kill()
    cluster.wait_members()
    finds(honest, PAGES)
    assert honest.fetch(*PAGES) == ["HIT"] * len(PAGES)
