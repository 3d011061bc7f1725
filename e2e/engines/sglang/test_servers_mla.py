"""Real SGLang servers with a model of multi-head latent attention (MLA). What it keeps of a token is the same on all
tensor-parallel ranks: it is stored once, and servers share it whatever the number of their ranks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from engines.harness import prompt
from engines.sglang.servers import PAGE_TOKENS, Answer, SGLangFleet, SGLangServer, make_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

N_PAGES = 12
N_TOKENS = N_PAGES * PAGE_TOKENS + 5
EVERYTHING = {"device": 0, "host": 0, "storage": N_PAGES * PAGE_TOKENS}

LOGPROB_SLACK = 0.1
"""Two ranks add up in another order than one, in bfloat16. Over other pages a log-probability would be anything."""


@dataclass
class Servers:
    one_rank: SGLangServer
    two_ranks: SGLangServer


@pytest.fixture(scope="module")
def servers(sglang_fleet: SGLangFleet) -> Servers:
    """Two servers of one model whose agents know each other."""
    model = make_model(sglang_fleet.folder, sglang_fleet.python, family="minicpm3")
    bound = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    servers = Servers(
        sglang_fleet.serve("one-rank", model=model),
        sglang_fleet.serve("two-ranks", "--tp-size", "2", model=model, environment=bound),
    )
    sglang_fleet.ready(*sglang_fleet.servers)
    return servers


def restored_by(server: SGLangServer, tokens: list[int]) -> Answer:
    """Its answer, for which it had nothing of the prompt and got all of it from storage."""
    answer = server.generate(tokens)
    assert answer.cached == EVERYTHING, server.agent_story()
    return answer


def test_two_ranks_restore_all_that_one_computed(servers: Servers) -> None:
    tokens = prompt("latent, of one rank", N_TOKENS)
    servers.one_rank.compute(tokens)
    restored_by(servers.two_ranks, tokens)


def test_one_rank_restores_what_two_computed_and_stored_once(servers: Servers) -> None:
    tokens = prompt("latent, of two ranks", N_TOKENS)
    before = servers.two_ranks.agent_metric("kvpeer_publish_pages_total", outcome="written")
    servers.two_ranks.compute(tokens)
    own = servers.two_ranks.generate(tokens)
    assert servers.two_ranks.agent_metric("kvpeer_publish_pages_total", outcome="written") - before == N_PAGES
    restored = restored_by(servers.one_rank, tokens)
    assert restored.tokens[0] == own.tokens[0]
    assert restored.logprobs[0] == pytest.approx(own.logprobs[0], abs=LOGPROB_SLACK)
