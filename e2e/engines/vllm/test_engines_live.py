"""Real vLLM engines over their life: out of blocks, restarted, and started wrongly."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from engines.harness import PAGE_TOKENS, Fleet, Server, prompt

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
    wrong_policy: Server


@pytest.fixture(scope="module")
def engines(fleet: Fleet) -> Engines:
    """`cramped` has blocks for some prompts; the last one must not start."""
    engines = Engines(
        cramped=fleet.start("cramped", "--max-model-len", "1024", kv_cache_bytes=N_CRAMPED_BLOCKS * BLOCK_BYTES),
        roomy=fleet.start("roomy"),
        wrong_policy=fleet.start("wrong-policy", transfer={"kv_load_failure_policy": "fail"}),
    )
    for server in (engines.cramped, engines.roomy):
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


def test_a_wrong_start_ends_with_a_message_that_names_the_fix(engines: Engines) -> None:
    assert '"kv_load_failure_policy": "recompute"' in engines.wrong_policy.wait_ended()
