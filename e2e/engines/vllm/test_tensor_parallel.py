"""Real vLLM engines with two ranks: a page has two parts, pulled by both ranks from a peer that has two as well."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from engines.harness import PAGE_TOKENS, Fleet, Server, eventually, prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(700)]

N_PAGES = 20
N_TOKENS = N_PAGES * PAGE_TOKENS + 5

PATIENT = {"lookup_timeout_s": 3.0}
"""Five ranks spin on the cores of the least machine, and an agent's answer took 0.2 s of the default's 0.25 there."""


@dataclass
class Engines:
    producer: Server
    reader: Server
    one_rank: Server


@pytest.fixture(scope="module")
def engines(fleet: Fleet) -> Engines:
    """`producer` and `reader` run with tensor parallelism."""
    engines = Engines(
        producer=fleet.start("two-ranks", "--tensor-parallel-size", "2", extra=PATIENT),
        reader=fleet.start("two-ranks-too", "--tensor-parallel-size", "2", extra=PATIENT),
        one_rank=fleet.start("one-rank"),
    )
    for server in fleet.servers:
        server.wait_ready()
    return engines


def test_two_ranks_keep_the_two_parts_of_a_page(engines: Engines) -> None:
    engine = engines.producer
    tokens = prompt("two ranks", N_TOKENS)
    engine.complete(tokens)
    engine.published()
    expected = engine.complete(tokens)
    engine.reset_prefix_cache()
    assert engine.complete(tokens) == expected
    assert engine.cached_tokens("host") == N_PAGES * PAGE_TOKENS
    assert engine.metric("kvpeer_vllm_loaded_pages_total", outcome="hit") == 2 * N_PAGES, "each rank counts its parts"


def test_two_ranks_pull_from_two_ranks_of_a_peer_and_say_the_same(engines: Engines) -> None:
    producer, reader = engines.producer, engines.reader
    for n in range(2):
        tokens = prompt(f"from two ranks {n}", N_TOKENS)
        producer.complete(tokens)
        producer.published()
        expected = producer.complete(tokens)
        before = reader.cached_tokens("p2p")
        assert reader.complete(tokens) == expected
        assert reader.cached_tokens("p2p") - before == N_PAGES * PAGE_TOKENS
    assert reader.metric("kvpeer_vllm_loaded_pages_total", outcome="hit") == 2 * 2 * N_PAGES, "each rank its parts"
    for server in (producer, reader):
        assert server.metric("kvpeer_vllm_errors_total") == 0


def test_engines_with_other_parts_do_not_share(engines: Engines) -> None:
    tokens = prompt("two ranks", N_TOKENS)
    before = engines.one_rank.cached_tokens("p2p")
    engines.one_rank.complete(tokens)
    assert engines.one_rank.cached_tokens("p2p") == before


def test_after_a_reset_with_the_connector_nothing_of_before_is_found(engines: Engines) -> None:
    engine = engines.producer
    tokens = prompt("reset", N_TOKENS)
    engine.complete(tokens)
    engine.published()
    assert engine.agent_metric("kvpeer_pool_pages", state="committed") > 0
    engine.reset_prefix_cache(with_connector=True)
    eventually(lambda: engine.agent_metric("kvpeer_pool_pages", state="committed") == 0, "the pool is empty")
    before = engine.cached_tokens("host")
    answer = engine.complete(tokens)
    assert engine.cached_tokens("host") == before
    # It shares with itself again, under keys that no other engine has.
    engine.published()
    engine.reset_prefix_cache()
    assert engine.complete(tokens) == answer
    assert engine.cached_tokens("host") - before == N_PAGES * PAGE_TOKENS
