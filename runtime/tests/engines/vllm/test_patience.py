"""What a step waits for lookups is a small share of a step."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from kvpeer.engines.vllm.patience import IDLE_PATIENCE_S, STEP_SHARE, Patience


class Waits:
    """A clock, and waits that take as long as the answers do, if they may."""

    def __init__(self) -> None:
        self.now = 0.0
        self.patience = Patience(lambda: self.now)

    def step(self, took_s: float) -> None:
        self.now += took_s
        self.patience.step_scheduled()

    def wait(self, answer_s: float = 60.0, *, is_idle: bool = False) -> float:
        began_at = self.now

        def waiting(seconds: float) -> None:
            self.now += min(seconds, answer_s)

        self.patience.wait(waiting, is_idle=is_idle)
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
    Waits().patience.wait(waiting, is_idle=False)
    assert asked == []
