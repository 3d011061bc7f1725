"""SGLang on two ranks, and beside vLLM at one agent: each finds its own pages and no others."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from engines.harness import Server, eventually, prompt
from engines.sglang.servers import PAGE_TOKENS, SGLangFleet, SGLangServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

N_PAGES = 20
N_TOKENS = N_PAGES * PAGE_TOKENS + 5


@dataclass
class Servers:
    two_ranks: SGLangServer
    beside: SGLangServer
    vllm: Server


@pytest.fixture(scope="module")
def servers(sglang_fleet: SGLangFleet) -> Servers:
    """`beside` and `vllm` run the same model, and have one agent because they have one name."""
    servers = Servers(
        two_ranks=sglang_fleet.serve("two-ranks", "--tp-size", "2", environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}),
        beside=sglang_fleet.serve("beside"),
        vllm=sglang_fleet.start("beside"),
    )
    for server in sglang_fleet.servers:
        server.wait_ready()
    # Whichever of the two started the agent gave it its port.
    eventually(lambda: servers.beside.has_agent() or servers.vllm.has_agent(), "one of the two started the agent")
    port = servers.beside.agent_port if servers.beside.has_agent() else servers.vllm.agent_port
    servers.beside.agent_port = servers.vllm.agent_port = port
    eventually(servers.two_ranks.has_agent, "the other server has an agent")
    return servers


def test_two_ranks_restore_what_they_stored(servers: Servers) -> None:
    server = servers.two_ranks
    tokens = prompt("two ranks", N_TOKENS)
    server.compute(tokens, n_ranks=2)
    own = server.generate(tokens)
    server.flush()
    restored = server.generate(tokens)
    assert restored.cached["storage"] == N_PAGES * PAGE_TOKENS
    assert restored.tokens == own.tokens
    assert restored.logprobs == pytest.approx(own.logprobs, abs=1e-6)


def test_engines_with_other_ranks_do_not_share(servers: Servers) -> None:
    tokens = prompt("two ranks, one rank", N_TOKENS)
    servers.two_ranks.compute(tokens, n_ranks=2)
    assert servers.beside.generate(tokens).cached["storage"] == 0


def test_vllm_and_sglang_use_one_agent_and_never_each_others_pages(servers: Servers) -> None:
    assert servers.beside.agent_metric("kvpeer_agent_namespaces") == 2
    by_sglang, by_vllm = prompt("first sglang", N_TOKENS), prompt("first vllm", N_TOKENS)
    servers.beside.compute(by_sglang)
    servers.vllm.complete(by_vllm)
    servers.vllm.settled()
    before = servers.vllm.cached_tokens("host") + servers.vllm.cached_tokens("p2p")
    servers.vllm.complete(by_sglang)
    assert servers.vllm.cached_tokens("host") + servers.vllm.cached_tokens("p2p") == before
    assert servers.beside.generate(by_vllm).cached["storage"] == 0
    # Each finds its own.
    servers.beside.flush()
    assert servers.beside.generate(by_sglang).cached["storage"] == N_PAGES * PAGE_TOKENS
    servers.vllm.reset_prefix_cache()
    servers.vllm.complete(by_vllm)
    assert servers.vllm.cached_tokens("host") - before == N_PAGES * PAGE_TOKENS
