"""Real SGLang servers that share pages: the same tokens with the same probabilities come out, and the pages really came
from the other server."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from engines.harness import eventually, prompt, stopped
from engines.sglang.servers import PAGE_TOKENS, SGLangFleet, SGLangServer, make_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

N_PAGES = 12
N_TOKENS = N_PAGES * PAGE_TOKENS + 5
"""SGLang looks into storage for prompts of 256 tokens or more."""

EXISTS_S, GET_S = 0.5, 1.5
"""Deadlines of the server that has to do with a frozen peer."""


@dataclass
class Servers:
    producer: SGLangServer
    reader: SGLangServer
    other_weights: SGLangServer


@pytest.fixture(scope="module")
def servers(sglang_fleet: SGLangFleet) -> Servers:
    """Three servers whose agents know each other; the third has other weights under the same name and shapes."""
    other_model = make_model(sglang_fleet.folder, sglang_fleet.python, seed=2)
    deadlines = {
        "KVPEER_SGLANG_EXISTS_TIMEOUT_S": str(EXISTS_S),
        "KVPEER_SGLANG_GET_TIMEOUT_BASE_S": str(GET_S),
        "KVPEER_SGLANG_GET_TIMEOUT_MAX_S": str(GET_S),
    }
    servers = Servers(
        sglang_fleet.serve("producer"),
        sglang_fleet.serve("reader", environment=deadlines),
        sglang_fleet.serve("other", model=other_model),
    )
    sglang_fleet.ready(*sglang_fleet.servers)
    return servers


def test_a_cold_server_restores_what_another_computed_and_says_the_same(servers: Servers) -> None:
    for n in range(3):
        tokens = prompt(f"shared {n}", N_TOKENS)
        servers.producer.compute(tokens)
        own = servers.producer.generate(tokens)
        assert own.cached["device"] == N_PAGES * PAGE_TOKENS
        restored = servers.reader.generate(tokens)
        everything = {"device": 0, "host": 0, "storage": N_PAGES * PAGE_TOKENS}
        assert restored.cached == everything, servers.reader.agent_story()
        assert restored.tokens == own.tokens
        assert restored.logprobs == pytest.approx(own.logprobs, abs=1e-6)
    assert servers.reader.metric("sglang:storage_prefetch_unfulfilled_tokens_total", reason="storage_transfer") == 0


def test_a_server_restores_its_own_pages_after_a_flush(servers: Servers) -> None:
    tokens = prompt("own", N_TOKENS)
    servers.producer.compute(tokens)
    own = servers.producer.generate(tokens)
    servers.producer.flush()
    again = servers.producer.generate(tokens)
    assert again.cached["storage"] == N_PAGES * PAGE_TOKENS, servers.producer.agent_story()
    assert again.tokens == own.tokens


def test_a_model_with_the_same_name_and_shapes_and_other_weights_shares_nothing(servers: Servers) -> None:
    tokens = prompt("other weights", N_TOKENS)
    computed = servers.producer.compute(tokens)
    other = servers.other_weights.generate(tokens)
    assert other.cached["storage"] == 0
    assert other.tokens != computed.tokens, "with these pages it would say something else"


def test_numbers_of_reads_and_writes_are_in_the_servers_own_metrics(servers: Servers) -> None:
    tokens = prompt("numbers", N_TOKENS)
    servers.producer.compute(tokens)
    servers.reader.generate(tokens)
    assert servers.producer.metric("kvpeer_sglang_pages_total", operation="set", outcome="stored") >= N_PAGES
    assert servers.reader.metric("kvpeer_sglang_pages_total", operation="get", outcome="hit") >= N_PAGES
    assert servers.reader.metric("sglang:prefetch_bandwidth_count") > 0
    assert servers.producer.metric("sglang:backup_bandwidth_count") > 0
    for server in (servers.producer, servers.reader):
        assert server.metric("kvpeer_sglang_errors_total") == 0


def test_detach_and_attach_at_run_time(servers: Servers) -> None:
    tokens = prompt("attached", N_TOKENS)
    servers.producer.compute(tokens)
    status, text = servers.reader.detach()
    assert status == 200, text
    assert servers.reader.generate(prompt("detached", N_TOKENS)).cached["storage"] == 0
    for _ in range(2):
        status, text = servers.reader.attach()
        assert status == 200, text
        status, text = servers.reader.detach()
        assert status == 200, text
    status, text = servers.reader.attach()
    assert status == 200, text

    def is_restored() -> bool:
        servers.reader.flush()
        return servers.reader.generate(tokens).cached["storage"] == N_PAGES * PAGE_TOKENS

    eventually(is_restored, "the reader has its agent again and restores the prompt")


def test_cleared_pages_are_not_restored(servers: Servers) -> None:
    tokens = prompt("cleared", N_TOKENS)
    servers.producer.compute(tokens)
    status, text = servers.producer.clear()
    assert status == 200, text
    servers.producer.flush()
    assert servers.producer.generate(tokens).cached["storage"] == 0


def test_a_frozen_peer_costs_its_deadlines_at_most(servers: Servers) -> None:
    frozen_prompt, live_prompt = prompt("frozen", N_TOKENS), prompt("live", N_TOKENS)
    servers.producer.compute(frozen_prompt)
    servers.reader.compute(live_prompt)
    servers.reader.flush()
    usual = max(servers.reader.generate(prompt(f"usual {n}", N_TOKENS)).seconds for n in range(3))
    with stopped(servers.producer.agent_pid()):
        recomputed = servers.reader.generate(frozen_prompt)
        live = servers.reader.generate(live_prompt)
    assert recomputed.seconds < usual + EXISTS_S + GET_S + 2.0
    assert live.cached["storage"] == N_PAGES * PAGE_TOKENS, "pages at live agents are found meanwhile"
    assert live.seconds < usual + EXISTS_S + GET_S + 2.0
