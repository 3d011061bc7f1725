"""Real vLLM engines that share pages: the same tokens come out, and the pages really came from the other one.

Outputs are compared with the producer's answer to the same prompt from its own cache, because KV that was made in
decoding and KV that was made in prefill may differ in the last bit.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import pytest
from engines.harness import PAGE_TOKENS, Fleet, Server, eventually, prompt, stopped

pytestmark = [pytest.mark.engine, pytest.mark.timeout(700)]

N_PAGES = 20
N_TOKENS = N_PAGES * PAGE_TOKENS + 5


@dataclass
class Engines:
    producer: Server
    reader: Server
    flipping: Server


@pytest.fixture(scope="module")
def engines(fleet: Fleet) -> Engines:
    """Three engines that find each other; `flipping` reverses the bytes of every page that it loads."""
    control = {"kv_connector": "FlippingConnector", "kv_connector_module_path": "engines.flipping_connector"}
    engines = Engines(
        fleet.start("producer"),
        fleet.start("reader"),
        fleet.start("flipping", transfer=control, extra={"publish": False}),
    )
    for server in fleet.servers:
        server.wait_ready()
    return engines


def computed_by(server: Server, tokens: list[int], n_tokens: int = 16) -> list[int]:
    """The server computes a prompt, and its pages can be had by others; returns its answer from its own cache."""
    server.complete(tokens, n_tokens)
    server.published()
    return server.complete(tokens, n_tokens)


def test_a_reader_pulls_what_a_producer_computed_and_says_the_same(engines: Engines) -> None:
    producer, reader = engines.producer, engines.reader
    for n in range(3):
        tokens = prompt(f"pull {n}", N_TOKENS)
        expected = computed_by(producer, tokens)
        before = reader.cached_tokens("p2p")
        assert reader.complete(tokens) == expected
        assert reader.cached_tokens("p2p") - before == N_PAGES * PAGE_TOKENS
    assert reader.metric("kvpeer_vllm_loaded_pages_total", outcome="hit") >= 3 * N_PAGES


def test_wrong_bytes_would_have_been_seen(engines: Engines) -> None:
    differing = 0
    for n in range(3):
        tokens = prompt(f"control {n}", N_TOKENS)
        expected = computed_by(engines.producer, tokens)
        differing += engines.flipping.complete(tokens) != expected
    assert engines.flipping.cached_tokens("p2p") == 3 * N_PAGES * PAGE_TOKENS
    assert differing == 3


def test_pages_made_while_generating_are_shared_too(engines: Engines) -> None:
    producer, reader = engines.producer, engines.reader
    tokens = prompt("generated", 2 * PAGE_TOKENS + 3)
    whole = tokens + producer.complete(tokens, N_TOKENS - len(tokens))
    producer.published()
    expected = producer.complete(whole)
    before = reader.cached_tokens("p2p")
    assert reader.complete(whole) == expected
    # The last token of the answer was sampled but never computed, so its page may be missing.
    assert reader.cached_tokens("p2p") - before >= (N_PAGES - 1) * PAGE_TOKENS


def test_few_tokens_are_computed_rather_than_pulled(engines: Engines) -> None:
    tokens = prompt("short", 512 - PAGE_TOKENS)
    expected = computed_by(engines.producer, tokens)
    before = engines.reader.cached_tokens("p2p")
    assert engines.reader.complete(tokens) == expected
    assert engines.reader.cached_tokens("p2p") == before
    assert engines.reader.metric("kvpeer_vllm_declined_tokens_total", reason="below_floor") > 0


def test_a_salt_separates_and_an_equal_salt_does_not(engines: Engines) -> None:
    producer, reader = engines.producer, engines.reader
    tokens = prompt("salted", N_TOKENS)
    producer.complete(tokens, cache_salt="one tenant")
    producer.published()
    before = reader.cached_tokens("p2p")
    reader.complete(tokens, cache_salt="another tenant")
    reader.complete(tokens)
    assert reader.cached_tokens("p2p") == before
    reader.complete(tokens, cache_salt="one tenant")
    assert reader.cached_tokens("p2p") - before == N_PAGES * PAGE_TOKENS


def test_the_own_pool_gives_back_what_the_engine_has_dropped(engines: Engines) -> None:
    producer = engines.producer
    tokens = prompt("own", N_TOKENS)
    expected = computed_by(producer, tokens)
    producer.reset_prefix_cache()
    before = producer.cached_tokens("host")
    assert producer.complete(tokens) == expected
    assert producer.cached_tokens("host") - before == N_PAGES * PAGE_TOKENS


def test_requests_at_once_load_and_publish_side_by_side(engines: Engines) -> None:
    prompts = [prompt(f"at once {n}", N_TOKENS) for n in range(8)]
    engines.producer.complete_all(prompts)
    engines.producer.published()
    before = engines.reader.cached_tokens("p2p")
    engines.reader.complete_all(prompts)
    assert engines.reader.cached_tokens("p2p") - before == 8 * N_PAGES * PAGE_TOKENS
    # Answers of a batch may differ in a close choice, because its sums are made in another order, whoever has the
    # pages. Asked one by one, both engines compute the same from the pages that they have: the reader's were pulled.
    device = engines.reader.cached_tokens("device")
    for tokens in prompts:
        assert engines.reader.complete(tokens) == engines.producer.complete(tokens)
    assert engines.reader.cached_tokens("device") - device == 8 * N_PAGES * PAGE_TOKENS


def test_both_sides_count_what_they_do_in_the_engines_own_metrics(engines: Engines) -> None:
    producer, reader = engines.producer, engines.reader
    assert producer.metric("kvpeer_vllm_published_pages_total", outcome="written") > 0
    assert producer.metric("kvpeer_vllm_publish_seconds_count") > 0
    assert reader.metric("kvpeer_vllm_lookups_total", outcome="hit") > 0
    assert reader.metric("kvpeer_vllm_lookup_seconds_count") > 0
    assert reader.metric("kvpeer_vllm_load_seconds_count") > 0
    assert reader.metric("kvpeer_vllm_accepted_tokens_total", source="peer") == reader.cached_tokens("p2p")
    assert reader.metric("vllm:external_prefix_cache_hits_total") > 0
    for server in (producer, reader):
        assert server.metric("kvpeer_vllm_errors_total") == 0


def test_an_abort_during_a_load_frees_its_blocks(engines: Engines) -> None:
    producer, reader = engines.producer, engines.reader
    tokens = prompt("aborted", N_TOKENS)
    expected = computed_by(producer, tokens)
    reader.settled()
    with stopped(producer.agent_pid()):
        connection = reader.begin(tokens)
        eventually(lambda: reader.metric("vllm:kv_cache_usage_perc") > 0, "the load has its blocks")
        connection.close()
        reader.settled()
    assert reader.complete(tokens) == expected
    assert reader.metric("kvpeer_vllm_errors_total") == 0


def test_a_producer_whose_agent_dies_costs_a_recompute_and_nothing_else(engines: Engines) -> None:
    producer, reader = engines.producer, engines.reader
    prompts = [prompt(f"killed {n}", N_TOKENS) for n in range(4)]
    kept = prompt("kept by the engine", N_TOKENS)
    expected = [computed_by(producer, tokens) for tokens in prompts]
    expected_kept = computed_by(producer, kept)
    agent = producer.agent_pid()
    with stopped(agent):
        connections = [reader.begin(tokens, 1) for tokens in prompts]
        eventually(lambda: reader.metric("vllm:kv_cache_usage_perc") > 0, "a load has its blocks")
        os.kill(agent, signal.SIGKILL)
        for connection in connections:
            assert connection.getresponse().status == 200
            connection.close()
    for tokens, answer in zip(prompts, expected, strict=True):
        assert reader.complete(tokens)[:1] == answer[:1]
    # The producer goes on as well, and has an agent again after a while.
    producer.complete(prompt("after", N_TOKENS))
    eventually(lambda: producer.has_agent(), "the producer has an agent again")
    # What the engine itself still has comes into the new pool with the next request that uses it.
    assert producer.complete(kept) == expected_kept
    producer.published()
    before = reader.cached_tokens("p2p")
    assert reader.complete(kept) == expected_kept
    assert reader.cached_tokens("p2p") - before == N_PAGES * PAGE_TOKENS
