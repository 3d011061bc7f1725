"""Deciding to pull: local first, reloads always, pulls only above the floor and never for longer than allowed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpeer.core.policy import (
    Action,
    Decision,
    Located,
    Mode,
    PolicySettings,
    RequestFacts,
    decide,
    located_tokens,
    pull_wait_s,
)
from kvpeer.core.reasons import DecisionReason
from kvpeer.model import ConfigError, LocalProtocolError

ON = PolicySettings(mode=Mode.ON, min_cached_token_delta=512)
OFF = PolicySettings(mode=Mode.OFF)
REQUEST = RequestFacts("r", prompt_tokens=4000, page_tokens=16)

tokens = st.integers(0, 300).map(lambda pages: pages * 16)


@pytest.mark.parametrize(
    ("local", "resident", "reachable", "settings", "action", "n_tokens", "reason"),
    [
        (0, 0, 0, ON, Action.NONE, 0, DecisionReason.NOTHING_FOUND),
        (3984, 3984, 3984, ON, Action.NONE, 0, DecisionReason.LOCAL_HIT),
        (0, 160, 160, ON, Action.RELOAD, 160, DecisionReason.RELOAD),
        (0, 0, 512, ON, Action.PULL, 512, DecisionReason.PULL),
        (0, 0, 496, ON, Action.NONE, 0, DecisionReason.BELOW_FLOOR),
        (160, 160, 656, ON, Action.NONE, 0, DecisionReason.BELOW_FLOOR),
        (0, 160, 656, ON, Action.RELOAD, 160, DecisionReason.BELOW_FLOOR),
        (0, 160, 672, ON, Action.PULL, 672, DecisionReason.PULL),
        (160, 320, 1600, ON, Action.PULL, 1440, DecisionReason.PULL),
        (0, 0, 2000, OFF, Action.NONE, 0, DecisionReason.MODE_OFF),
        (0, 160, 2000, OFF, Action.RELOAD, 160, DecisionReason.MODE_OFF),
        (0, 0, 2000, PolicySettings(Mode.ON, max_pull_wait_s=0), Action.NONE, 0, DecisionReason.NO_TIME),
    ],
)
def test_decisions(local, resident, reachable, settings, action, n_tokens, reason):
    decision = decide(REQUEST, local, Located(resident, reachable), settings)
    assert (decision.action, decision.n_tokens, decision.reason) == (action, n_tokens, reason)


@pytest.mark.parametrize(
    ("can_reload", "can_pull", "action", "n_tokens", "reason"),
    [
        (True, False, Action.RELOAD, 160, DecisionReason.BUSY),
        (False, True, Action.PULL, 1600, DecisionReason.PULL),
        (False, False, Action.NONE, 0, DecisionReason.BUSY),
    ],
)
def test_what_would_queue_for_long_is_computed(can_reload, can_pull, action, n_tokens, reason):
    decision = decide(REQUEST, 0, Located(160, 1600), ON, can_reload=can_reload, can_pull=can_pull)
    assert (decision.action, decision.n_tokens, decision.reason) == (action, n_tokens, reason)
    nothing = decide(REQUEST, 0, Located(0, 0), ON, can_reload=can_reload, can_pull=can_pull)
    assert nothing.reason is DecisionReason.NOTHING_FOUND


def test_one_token_is_always_left_to_compute():
    request = RequestFacts("r", prompt_tokens=1600, page_tokens=16)
    assert decide(request, 0, Located(1600, 1600), ON).n_tokens == 1584
    assert decide(request, 0, Located(0, 1600), ON).n_tokens == 1584
    assert decide(RequestFacts("r", 1601, 16), 0, Located(0, 1600), ON).n_tokens == 1600
    assert decide(RequestFacts("r", 0, 16), 0, Located(0, 0), ON).n_tokens == 0


@given(tokens, tokens, tokens, st.integers(0, 5000), st.integers(1, 2000))
def test_a_pull_never_brings_less_than_the_floor_and_never_waits_longer_than_allowed(
    local: int, more_resident: int, more_reachable: int, more_prompt: int, floor: int
):
    prompt = local + more_prompt
    settings = PolicySettings(Mode.ON, min_cached_token_delta=floor, max_pull_wait_s=0.4)
    located = Located(local + more_resident, local + more_resident + more_reachable)
    decision = decide(RequestFacts("r", prompt, 16), local, located, settings)
    assert decision.n_tokens >= 0
    assert local + decision.n_tokens <= max(local, prompt - 1)
    assert 0 <= decision.wait_s <= settings.max_pull_wait_s
    if decision.action is Action.PULL:
        assert decision.wait_s > 0
        assert local + decision.n_tokens - located.resident_tokens >= floor
    else:
        assert decision.wait_s == 0
        assert local + decision.n_tokens <= max(local, located.resident_tokens)


@given(tokens, tokens, tokens, tokens, st.integers(1, 2000))
def test_more_at_peers_never_brings_less(local: int, resident: int, reachable: int, more: int, floor: int):
    settings = PolicySettings(Mode.ON, min_cached_token_delta=floor)

    def brings(peers: int) -> Decision:
        return decide(REQUEST, local, Located(local + resident, local + resident + peers), settings)

    fewer, better = brings(reachable), brings(reachable + more)
    assert better.n_tokens >= fewer.n_tokens
    assert better.wait_s >= fewer.wait_s


@given(tokens, tokens, tokens)
def test_a_reload_is_never_refused(local: int, resident: int, reachable: int):
    request = RequestFacts("r", prompt_tokens=local + resident + 1, page_tokens=16)
    located = Located(local + resident, local + resident + reachable)
    for settings in (ON, OFF):
        assert decide(request, local, located, settings).n_tokens >= resident


@pytest.mark.parametrize(
    ("statuses", "resident", "reachable"),
    [
        ([], 32, 32),
        ([1, 1], 64, 64),
        ([1, 2, 1, 0, 1], 48, 80),
        ([0, 2, 2], 32, 32),
        ([2, 2], 32, 64),
    ],
)
def test_only_pages_before_the_first_miss_count(statuses: list[int], resident: int, reachable: int):
    assert located_tokens(np.array(statuses, dtype=np.uint8), 32, 16) == Located(resident, reachable)


def test_the_wait_grows_by_token_up_to_its_limit():
    settings = PolicySettings(pull_base_s=0.1, pull_s_per_token=0.001, max_pull_wait_s=1.0)
    assert pull_wait_s(0, settings) == pytest.approx(0.1)
    assert pull_wait_s(500, settings) == pytest.approx(0.6)
    assert pull_wait_s(5000, settings) == 1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [("min_cached_token_delta", 0), ("pull_base_s", -1.0), ("pull_s_per_token", float("nan")), ("max_pull_wait_s", -1)],
)
def test_settings_that_make_no_sense_are_refused_by_name(name: str, value: float):
    with pytest.raises(ConfigError, match=name):
        PolicySettings(**{name: value})


def test_a_request_without_page_size_is_refused():
    with pytest.raises(LocalProtocolError, match="pages of 0"):
        RequestFacts("r", 10, 0)
