"""What the agent is told of each request, for people who ask later why it did not hit."""

from __future__ import annotations

from kvpeer.core.sources import Offer
from kvpeer.engines.vllm.metadata import LoadReport, StepReport
from kvpeer.model import AgentId
from requests_of_vllm import PAGE_TOKENS, FakeRequest
from scheduler_of_vllm import Engine

PRODUCER = AgentId(b"p" * 16)


def test_a_pull_is_told_with_who_held_what_and_what_came_of_it(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 4)
    engine.locator.answer = lambda chain: [1, 2, 2, 2]
    engine.locator.offers = (Offer(PRODUCER, 4, 0),)
    engine.side.request_arrived(request)
    n_tokens = engine.match(request)
    engine.allocate(request, n_tokens)
    orders = engine.step()
    engine.side.step_ended(StepReport(orders.step, [LoadReport("r", 4, 0.25, is_aborted=False)]))
    engine.side.loads_ended(["r"])
    (trace,) = engine.told
    assert (trace.reason, trace.outcome, trace.loaded_tokens) == ("decision.pull", "loaded", 4 * PAGE_TOKENS)
    assert (trace.local_tokens, trace.resident_tokens, trace.reachable_tokens) == (0, PAGE_TOKENS, 4 * PAGE_TOKENS)
    assert (trace.holders, trace.source) == (PRODUCER, PRODUCER)
    engine.side.finished("r")
    assert len(engine.told) == 1


def test_a_request_that_found_nothing_is_told_with_why(engine: Engine) -> None:
    engine.locator.reason = "unsure"
    engine.start(FakeRequest.of_pages("r", 4))
    (trace,) = engine.told
    assert (trace.reason, trace.outcome, trace.lookup_reason) == ("decision.nothing_found", "computed", "unsure")


def test_a_request_that_the_agent_is_not_asked_about_is_told_with_why(engine: Engine) -> None:
    short, lora, lost = (FakeRequest.of_pages(name, 4) for name in ("short", "lora", "lost"))
    lora.lora_request = object()
    engine.side.request_arrived(lora)
    engine.side.request_arrived(short)
    assert engine.side.match(short, 4 * PAGE_TOKENS) == 0
    engine.side.request_arrived(lost)
    engine.locator.healthy = False
    assert engine.side.match(lost, 0) == 0
    assert engine.side.match(lost, 0) == 0
    assert {trace.request: trace.reason for trace in engine.told} == {
        "lora": "request.lora",
        "short": "request.local_hit",
        "lost": "request.no_agent",
    }
    assert len(engine.told) == 3
