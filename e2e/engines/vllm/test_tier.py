"""Real vLLM engines whose own offloading has kvpeer as its secondary tier: a reader pulls what a producer stored, and
says what plain vLLM says."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

import pytest
from engines.harness import PAGE_TOKENS, Fleet, Server, eventually, prompt, stopped
from engines.pools import flip_pool

pytestmark = [pytest.mark.engine, pytest.mark.timeout(700)]

N_PAGES = 20
N_TOKENS = N_PAGES * PAGE_TOKENS + 5

LOOKUP_TIMEOUT_S, LOAD_TIMEOUT_S = 1.0, 3.0
"""Of the reader, for which a peer is frozen."""

SLACK_S = 8.0
"""Two busy cores may take so much longer for the same work; without a deadline the request would wait for ever."""

CONNECTOR = {
    "kv_connector": "KVPeerOffloadingConnector",
    "kv_connector_module_path": "kvpeer.engines.vllm_tier",
    # vLLM's own default: with tiering, a page that cannot be had is never promised to the engine.
    "kv_load_failure_policy": "fail",
}


@dataclass
class Engines:
    plain: Server
    producer: Server
    reader: Server
    flipping: Server


@pytest.fixture(scope="module")
def engines(fleet: Fleet) -> Engines:
    """Four servers; `flipping` reverses the bytes of every page that it loads."""

    def start(name: str, transfer: dict[str, Any] | None = None, **environment: str) -> Server:
        extra = {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "engines.vllm.cpu_tiering",
            "cpu_bytes_to_use": 32 << 20,
            "secondary_tiers": [{"type": "kvpeer", "engine_name": name}],
        }
        return fleet.start(name, transfer={**CONNECTOR, **(transfer or {})}, extra=extra, environment=environment)

    engines = Engines(
        plain=fleet.start("plain", with_kvpeer=False),
        producer=start("tier-producer"),
        reader=start(
            "tier-reader",
            KVPEER_CONNECTOR_LOOKUP_TIMEOUT_S=str(LOOKUP_TIMEOUT_S),
            KVPEER_CONNECTOR_PULL_BASE_S=str(LOAD_TIMEOUT_S),
            KVPEER_CONNECTOR_LOAD_TIMEOUT_S=str(LOAD_TIMEOUT_S),
        ),
        flipping=start(
            "tier-flipping",
            {
                "kv_connector": "FlippingOffloadingConnector",
                "kv_connector_module_path": "engines.flipping_connector",
            },
            KVPEER_CONNECTOR_PUBLISH="no",
        ),
    )
    for server in fleet.servers:
        server.wait_ready()
    return engines


def said_by_plain(engines: Engines, tokens: list[int]) -> list[int]:
    """Plain vLLM's answer from its own prefix cache: the pages are the prompt's, and the rest is computed over them, as
    in a reader."""
    engines.plain.complete(tokens)
    return engines.plain.complete(tokens)


def stored_by(server: Server, *prompts: list[int]) -> None:
    """The server computes prompts, and every agent can find their pages."""
    before = server.agent_metric("kvpeer_pool_pages", state="committed")
    server.complete_all(prompts)
    eventually(
        lambda: server.agent_metric("kvpeer_pool_pages", state="committed") >= before + len(prompts) * N_PAGES,
        f"{server.name} stores its pages",
    )
    server.published()


def pulled_pages(server: Server) -> float:
    return server.agent_metric("kvpeer_fetch_pages_total", outcome="hit", transport="tcp")


def test_a_reader_pulls_what_a_producer_stored_and_says_what_plain_vllm_says(engines: Engines) -> None:
    producer, reader = engines.producer, engines.reader
    for n in range(2):
        tokens = prompt(f"tier {n}", N_TOKENS)
        expected = said_by_plain(engines, tokens)
        stored_by(producer, tokens)
        pages, cached = pulled_pages(reader), reader.cached_tokens("p2p")
        assert reader.complete(tokens) == expected
        assert pulled_pages(reader) - pages == N_PAGES
        assert reader.cached_tokens("p2p") - cached == N_PAGES * PAGE_TOKENS
    assert reader.metric("kvpeer_vllm_loaded_pages_total", outcome="hit") == 2 * N_PAGES
    assert reader.metric("vllm:kv_offload_tiering_promotion_job_failures_total") == 0
    assert producer.metric("kvpeer_vllm_published_pages_total", outcome="written") >= 2 * N_PAGES
    assert producer.metric("vllm:kv_offload_tiering_cascade_job_failures_total") == 0


def test_wrong_bytes_would_have_been_seen(engines: Engines) -> None:
    differing = 0
    for n in range(2):
        tokens = prompt(f"tier control {n}", N_TOKENS)
        expected = said_by_plain(engines, tokens)
        stored_by(engines.producer, tokens)
        differing += engines.flipping.complete(tokens) != expected
    assert engines.flipping.cached_tokens("p2p") == 2 * N_PAGES * PAGE_TOKENS
    assert differing == 2


def test_requests_at_once_load_and_store_side_by_side(engines: Engines) -> None:
    prompts = [prompt(f"tier at once {n}", N_TOKENS) for n in range(4)]
    stored_by(engines.producer, *prompts)
    before = engines.reader.cached_tokens("p2p")
    engines.reader.complete_all(prompts)
    assert engines.reader.cached_tokens("p2p") - before == 4 * N_PAGES * PAGE_TOKENS
    # One by one and from pages that were pulled: sums of a batch are made in another order, and may differ.
    for tokens in prompts:
        assert engines.reader.complete(tokens) == said_by_plain(engines, tokens)


def test_few_tokens_are_computed_rather_than_pulled(engines: Engines) -> None:
    tokens = prompt("tier short", 512 - PAGE_TOKENS)
    expected = said_by_plain(engines, tokens)
    engines.producer.complete(tokens)
    engines.producer.published()
    before = pulled_pages(engines.reader)
    assert engines.reader.complete(tokens) == expected
    assert pulled_pages(engines.reader) == before


def test_corrupt_pages_are_caught_and_computed(engines: Engines) -> None:
    producer, reader = engines.producer, engines.reader
    tokens = prompt("tier corrupt", N_TOKENS)
    expected = said_by_plain(engines, tokens)
    stored_by(producer, tokens)
    flip_pool(producer.socket)
    before = reader.cached_tokens("p2p")
    assert reader.complete(tokens) == expected
    assert reader.cached_tokens("p2p") == before
    assert reader.agent_metric("kvpeer_transport_asked_pages_total", outcome="corrupt") > 0
    assert reader.metric("vllm:kv_offload_tiering_promotion_job_failures_total") == 1, "asked once, not for ever"


def test_a_frozen_peer_costs_at_most_the_deadlines(engines: Engines) -> None:
    producer, reader = engines.producer, engines.reader
    tokens = prompt("tier frozen", N_TOKENS)
    expected = said_by_plain(engines, tokens)
    stored_by(producer, tokens)
    alone_ms = reader.stream(prompt("tier nobody has this", N_TOKENS)).total_ms
    before = reader.cached_tokens("p2p")
    with stopped(producer.agent_pid()):
        answer = reader.stream(tokens)
    assert answer.tokens == expected
    assert reader.cached_tokens("p2p") == before
    assert answer.total_ms <= alone_ms + (LOOKUP_TIMEOUT_S + LOAD_TIMEOUT_S + SLACK_S) * 1000


def test_a_peer_that_is_killed_costs_a_recompute_and_nothing_else(engines: Engines) -> None:
    producer, reader = engines.producer, engines.reader
    prompts = [prompt(f"tier killed {n}", N_TOKENS) for n in range(2)]
    expected = [said_by_plain(engines, tokens) for tokens in prompts]
    stored_by(producer, *prompts)
    os.kill(producer.agent_pid(), signal.SIGKILL)
    assert [reader.complete(tokens) for tokens in prompts] == expected
    # The producer goes on as well, and has an agent again after a while.
    eventually(lambda: producer.has_agent(), "the producer has an agent again")
    tokens = prompt("tier after", N_TOKENS)
    stored_by(producer, tokens)
    before = pulled_pages(reader)
    assert reader.complete(tokens) == said_by_plain(engines, tokens)
    assert pulled_pages(reader) - before == N_PAGES


def test_after_a_reset_with_the_connector_nothing_of_before_is_found(engines: Engines) -> None:
    producer, reader = engines.producer, engines.reader
    tokens = prompt("tier reset", N_TOKENS)
    stored_by(producer, tokens)
    producer.reset_prefix_cache(with_connector=True)
    eventually(lambda: producer.agent_metric("kvpeer_pool_pages", state="committed") == 0, "the pool is empty")
    before = pulled_pages(reader)
    assert reader.complete(tokens) == said_by_plain(engines, tokens)
    assert pulled_pages(reader) == before


def test_nothing_went_wrong_inside(engines: Engines) -> None:
    for server in (engines.producer, engines.reader, engines.flipping):
        assert server.metric("kvpeer_vllm_errors_total") == 0, server.log_tail()
