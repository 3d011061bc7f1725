"""The guard: off while pulls do harm, on again when they pay, one bad producer before the whole engine."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpeer.core.policy import GuardChange, Guards, GuardSettings
from kvpeer.core.policy.guard import GUARDED_PAIRS_MAX, LOSS_MIN, TRY_TIMEOUT_S
from kvpeer.model import ConfigError

SETTINGS = GuardSettings(min_samples=4, window=8, retry_s=30, retry_s_max=100, probes_to_return=2)


def judged(
    guards: Guards, producer: bytes, *saved_s: float, now: float = 0.0, seconds: float = 10.0
) -> list[GuardChange]:
    return [change for saved in saved_s for change in guards.judge(producer, saved, now, seconds=seconds)]


def switched_off(producer: bytes = b"a") -> Guards:
    guards = Guards(SETTINGS)
    (change,) = judged(guards, producer, -1, -1, -1, -1)
    assert (change.producer, change.is_off, change.saved_s, change.n_pulls) == (producer, True, -4, 4)
    return guards


def tried(guards: Guards, producer: bytes, saved_s: float, now: float) -> list[GuardChange]:
    assert guards.may_try(producer, now)
    guards.begun(producer, now)
    assert not guards.may_try(producer, now)
    return guards.judge(producer, saved_s, now, seconds=10.0)


def test_harm_in_sum_turns_a_producer_off_and_slow_pulls_that_others_make_up_for_do_not():
    guards = Guards(SETTINGS)
    assert judged(guards, b"a", -1, 2, -1, 2, -1, 2, -1, 2, -1, 2) == []
    assert not guards.is_off(b"a")
    assert switched_off().is_off(b"a")


def test_a_loss_that_is_small_against_the_time_of_the_pulls_turns_nothing_off():
    guards = Guards(SETTINGS)
    tie_s = 10.0 * LOSS_MIN
    assert judged(guards, b"a", *[-0.99 * tie_s] * 20) == []
    assert judged(guards, b"b", *[-1.01 * tie_s] * 4, seconds=10.0)[0].producer == b"b"


def test_fewer_pulls_than_are_judged_together_change_nothing():
    guards = Guards(SETTINGS)
    assert judged(guards, b"a", -9, -9, -9) == []


def test_only_the_latest_pulls_count():
    guards = Guards(SETTINGS)
    judged(guards, b"a", *[5.0] * 8)
    changes = judged(guards, b"a", *[-1.0] * 8)
    assert [change.is_off for change in changes] == [True]
    late = Guards(SETTINGS)
    judged(late, b"a", *[5.0] * 4)
    assert judged(late, b"a", *[-1.0] * 4, now=SETTINGS.window_s + 1)


def test_after_a_while_one_pull_is_tried_and_a_try_that_does_not_pay_doubles_the_wait():
    guards = switched_off()
    assert not guards.may_try(b"a", 29.9)
    assert tried(guards, b"a", -1, now=30) == []
    for now, wait in ((30, 60), (90, 100), (190, 100)):
        assert not guards.may_try(b"a", now + wait - 0.1)
        tried(guards, b"a", -1, now=now + wait)


def test_tries_in_a_row_that_pay_turn_it_on_again():
    guards = switched_off()
    assert tried(guards, b"a", 1, now=30) == []
    assert tried(guards, b"a", -1, now=31) == []
    assert tried(guards, b"a", 1, now=91) == []
    (change,) = tried(guards, b"a", 2, now=92)
    assert (change.is_off, change.saved_s, change.n_pulls) == (False, 3, 2)
    assert not guards.is_off(b"a")


def test_soon_off_again_it_waits_twice_as_long_and_later_as_at_first():
    for relapse_at, retry_s in ((40, 60), (31 + SETTINGS.window_s, 30)):
        guards = switched_off()
        tried(guards, b"a", 1, now=30)
        tried(guards, b"a", 1, now=31)
        assert not guards.is_off(b"a")
        (change,) = judged(guards, b"a", -1, -1, -1, -1, now=relapse_at)
        assert change.retry_s == retry_s
        assert not guards.may_try(b"a", relapse_at + retry_s - 1)
        assert guards.may_try(b"a", relapse_at + retry_s)


def test_a_try_that_is_never_reported_makes_room_for_another():
    guards = switched_off()
    guards.begun(b"a", 30)
    assert not guards.may_try(b"a", 30 + TRY_TIMEOUT_S - 0.1)
    assert guards.may_try(b"a", 30 + TRY_TIMEOUT_S)


def test_pulls_from_before_are_no_tries():
    guards = switched_off()
    assert judged(guards, b"a", 5, 5, 5, now=1) == []
    assert guards.is_off(b"a")


def test_one_bad_producer_does_not_turn_the_engine_off_and_harm_by_all_does():
    guards = Guards(SETTINGS)
    for _ in range(20):
        judged(guards, b"bad", -1)
        judged(guards, b"good", 0.1)
    assert guards.is_off(b"bad")
    assert not guards.is_off(b"good")
    assert not guards.engine.is_off
    stopped = Guards(SETTINGS)  # too few pulls to turn it off; then something else kept it from being asked
    judged(stopped, b"bad", -9, -9, -9)
    judged(stopped, b"good", *[0.1] * 20)
    assert not stopped.engine.is_off
    many = Guards(SETTINGS)
    changes = [change for n in range(8) for change in judged(many, bytes([n]), -1)]
    assert [(change.producer, change.is_off) for change in changes] == [(None, True)]
    assert many.engine.is_off
    assert many.engine.may_try(30)


def test_a_guard_that_is_turned_off_judges_nothing():
    guards = Guards(GuardSettings(is_on=False, min_samples=1))
    assert judged(guards, b"a", *[-9.0] * 50) == []


def test_only_so_many_producers_are_judged():
    guards = Guards(SETTINGS)
    for n in range(GUARDED_PAIRS_MAX + 8):
        judged(guards, str(n).encode(), *[-1.0] * 4)
    assert guards.n_pairs_off(0.0) <= GUARDED_PAIRS_MAX


def test_a_change_says_who_why_and_what_next():
    (change,) = judged(Guards(SETTINGS), bytes.fromhex("aa" * 16), -1, -1, -1, -1)
    assert str(change) == (
        "pulling from producer aaaaaaaaaaaa is off: its last 4 pulls took 4.000 s longer than computing; "
        "tried again in 30 s"
    )
    assert str(GuardChange(None, False, 1.5, 3, 30)).startswith("pulling from every producer is on again: 3 tries")
    assert "(unnamed)" in str(GuardChange(b"", True, -1, 3, 30))


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=60))
def test_a_producer_is_off_exactly_when_its_window_lost_a_part_of_its_time(saved: list[float]):
    guards = Guards(SETTINGS)
    window: list[float] = []
    for each in saved:
        judged(guards, b"a", each, seconds=10.0)
        window = [*window, each][-SETTINGS.window :]
        margin_s = math.fsum(window) + LOSS_MIN * 10.0 * len(window)
        is_harm = len(window) >= SETTINGS.min_samples and margin_s < 0
        assert guards.is_off(b"a") == is_harm or math.isclose(margin_s, 0, abs_tol=1e-9)
        if guards.is_off(b"a"):
            break


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("min_samples", {"min_samples": 0}),
        ("min_samples", {"min_samples": 9, "window": 8}),
        ("retry_s", {"retry_s": 0}),
        ("retry_s_max", {"retry_s": 9, "retry_s_max": 8}),
        ("probes_to_return", {"probes_to_return": 0}),
        ("window_s", {"window_s": math.inf}),
    ],
)
def test_guard_settings_that_make_no_sense_are_refused_by_name(name: str, values: dict[str, float]):
    with pytest.raises(ConfigError, match=name):
        GuardSettings(**values)  # type: ignore[arg-type]
