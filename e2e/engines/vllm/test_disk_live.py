"""Real vLLM engines over the disk tier: what the pool of one evicted is found on its disk and promoted, for another
engine, for itself, and by the agent that comes after one that was killed. The same tokens come out each time."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import pytest
from engines.harness import AGENT_LOOKS_S, PAGE_TOKENS, REPAIR_DEADLINE_S, Fleet, Server, eventually, prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(700)]

N_PAGES = 20
N_TOKENS = N_PAGES * PAGE_TOKENS + 5

N_OTHERS = 10
"""Prompts that push one out of the pool, which has room for less than six: a page has 32 KiB."""

POOL = {"KVPEER_POOL_SIZE": "4Mi", "KVPEER_POOL_EXTENT_SIZE": "4Mi"}


@dataclass
class Engines:
    producer: Server
    reader: Server


@pytest.fixture(scope="module")
def engines(fleet: Fleet) -> Engines:
    """Two engines that find each other; the producer has a small pool and a disk that takes all its pages."""
    disk = {
        "KVPEER_DISK_PATH": str(fleet.folder / "disk"),
        "KVPEER_DISK_SIZE": "64Mi",
        "KVPEER_DISK_SEGMENT_SIZE": "16Mi",
    }
    engines = Engines(fleet.start("disk-producer", environment={**POOL, **disk}), fleet.start("disk-reader"))
    for server in fleet.servers:
        server.wait_ready()
    return engines


def promoted_pages(server: Server, reader: str) -> float:
    return server.agent_metric("kvpeer_disk_promoted_pages_total", outcome="hit", reader=reader)


def has_on_disk(server: Server, n_pages: float) -> None:
    """Waits until the agent has that many pages on its disk, and each is in the directory of both agents."""
    eventually(lambda: server.agent_metric("kvpeer_disk_pages") >= n_pages, f"{server.name} has {n_pages} on the disk")
    eventually(
        lambda: all(each.agent_metric("kvpeer_directory_holders") >= n_pages for each in server.fleet.servers),
        "both agents know of every page",
        REPAIR_DEADLINE_S,
        AGENT_LOOKS_S,
    )


def evicted_by(server: Server, seed: str) -> tuple[list[int], list[int]]:
    """A prompt whose pages are on the server's disk and not in its pool, and the server's answer from its own cache."""
    before = server.agent_metric("kvpeer_disk_pages")
    tokens = prompt(seed, N_TOKENS)
    server.complete(tokens)
    server.settled()
    expected = server.complete(tokens)
    for n in range(N_OTHERS):
        server.complete(prompt(f"{seed}, other {n}", N_TOKENS), 1)
        server.settled()
    has_on_disk(server, before + (1 + N_OTHERS) * N_PAGES)
    return tokens, expected


def test_what_the_producers_pool_evicted_is_promoted_for_a_reader_that_says_the_same(engines: Engines) -> None:
    producer, reader = engines.producer, engines.reader
    tokens, expected = evicted_by(producer, "for a reader")
    promoted, cached = promoted_pages(producer, "peer"), reader.cached_tokens("p2p")
    assert reader.complete(tokens) == expected
    assert reader.cached_tokens("p2p") - cached == N_PAGES * PAGE_TOKENS, reader.agent_story()
    assert promoted_pages(producer, "peer") - promoted == N_PAGES, "they came from the disk, not from the pool"


def test_the_producer_itself_gets_them_from_its_disk(engines: Engines) -> None:
    producer = engines.producer
    tokens, expected = evicted_by(producer, "for itself")
    producer.reset_prefix_cache()
    promoted, cached = promoted_pages(producer, "own"), producer.cached_tokens("host")
    assert producer.complete(tokens) == expected
    assert producer.cached_tokens("host") - cached == N_PAGES * PAGE_TOKENS
    assert promoted_pages(producer, "own") - promoted == N_PAGES


def test_the_agent_after_a_killed_one_serves_what_was_on_the_disk(engines: Engines) -> None:
    producer, reader = engines.producer, engines.reader
    tokens, expected = evicted_by(producer, "for the next agent")
    n_pages = producer.agent_metric("kvpeer_disk_pages")
    os.kill(producer.agent_pid(), signal.SIGKILL)
    eventually(lambda: not producer.has_agent(), "the agent is gone")
    producer.complete(prompt("it starts the next one", N_TOKENS), 1)
    eventually(producer.has_agent, "the producer has an agent again")
    has_on_disk(producer, n_pages)
    cached = reader.cached_tokens("p2p")
    assert reader.complete(tokens) == expected
    assert reader.cached_tokens("p2p") - cached == N_PAGES * PAGE_TOKENS, reader.agent_story()
    assert promoted_pages(producer, "peer") == N_PAGES, "all of them by the new agent"
