"""What steps and loads took decides about later pulls."""

from __future__ import annotations

import pytest
from kvpeer.core.sources import Offer
from kvpeer.engines.vllm.lanes import Lane
from kvpeer.engines.vllm.metadata import LoadReport, StepReport
from kvpeer.model import AgentId
from requests_of_vllm import PAGE_TOKENS, FakeRequest
from scheduler_of_vllm import Engine


def computed(engine: Engine, n_tokens: int, seconds: float, n_steps: int = 10) -> None:
    """Steps of one request that compute so many tokens each."""
    request = FakeRequest.of_pages("computing", 1)
    for _ in range(n_steps):
        orders = engine.step((request, 0, n_tokens, 0))
        engine.clock.now += seconds
        engine.side.step_ended(StepReport(orders.step))


def pulled(engine: Engine, name: str, n_pages: int, *seconds_of_ranks: float) -> int:
    """A request whose pages are at a peer; returns how many tokens it pulled."""
    engine.locator.answer = lambda chain: [2] * len(chain)
    request = FakeRequest.of_pages(name, n_pages, prompt=name)
    engine.side.request_arrived(request)
    n_tokens = engine.match(request)
    engine.allocate(request, n_tokens)
    orders = engine.step()
    if n_tokens:
        report = StepReport(orders.step)
        for seconds in seconds_of_ranks:
            report.aggregate(StepReport(orders.step, [LoadReport(name, n_pages, seconds, is_aborted=False)]))
        engine.side.step_ended(report)
        engine.side.loads_ended([name])
    engine.side.finished(name)
    return n_tokens


def test_what_steps_and_loads_take_decides_whether_pages_are_pulled(engine: Engine) -> None:
    computed(engine, 1024, seconds=0.01)
    tokens = [pulled(engine, f"slow{n}", 64, 0.4, 0.5) for n in range(30)]
    assert tokens[0] == 64 * PAGE_TOKENS
    assert tokens[8:] == [0] * 22
    counts = engine.counts()
    assert counts["pull_effect"]["lost"] > 3
    assert set(counts["decisions"]) <= {"pull", "not_worth_it", "pair_guarded"}


def test_loads_that_fail_for_a_reason_of_this_engine_turn_nothing_off(engine: Engine) -> None:
    computed(engine, 1024, seconds=0.5)
    for n in range(30):
        request = FakeRequest.of_pages(f"r{n}", 64, prompt=f"r{n}")
        engine.locator.answer = lambda chain: [2] * len(chain)
        engine.side.request_arrived(request)
        assert engine.match(request) == 64 * PAGE_TOKENS
        engine.allocate(request, 64 * PAGE_TOKENS)
        failed = LoadReport(f"r{n}", 0, 1.0, is_aborted=False, is_local_fault=True)
        engine.side.step_ended(StepReport(engine.step().step, [failed]))
        engine.side.loads_ended([f"r{n}"])
        engine.side.finished(f"r{n}")
    assert "pull_effect" not in engine.counts()


def test_pages_whose_pulls_pay_go_on_being_pulled(engine: Engine) -> None:
    computed(engine, 1024, seconds=0.5)
    assert [pulled(engine, f"quick{n}", 64, 0.01) for n in range(30)] == [64 * PAGE_TOKENS] * 30
    assert engine.counts()["pull_effect"]["saved"] > 10


def test_in_shadow_mode_nothing_is_pulled_and_the_saving_is_counted() -> None:
    engine = Engine(mode="shadow")
    try:
        computed(engine, 1024, seconds=0.5)
        assert [pulled(engine, f"r{n}", 64) for n in range(3)] == [0, 0, 0]
        counts = engine.counts()
        assert counts["decisions"] == {"shadow": 3}
        assert counts["shadow_effect"]["saved"] > 1
    finally:
        engine.side.close()


def test_without_measured_costs_the_floor_alone_decides() -> None:
    engine = Engine(measured_costs=False)
    try:
        computed(engine, 1024, seconds=0.001)
        assert [pulled(engine, f"r{n}", 64, 1.0) for n in range(30)] == [64 * PAGE_TOKENS] * 30
    finally:
        engine.side.close()


def test_a_request_that_is_asked_about_again_is_counted_once(engine: Engine) -> None:
    engine.locator.answer = lambda chain: [2] * len(chain)
    request = FakeRequest.of_pages("r", 4)
    engine.side.request_arrived(request)
    for _ in range(5):
        engine.match(request)
    assert engine.counts()["decisions"] == {"pull": 1}


def test_tokens_that_are_declined_are_counted_once_however_often_the_request_is_asked_about() -> None:
    engine = Engine(min_cached_token_delta=1000)
    try:
        engine.locator.answer = lambda chain: [2] * len(chain)
        request = FakeRequest.of_pages("r", 4)
        engine.side.request_arrived(request)
        for _ in range(5):
            assert engine.match(request) == 0
        assert engine.counts()["declined_tokens"] == {"below_floor": 4 * PAGE_TOKENS}
    finally:
        engine.side.close()


A, B = AgentId(b"a" * 16), AgentId(b"b" * 16)


def test_the_load_names_the_producer_that_was_chosen(engine: Engine) -> None:
    engine.locator.offers = (Offer(A, 64, 0),)
    engine.locator.answer = lambda chain: [2] * len(chain)
    request = FakeRequest.of_pages("r", 64)
    engine.side.request_arrived(request)
    engine.allocate(request, engine.match(request))
    (order,) = engine.step().loads
    assert (order.source, order.lane) == (A, Lane.PULL)


def test_steps_that_check_drafts_are_not_learnt_as_prompts(engine: Engine) -> None:
    request = FakeRequest.of_pages("drafting", 1)
    for n_draft, is_learnt in ((199, False), (0, True)):
        orders = engine.step((request, 0, 200, n_draft))
        engine.side.step_ended(StepReport(orders.step))
        assert ("measured" in engine.counts()) is is_learnt


@pytest.mark.parametrize(("statuses", "n_reloads"), [([1, 1, 2, 1], 2), ([2, 1, 1, 2], 0), ([1, 1, 1, 1], 0)])
def test_the_load_says_which_of_its_pages_are_reloaded_before_a_pull(
    engine: Engine, statuses: list[int], n_reloads: int
) -> None:
    engine.locator.answer = lambda chain: statuses
    request = FakeRequest.of_pages("r", 5)
    engine.side.request_arrived(request)
    engine.allocate(request, engine.match(request))
    (order,) = engine.step().loads
    assert order.n_reloads == n_reloads


def test_from_a_slow_producer_nothing_is_pulled_while_another_one_has_the_pages_too(engine: Engine) -> None:
    computed(engine, 1024, seconds=0.1)
    for n in range(12):
        for producer, seconds in ((A, 0.5), (B, 0.01)):
            engine.locator.offers = (Offer(producer, 64, 0),)
            pulled(engine, f"{producer[:1]!r}{n}", 64, seconds)
    engine.counts()
    engine.locator.offers = (Offer(A, 64, 0),)
    assert pulled(engine, "slow alone", 64) == 0
    engine.locator.offers = (Offer(A, 64, 0), Offer(B, 64, 0))
    assert [pulled(engine, f"both {n}", 64, 0.01) for n in range(20)] == [64 * PAGE_TOKENS] * 20
    assert engine.counts()["decisions"] == {"not_worth_it": 1, "pull": 20}
