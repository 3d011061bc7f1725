"""Real vLLM engines over their life: out of blocks, restarted, reset, on two ranks, and started wrongly."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from engines.harness import PAGE_TOKENS, Fleet, Server, eventually, prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(700)]

N_PAGES = 20
N_TOKENS = N_PAGES * PAGE_TOKENS + 5

BLOCK_BYTES = 2 * 2 * 2 * 64 * 2 * PAGE_TOKENS
"""A block of the tiny model: layers x (K, V) x heads x head size x bytes x tokens."""

N_CRAMPED_BLOCKS = 56


@dataclass
class Engines:
    cramped: Server
    roomy: Server
    two_ranks: Server
    wrong_policy: Server


@pytest.fixture(scope="module")
def engines(fleet: Fleet) -> Engines:
    """`cramped` has blocks for some prompts, `two_ranks` runs with tensor parallelism; the last one must not start."""
    engines = Engines(
        cramped=fleet.start("cramped", "--max-model-len", "1024", kv_cache_bytes=N_CRAMPED_BLOCKS * BLOCK_BYTES),
        roomy=fleet.start("roomy"),
        two_ranks=fleet.start("two-ranks", "--tensor-parallel-size", "2"),
        wrong_policy=fleet.start("wrong-policy", transfer={"kv_load_failure_policy": "fail"}),
    )
    for server in (engines.cramped, engines.roomy, engines.two_ranks):
        server.wait_ready()
    return engines


def test_out_of_blocks_an_engine_preempts_and_still_publishes_only_what_is_right(engines: Engines) -> None:
    cramped, roomy = engines.cramped, engines.roomy
    # Four prompts of 10 pages fit, what they generate does not.
    prompts = [prompt(f"cramped {n}", 10 * PAGE_TOKENS + 5) for n in range(5)]
    cramped.complete_all(prompts, n_tokens=150)
    assert cramped.metric("vllm:num_preemptions_total") > 0
    cramped.published()
    assert cramped.metric("kvpeer_vllm_errors_total") == 0
    for n, tokens in enumerate(prompts):
        whole = tokens + prompt(f"more {n}", 10 * PAGE_TOKENS)
        expected = cramped.complete(whole)
        cramped.published()
        before = roomy.cached_tokens("p2p")
        assert roomy.complete(whole) == expected
        assert roomy.cached_tokens("p2p") - before >= 512


def test_an_engine_that_starts_again_finds_its_pool_warm(engines: Engines, fleet: Fleet) -> None:
    before = engines.roomy
    tokens = prompt("restarted", N_TOKENS)
    before.complete(tokens)
    before.published()
    expected = before.complete(tokens)
    agent = before.agent_pid()
    before.stop()
    after = engines.roomy = fleet.start("roomy")
    after.wait_ready()
    assert after.agent_pid() == agent
    assert after.complete(tokens) == expected
    assert after.cached_tokens("host") == N_PAGES * PAGE_TOKENS


def test_two_ranks_keep_the_two_parts_of_a_page(engines: Engines) -> None:
    engine = engines.two_ranks
    tokens = prompt("two ranks", N_TOKENS)
    engine.complete(tokens)
    engine.published()
    expected = engine.complete(tokens)
    engine.reset_prefix_cache()
    assert engine.complete(tokens) == expected
    assert engine.cached_tokens("host") == N_PAGES * PAGE_TOKENS
    assert engine.metric("kvpeer_vllm_loaded_pages_total", outcome="hit") == 2 * N_PAGES, "each rank counts its parts"


def test_engines_with_other_parts_do_not_share(engines: Engines) -> None:
    tokens = prompt("two ranks", N_TOKENS)
    before = engines.roomy.cached_tokens("p2p")
    engines.roomy.complete(tokens)
    assert engines.roomy.cached_tokens("p2p") == before


def test_after_a_reset_with_the_connector_nothing_of_before_is_found(engines: Engines) -> None:
    engine = engines.two_ranks
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


def test_a_wrong_start_ends_with_a_message_that_names_the_fix(engines: Engines) -> None:
    assert '"kv_load_failure_policy": "recompute"' in engines.wrong_policy.wait_ended()
