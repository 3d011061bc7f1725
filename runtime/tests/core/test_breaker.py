"""Circuit breakers: who fails repeatedly is left alone and tried again, and nothing is remembered for ever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpeer.core.breaker import BREAKERS_MAX, Breakers, BreakerSettings, BreakerState
from kvpeer.model import AgentId, ConfigError

PEER, OTHER = AgentId(b"p" * 16), AgentId(b"q" * 16)
SETTINGS = BreakerSettings(failures_to_open=3, backoff_s=1.0, backoff_s_max=8.0, try_timeout_s=5.0)


def opened(now: float = 0.0) -> Breakers:
    breakers = Breakers(SETTINGS)
    for _ in range(SETTINGS.failures_to_open):
        assert breakers.admit(PEER, now)
        breakers.failed(PEER, now)
    return breakers


def test_it_opens_with_the_third_failure_in_a_row_and_not_for_others():
    breakers = Breakers(SETTINGS)
    for _ in range(2):
        breakers.failed(PEER, 0.0)
        assert breakers.admit(PEER, 0.0)
    breakers.failed(PEER, 0.0)
    assert not breakers.admit(PEER, 0.0)
    assert breakers.state(PEER, 0.0) is BreakerState.OPEN
    assert breakers.admit(OTHER, 0.0)


def test_a_success_in_between_starts_the_count_again():
    breakers = Breakers(SETTINGS)
    for _ in range(10):
        breakers.failed(PEER, 0.0)
        breakers.failed(PEER, 0.0)
        breakers.succeeded(PEER)
    assert breakers.state(PEER, 0.0) is BreakerState.CLOSED
    assert len(breakers) == 0


def test_half_open_lets_exactly_one_try_through():
    breakers = opened()
    assert not breakers.admit(PEER, 0.99)
    assert breakers.state(PEER, 1.0) is BreakerState.HALF_OPEN
    assert breakers.is_usable(PEER, 1.0)
    assert breakers.admit(PEER, 1.0)
    assert not breakers.is_usable(PEER, 1.0)
    assert not breakers.admit(PEER, 1.0)


def test_a_try_that_succeeds_closes_it():
    breakers = opened()
    assert breakers.admit(PEER, 1.0)
    breakers.succeeded(PEER)
    assert breakers.admit(PEER, 1.0)
    assert breakers.admit(PEER, 1.0)


def test_a_try_whose_outcome_is_lost_does_not_block_for_ever():
    breakers = opened()
    assert breakers.admit(PEER, 1.0)
    assert not breakers.admit(PEER, 1.0 + SETTINGS.try_timeout_s - 0.01)
    assert breakers.admit(PEER, 1.0 + SETTINGS.try_timeout_s)


def test_a_try_that_was_not_sent_is_given_back():
    breakers = opened()
    assert breakers.admit(PEER, 1.0)
    breakers.not_sent(PEER)
    assert breakers.admit(PEER, 1.0)
    breakers.not_sent(OTHER)
    assert breakers.state(PEER, 1.0) is BreakerState.HALF_OPEN


def test_the_backoff_doubles_up_to_its_limit():
    breakers, now, waits = opened(), 0.0, []
    for _ in range(6):
        start = now
        while not breakers.admit(PEER, now):
            now += 0.125
        waits.append(now - start)
        breakers.failed(PEER, now)
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_failures_of_requests_sent_before_it_opened_do_not_prolong_it():
    breakers = opened()
    for _ in range(20):
        breakers.failed(PEER, 0.5)
    assert breakers.admit(PEER, 1.0)


def test_the_peer_that_failed_longest_ago_is_forgotten_first():
    breakers = opened()
    breakers.failed(OTHER, 0.0)
    for number in range(BREAKERS_MAX - 1):
        breakers.failed(AgentId(number.to_bytes(16, "big")), 0.0)
    assert len(breakers) == BREAKERS_MAX
    assert breakers.state(PEER, 0.0) is BreakerState.CLOSED
    breakers.failed(OTHER, 0.0)
    breakers.failed(OTHER, 0.0)
    assert breakers.state(OTHER, 0.0) is BreakerState.OPEN, "it was still remembered"


def test_a_peer_that_fails_again_is_remembered_longer_than_one_that_failed_after_its_first_failure():
    breakers = Breakers(SETTINGS)
    for peer in (PEER, OTHER, PEER):
        breakers.failed(peer, 0.0)
    for number in range(BREAKERS_MAX - 1):
        breakers.failed(AgentId(number.to_bytes(16, "big")), 0.0)
    breakers.failed(PEER, 0.0)
    assert len(breakers) == BREAKERS_MAX
    assert breakers.state(PEER, 0.0) is BreakerState.OPEN


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["admit", "fail", "succeed", "wait"]), st.floats(0.01, 10)), max_size=60))
def test_a_peer_is_never_left_alone_longer_than_the_longest_backoff_or_a_lost_try(steps: list[tuple[str, float]]):
    breakers, now = Breakers(SETTINGS), 0.0
    for step, wait_s in steps:
        if step == "admit":
            usable = breakers.is_usable(PEER, now)
            assert breakers.admit(PEER, now) == usable
        elif step == "fail":
            breakers.failed(PEER, now)
        elif step == "succeed":
            breakers.succeeded(PEER)
            assert breakers.is_usable(PEER, now)
        else:
            now += wait_s
    assert breakers.is_usable(PEER, now + max(SETTINGS.backoff_s_max, SETTINGS.try_timeout_s))


def test_forgetting_a_peer_closes_its_breaker():
    breakers = opened()
    breakers.forget(PEER)
    assert breakers.admit(PEER, 0.0)
    assert len(breakers) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("failures_to_open", 0), ("backoff_s", 0.0), ("backoff_s", 60.0), ("try_timeout_s", 0.0)],
)
def test_settings_that_make_no_sense_are_refused_by_name(name: str, value: float):
    with pytest.raises(ConfigError, match=name):
        BreakerSettings(**{name: value})


@pytest.mark.parametrize(
    ("settings", "is_good"),
    [
        ({"failures_to_open": 1}, True),
        ({"failures_to_open": 0}, False),
        ({"backoff_s": 2.0, "backoff_s_max": 2.0}, True),
        ({"backoff_s": 2.0, "backoff_s_max": 1.9}, False),
        ({"backoff_s": 0.0}, False),
        ({"backoff_s_max": float("inf")}, False),
        ({"try_timeout_s": 0.01}, True),
        ({"try_timeout_s": 0.0}, False),
        ({"try_timeout_s": float("inf")}, False),
    ],
)
def test_settings_have_limits(settings: dict[str, float], is_good: bool):
    if is_good:
        BreakerSettings(**settings)
    else:
        with pytest.raises(ConfigError):
            BreakerSettings(**settings)
