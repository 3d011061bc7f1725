"""What a real vLLM engine tells of its requests, as `kvpeer explain` shows it minutes after the fact."""

from __future__ import annotations

import os
from typing import Any

import pytest
from engines.harness import PAGE_TOKENS, Fleet, Server, eventually, prompt
from kvpeer.client.questions import ask
from kvpeer.wire.messages import Inspect

pytestmark = [pytest.mark.engine, pytest.mark.timeout(700)]

N_PAGES = 20
N_TOKENS = N_PAGES * PAGE_TOKENS + 5


@pytest.fixture(scope="module")
def engine(fleet: Fleet) -> Server:
    server = fleet.start("alone")
    server.wait_ready()
    return server


def traces(engine: Server) -> list[dict[str, Any]]:
    """Of all requests, the youngest first; vLLM gives each an id that begins so."""
    agents = ask(Inspect("explain", "cmpl-"), os.environ, str(engine.socket))["agents"]
    return [trace for agent in agents for trace in agent["traces"]]


def test_an_agent_explains_what_was_computed_and_what_came_out_of_its_pool(engine: Server) -> None:
    tokens = prompt("explained", N_TOKENS)
    engine.complete(tokens)
    engine.published()
    engine.reset_prefix_cache()
    engine.complete(tokens)
    eventually(lambda: len(traces(engine)) == 2 and all(each["outcome"] for each in traces(engine)), "both are told")
    reload, computed = traces(engine)
    assert computed["decision"]["reason"] == "decision.nothing_found"
    assert "locate.no_members" in [each["reason"] for each in computed["reasons"]]
    assert reload["decision"]["reason"] == "decision.reload"
    assert reload["outcome"]["result"] == "loaded"
    assert reload["outcome"]["loaded_tokens"] == N_PAGES * PAGE_TOKENS
    assert reload["verified"]["hit"] >= N_PAGES
    assert [step["step"] for step in reload["steps"]][:1] == ["locate"]
