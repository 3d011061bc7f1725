"""Agents share pages: what one holds, all can have, and each reader becomes a further holder."""

from __future__ import annotations

import threading

import pytest
from kvpeer.model import ConfigError

from processes.agents import AgentProcess, Cluster, finds, publish_all
from processes.engine import PAGE_BYTES, Engine, chain_of
from processes.handles import eventually

pytestmark = pytest.mark.process

PAGES = range(20)
HITS = ["HIT"] * len(PAGES)


@pytest.fixture(scope="module")
def agents(shared_cluster: Cluster) -> list[AgentProcess]:
    return shared_cluster.start("a", "b")


def pulled_bytes(agent: AgentProcess) -> float:
    return agent.metric("kvpeer_transport_pulled_bytes_total", transport="tcp")


def served_bytes(agent: AgentProcess) -> float:
    return agent.metric("kvpeer_transport_served_bytes_total", transport="tcp")


def test_a_page_goes_from_one_engine_to_another_once_and_stays_there(
    shared_cluster: Cluster, agents: list[AgentProcess]
) -> None:
    a, b = agents
    producer, reader = (shared_cluster.engine(agent, namespace="once") for agent in agents)
    pulled_before, served_before = pulled_bytes(b), served_bytes(a)
    publish_all(producer, PAGES)
    finds(reader, PAGES)
    assert reader.locate(*PAGES, 98, 99) == [2] * len(PAGES) + [0, 0]
    assert reader.fetch(*PAGES, 98, 99) == [*HITS, "MISS", "MISS"]
    assert reader.locate(*PAGES) == [1] * len(PAGES)
    assert reader.fetch(*PAGES) == HITS
    assert pulled_bytes(b) - pulled_before == len(PAGES) * PAGE_BYTES
    eventually(lambda: served_bytes(a) > served_before)
    assert len(PAGES) <= (served_bytes(a) - served_before) / PAGE_BYTES < len(PAGES) + 1


def test_the_ranks_of_a_reader_cause_one_pull_and_each_gets_its_part(
    shared_cluster: Cluster, agents: list[AgentProcess]
) -> None:
    a, b = agents
    ranks = [{"n_parts": 2, "part": part, "namespace": "two ranks"} for part in (0, 1)]
    producers = [shared_cluster.engine(a, **rank) for rank in ranks]
    readers = [shared_cluster.engine(b, **rank) for rank in ranks]
    n_rounds = 5
    before = pulled_bytes(b)
    for n in range(n_rounds):
        chain = range(n * 60, (n + 1) * 60)
        for producer in producers:
            publish_all(producer, chain)
        finds(readers[0], chain)
        outcomes = fetch_together(readers, chain)
        assert outcomes == [["HIT"] * len(chain)] * 2
    assert pulled_bytes(b) - before == n_rounds * 60 * PAGE_BYTES


def fetch_together(readers: list[Engine], chain: range) -> list[list[str]]:
    outcomes: list[list[str]] = [[] for _ in readers]
    together = threading.Barrier(len(readers))

    def fetch(idx: int) -> None:
        together.wait(10)
        outcomes[idx] = readers[idx].fetch(*chain)

    threads = [threading.Thread(target=fetch, args=(idx,)) for idx in range(len(readers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return outcomes


def test_engines_of_another_namespace_never_hit_and_both_can_be_seen(
    shared_cluster: Cluster, agents: list[AgentProcess]
) -> None:
    a, b = agents
    one = shared_cluster.engine(a, namespace="weights 1")
    others = [shared_cluster.engine(agent, namespace="weights 2") for agent in agents]
    same = shared_cluster.engine(b, namespace="weights 1")
    publish_all(one, PAGES)
    finds(same, PAGES)
    for other in others:
        assert other.locate(*PAGES) == [0] * len(PAGES)
        assert other.fetch(*PAGES) == ["MISS"] * len(PAGES)
    eventually(lambda: a.metric("kvpeer_agent_namespaces") == len(shared_cluster.namespaces(a)))
    assert {one.namespace, others[0].namespace} <= shared_cluster.namespaces(a)


def test_an_engine_with_other_pages_in_the_same_namespace_is_refused_or_misses(
    shared_cluster: Cluster, agents: list[AgentProcess]
) -> None:
    """Beside the other engine it can be told; at another agent nobody knows of the fault, and nothing fits."""
    a, b = agents
    right = shared_cluster.engine(a, namespace="sizes")
    publish_all(right, PAGES)
    with pytest.raises(ConfigError, match=rf"page_bytes.*{PAGE_BYTES * 2}.*{PAGE_BYTES}"):
        shared_cluster.engine(a, namespace="sizes", page_bytes=PAGE_BYTES * 2)
    wrong = shared_cluster.engine(b, namespace="sizes", page_bytes=PAGE_BYTES * 2)
    finds(wrong, PAGES)
    assert set(wrong.fetch(*PAGES)) <= {"STALE", "MISS"}
    assert right.fetch(*PAGES) == HITS


def test_a_newcomer_finds_old_pages_and_a_reader_serves_them_when_their_producer_is_gone(cluster: Cluster) -> None:
    a, b = cluster.start("a", "b")
    producer, reader = cluster.engine(a), cluster.engine(b)
    publish_all(producer, PAGES)
    finds(reader, PAGES)
    assert reader.fetch(*PAGES) == HITS
    (c,) = cluster.start("c")
    newcomer = cluster.engine(c)
    finds(newcomer, PAGES)
    a.kill()
    cluster.wait_members()
    finds(newcomer, PAGES)
    assert newcomer.fetch(*PAGES) == HITS
    eventually(lambda: served_bytes(b) >= len(PAGES) * PAGE_BYTES)
    assert b.metric("kvpeer_links_refusals_total", reason="limit") == 0, "members do not crowd each other out"


def test_a_reader_is_told_who_has_what_and_pulls_from_whom_it_names(shared_cluster: Cluster) -> None:
    a, b, reader_agent = shared_cluster.start("offering a", "offering b", "asking")
    first, second, reader = (shared_cluster.engine(agent, namespace="named") for agent in (a, b, reader_agent))
    publish_all(first, PAGES)
    publish_all(second, PAGES[:10])

    def offered() -> dict[bytes, int]:
        located = reader.client.locate(chain_of(reader.namespace, *PAGES), "named", 1.0)
        return {offer.producer: offer.n_pages for offer in located.offers}

    eventually(lambda: sorted(offered().values()) == [10, 20])
    shorter = min(offered(), key=lambda producer: offered()[producer])
    before = served_bytes(a), served_bytes(b)
    assert reader.fetch(*PAGES[:10], source=shorter) == HITS[:10]
    eventually(lambda: served_bytes(b) - before[1] >= 10 * PAGE_BYTES)
    assert served_bytes(a) == before[0]
    eventually(lambda: sorted(offered().values()) == [20])
