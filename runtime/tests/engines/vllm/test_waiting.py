"""How long requests wait for answers to their lookups, and what becomes of those that come late."""

from __future__ import annotations

import threading

import pytest
from kvpeer.engines.vllm import patience
from kvpeer.engines.vllm.lookups import LOOKUP_THREADS
from kvpeer.engines.vllm.worth import Worth
from requests_of_vllm import PAGE_TOKENS, FakeRequest
from scheduler_of_vllm import Engine


def test_a_request_waits_for_its_lookup_without_blocking_the_scheduler(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 4)
    engine.locator.may_answer.clear()
    engine.locator.answer = lambda chain: [2] * len(chain)
    engine.side.request_arrived(request)
    assert engine.side.match(request, 0) is None
    assert engine.side.match(request, 0) is None
    engine.locator.may_answer.set()
    assert engine.match(request) == 4 * PAGE_TOKENS
    assert len(engine.locator.asked) == 1


def test_an_idle_engine_has_a_quick_answer_in_the_same_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "IDLE_PATIENCE_S", 30.0)
    engine.locator.answer = lambda chain: [2] * len(chain)
    request = FakeRequest.of_pages("r", 4)
    engine.side.request_arrived(request)
    assert engine.side.match(request, 0) == 4 * PAGE_TOKENS


@pytest.mark.parametrize("is_shared", [True, False])
def test_an_engine_that_computed_nothing_yet_to_compare_with_waits_for_no_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    computing, arrived = FakeRequest.of_pages("computing", 4), FakeRequest.of_pages("arrived", 4)
    computing.resumable = not is_shared
    engine.start(computing)
    engine.locator.may_answer.clear()
    monkeypatch.setattr(patience, "IDLE_PATIENCE_S", 30.0)
    engine.side.request_arrived(arrived)
    assert engine.side.match(arrived, 0) is None
    engine.side.finished("computing")
    later = FakeRequest.of_pages("later", 4)
    engine.side.request_arrived(later)
    threading.Timer(0.1, engine.locator.may_answer.set).start()
    assert engine.side.match(later, 0) == 0, "it is idle again, and waits"


def test_an_engine_with_long_steps_has_a_quick_answer_in_the_same_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    computing, arrived = FakeRequest.of_pages("computing", 4), FakeRequest.of_pages("arrived", 4)
    engine.start(computing)
    engine.step((computing, 0, 64, 0))
    engine.locator.answer = lambda chain: [2] * len(chain)
    monkeypatch.setattr(patience, "IDLE_PATIENCE_S", 30.0)
    engine.clock.now += 30 / patience.STEP_SHARE
    engine.step((computing, 64, 1, 0))
    engine.side.request_arrived(arrived)
    assert engine.side.match(arrived, 0) == 4 * PAGE_TOKENS


def test_a_lookup_that_is_not_answered_by_its_deadline_is_a_miss(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 4)
    engine.locator.may_answer.clear()
    engine.side.request_arrived(request)
    assert engine.side.match(request, 0) is None
    engine.clock.now += engine.side.settings.lookup_timeout_s + 0.001
    assert engine.side.match(request, 0) == 0
    assert engine.counts()["lookups"] == {"timeout": 1}
    engine.locator.may_answer.set()


def test_where_nothing_is_ever_found_a_busy_engine_computes_at_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(120):
        missing = FakeRequest.of_pages(f"missing {number}", 64)
        engine.start(missing)
        engine.compute(missing, seconds=0.5)
        engine.side.finished(missing.request_id)
    engine.start(FakeRequest.of_pages("computing", 4))
    learnt = threading.Event()
    learn = Worth.learn
    monkeypatch.setattr(Worth, "learn", lambda *found: (learn(*found), learnt.set()))
    engine.counts()
    engine.locator.answer = lambda chain: [2] * len(chain)
    engine.locator.may_answer.clear()
    late, next_one = FakeRequest.of_pages("late", 64), FakeRequest.of_pages("next", 1024)
    engine.side.request_arrived(late)
    assert engine.side.match(late, 0) == 0
    assert engine.counts()["lookups"] == {"not_awaited": 1}
    engine.locator.may_answer.set()
    assert learnt.wait(10)
    engine.locator.may_answer.clear()
    engine.side.request_arrived(next_one)
    assert engine.side.match(next_one, 0) is None, (
        "an answer with pages came, if too late, so it is waited for the next"
    )
    engine.locator.may_answer.set()


@pytest.mark.parametrize("mode", ["off", "shadow"])
def test_pages_at_peers_are_worth_no_wait_while_they_are_not_pulled(mode: str) -> None:
    engine = Engine(mode=mode)
    engine.locator.answer = lambda chain: [2] * len(chain)
    for number in range(120):
        request = FakeRequest.of_pages(f"declined {number}", 64)
        engine.start(request)
        engine.compute(request, seconds=0.5)
        engine.side.finished(request.request_id)
    engine.start(FakeRequest.of_pages("computing", 4))
    engine.locator.may_answer.clear()
    request = FakeRequest.of_pages("r", 64)
    engine.side.request_arrived(request)
    assert engine.side.match(request, 0) == 0
    engine.locator.may_answer.set()
    engine.side.close()


def test_a_lookup_that_finds_nothing_is_counted_with_its_reason(engine: Engine) -> None:
    engine.locator.reason = "no_members"
    engine.start(FakeRequest.of_pages("r", 4))
    assert engine.counts()["lookups"] == {"no_members": 1}


def test_beyond_the_limit_of_deferred_requests_a_request_is_computed_at_once() -> None:
    engine = Engine(deferred_requests_max=2)
    engine.locator.may_answer.clear()
    requests = [FakeRequest.of_pages(str(n), 4) for n in range(3)]
    for request in requests:
        engine.side.request_arrived(request)
    assert [engine.side.match(request, 0) for request in requests] == [None, None, 0]
    assert engine.counts()["lookups"] == {"deferred_full": 1}
    engine.locator.may_answer.set()
    engine.side.close()


def test_an_answer_that_came_during_a_long_step_is_used(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 4)
    engine.locator.answer = lambda chain: [2] * len(chain)
    engine.locator.may_answer.clear()
    engine.side.request_arrived(request)
    assert engine.side.match(request, 0) is None
    engine.locator.may_answer.set()
    pause = threading.Event()
    while "lookups" not in engine.counts():  # counted when the answer is there; the test's own deadline ends this
        pause.wait(0.002)
    # Were it too old by then, it would be asked again at every such step, and its request would not run.
    engine.clock.now += 10
    assert engine.side.match(request, 0) == 4 * PAGE_TOKENS


def test_a_longer_local_hit_uses_the_same_answer_and_a_shorter_one_asks_again(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 6)
    engine.locator.answer = lambda chain: [2] * len(chain)
    engine.side.request_arrived(request)
    assert engine.match(request, 2 * PAGE_TOKENS) == 4 * PAGE_TOKENS
    assert engine.side.match(request, 4 * PAGE_TOKENS) == 2 * PAGE_TOKENS
    assert len(engine.locator.asked) == 1
    assert engine.match(request) == 6 * PAGE_TOKENS
    assert len(engine.locator.asked) == 2


def test_nothing_is_asked_while_the_agent_is_away(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 4)
    engine.locator.healthy = False
    engine.side.request_arrived(request)
    assert engine.side.match(request, 0) == 0
    assert engine.locator.asked == []


def test_lookups_that_hang_do_not_hold_up_the_next_one(engine: Engine) -> None:
    engine.locator.answer = lambda chain: [2] * len(chain)
    engine.locator.may_answer.clear()
    hanging = [FakeRequest.of_pages(str(n), 4) for n in range(LOOKUP_THREADS - 1)]
    for request in hanging:
        engine.side.request_arrived(request)
        assert engine.side.match(request, 0) is None
    eventually = threading.Event()
    while len(engine.locator.asked) < len(hanging):
        eventually.wait(0.002)
    hang, engine.locator.may_answer = engine.locator.may_answer, threading.Event()
    engine.locator.may_answer.set()
    request = FakeRequest.of_pages("r", 4)
    engine.side.request_arrived(request)
    assert engine.match(request) == 4 * PAGE_TOKENS
    hang.set()
