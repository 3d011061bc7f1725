"""What a step waits for lookups is a small share of a step, and a request waits no longer than answers are worth."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpeer.engines.pace import Pace
from kvpeer.engines.vllm.patience import IDLE_PATIENCE_S, STEP_SHARE, Patience
from kvpeer.engines.vllm.worth import SHARE_MIN, Worth

N_TOKENS = 1000

NOTHING, ALL = np.zeros(10, np.bool_), np.ones(10, np.bool_)


class Waits:
    """A clock, and waits that take as long as the answers do, if they may."""

    def __init__(self) -> None:
        self.now = 0.0
        self.patience = Patience(lambda: self.now, Pace())

    def step(self, took_s: float) -> None:
        self.now += took_s
        self.patience.step_scheduled()

    def wait(self, answer_s: float = 60.0, *, is_idle: bool = False) -> float:
        began_at = self.now

        def waiting(seconds: float) -> None:
            self.now += min(seconds, answer_s)

        self.patience.of_request(N_TOKENS, is_idle=is_idle).wait(waiting)
        return self.now - began_at


def test_an_idle_engine_waits_each_time() -> None:
    waits = Waits()
    assert [round(waits.wait(is_idle=True), 9) for _ in range(2)] == [IDLE_PATIENCE_S] * 2


def test_nothing_is_waited_before_it_is_known_how_long_steps_take() -> None:
    waits = Waits()
    waits.step(1.0)
    assert waits.wait() == 0


@given(st.lists(st.tuples(st.floats(0, 10), st.lists(st.floats(0, 1), max_size=5)), max_size=20))
def test_all_lookups_of_a_step_wait_no_more_than_its_share(steps: list[tuple[float, list[float]]]) -> None:
    waits = Waits()
    waits.step(1.0)
    began_at = waits.now
    for took_s, answers_s in steps:
        waits.step(took_s)
        step_s, began_at = waits.now - began_at, waits.now
        assert sum(map(waits.wait, answers_s)) <= min(IDLE_PATIENCE_S, STEP_SHARE * step_s) + 1e-9


def test_quick_answers_leave_time_for_others() -> None:
    waits = Waits()
    waits.step(1.0)
    waits.step(1.0)
    assert waits.wait(0.001) > 0
    assert waits.wait(0.001) > 0
    assert waits.wait() > 0
    assert waits.wait() == 0


def test_whoever_cannot_wait_is_not_asked_to() -> None:
    asked: list[float] = []
    waiting: Callable[[float], object] = asked.append
    Waits().patience.of_request(N_TOKENS, is_idle=False).wait(waiting)
    assert asked == []


def of_pace(*, token_s: float, step_s: float = 0.0) -> Patience:
    return Patience(lambda: 0.0, Pace(step_s, token_s))


def test_before_the_engines_pace_is_known_a_request_may_wait() -> None:
    assert of_pace(token_s=math.inf).of_request(N_TOKENS, is_idle=False).may_return(60)


def test_a_request_waits_no_longer_than_it_takes_to_compute() -> None:
    request = of_pace(token_s=0.0001).of_request(N_TOKENS, is_idle=True)
    assert request.may_return(0.0999)
    assert not request.may_return(0.1001)


def test_who_would_come_back_after_a_step_that_takes_longer_than_its_own_computing_does_not_wait() -> None:
    patience = of_pace(token_s=0.0001, step_s=0.2)
    assert not patience.of_request(N_TOKENS, is_idle=False).may_return(0)
    assert patience.of_request(N_TOKENS, is_idle=True).may_return(0)
    assert patience.of_request(3 * N_TOKENS, is_idle=False).may_return(0)


def test_where_nothing_is_found_requests_stop_waiting_and_where_something_is_they_wait_again() -> None:
    patience = of_pace(token_s=0.0001, step_s=0.005)

    def may_return() -> bool:
        return patience.of_request(N_TOKENS, is_idle=False).may_return(0)

    assert may_return()
    n_until_none_waits = 0
    while may_return():
        patience.worth.learn(NOTHING)
        n_until_none_waits += 1
    assert 32 < n_until_none_waits < 64
    for _ in range(1000):
        patience.worth.learn(NOTHING)
    patience.worth.learn(ALL)
    assert may_return()


def test_a_step_of_an_idle_engine_waits_no_longer_than_the_answer_is_worth() -> None:
    patience = of_pace(token_s=0.0001)
    for _ in range(1000):
        patience.worth.learn(NOTHING)
    waited: list[float] = []
    patience.of_request(N_TOKENS, is_idle=True).wait(waited.append)
    assert waited == [pytest.approx(SHARE_MIN * 0.1)]


def test_pages_behind_a_missing_one_are_worth_nothing() -> None:
    worth = Worth()
    for _ in range(1000):
        worth.learn(np.array([True, False, True, True]))
    assert worth.seconds(1.0) == pytest.approx(0.25)


@given(st.lists(st.lists(st.booleans(), max_size=8), max_size=200))
def test_an_answer_is_never_worth_more_than_computing_nor_less_than_a_trace_of_it(answers: list[list[bool]]) -> None:
    worth = Worth()
    for answer in answers:
        worth.learn(np.array(answer, np.bool_))
    assert SHARE_MIN <= worth.seconds(1.0) <= 1
    assert worth.seconds(math.inf) == math.inf
