"""Deciding to pull: local first, reloads always, pulls only above the floor, when they pay, from who may be asked."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpeer.core.policy import (
    Action,
    Candidate,
    Decision,
    Estimate,
    Load,
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
    load = Load(can_reload=can_reload, can_pull=can_pull)
    decision = decide(REQUEST, 0, Located(160, 1600), ON, load=load)
    assert (decision.action, decision.n_tokens, decision.reason) == (action, n_tokens, reason)
    nothing = decide(REQUEST, 0, Located(0, 0), ON, load=load)
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


# ---- costs


class FlatCosts:
    """A pull: a floor and so much a byte; computing: so much a token and a pair."""

    def __init__(
        self, floor_s: float, s_per_byte: float, s_per_token: float, s_per_pair: float = 0.0, is_known: bool = True
    ) -> None:
        self.floor_s, self.s_per_byte = floor_s, s_per_byte
        self.s_per_token, self.s_per_pair, self.is_known = s_per_token, s_per_pair, is_known

    def pull(self, producer: bytes, n_bytes: int, n_in_flight: int) -> Estimate:
        return Estimate(self.floor_s + self.s_per_byte * n_bytes, 0.0, self.is_known)

    def prefill(self, n_tokens: int, n_context: int) -> Estimate:
        seconds = self.s_per_token * n_tokens + self.s_per_pair * n_tokens * (n_context + n_tokens / 2)
        return Estimate(seconds, 0.0, self.is_known)


LONG = RequestFacts("r", prompt_tokens=100_001, page_tokens=16, page_bytes=16)
AUTO = PolicySettings(Mode.ON, min_cached_token_delta=None, margin=0.0)

costs = st.builds(
    FlatCosts,
    st.floats(0, 10),
    st.floats(0, 1e-2),
    st.floats(0, 1e-2),
    st.floats(0, 1e-6),
    st.booleans(),
)


def test_a_pull_is_made_exactly_when_computing_takes_longer_by_the_margin():
    slow_start = FlatCosts(floor_s=1.0, s_per_byte=0.0, s_per_token=1e-3)
    for margin, break_even in ((0.0, 1000), (0.5, 1500)):
        settings = PolicySettings(Mode.ON, min_cached_token_delta=1, margin=margin)
        for n_tokens in range(800, 1808, 16):
            decision = decide(LONG, 0, Located(0, n_tokens), settings, costs=slow_start)
            expected = DecisionReason.PULL if n_tokens > break_even else DecisionReason.NOT_WORTH_IT
            assert decision.reason is expected, n_tokens


def test_estimates_that_rest_on_nothing_decide_nothing():
    hopeless = FlatCosts(floor_s=100.0, s_per_byte=1.0, s_per_token=0.0, is_known=False)
    assert decide(LONG, 0, Located(0, 512), ON, costs=hopeless).reason is DecisionReason.PULL
    assert decide(LONG, 0, Located(0, 496), AUTO, costs=hopeless).reason is DecisionReason.BELOW_FLOOR
    assert decide(LONG, 0, Located(0, 512), AUTO, costs=hopeless).reason is DecisionReason.PULL


def test_auto_pulls_even_a_page_where_that_pays_and_a_floor_forbids_it():
    cheap = FlatCosts(floor_s=0.0, s_per_byte=0.0, s_per_token=1e-3)
    assert decide(LONG, 0, Located(0, 16), AUTO, costs=cheap).action is Action.PULL
    assert decide(LONG, 0, Located(0, 496), ON, costs=cheap).reason is DecisionReason.BELOW_FLOOR


@given(costs, tokens, tokens, tokens, tokens, st.sampled_from([None, 1, 64, 512]))
def test_with_costs_too_more_at_peers_never_brings_less(
    costs: FlatCosts, local: int, resident: int, reachable: int, more: int, floor: int | None
):
    settings = PolicySettings(Mode.ON, min_cached_token_delta=floor)

    def brings(peers: int) -> int:
        located = Located(local + resident, local + resident + peers)
        return decide(LONG, local, located, settings, costs=costs).n_tokens

    assert brings(reachable + more) >= brings(reachable)


@given(
    costs,
    tokens,
    tokens,
    st.integers(1, 2000),
    st.sampled_from(list(Mode)),
    st.builds(Load, *[st.booleans()] * 5),
    st.booleans(),
    st.booleans(),
)
def test_below_the_floor_nothing_is_pulled_whatever_else_is_true(
    costs: FlatCosts, local: int, more: int, floor: int, mode: Mode, load: Load, is_held_off: bool, may_be_tried: bool
):
    settings = PolicySettings(mode, min_cached_token_delta=floor)
    candidate = Candidate(b"a", local + more, is_held_off=is_held_off, may_be_tried=may_be_tried)
    decision = decide(LONG, local, Located(local, local + more), settings, [candidate], costs, load)
    if decision.action is Action.PULL:
        assert more >= floor
        assert mode is Mode.ON


@given(costs, tokens, st.builds(Load, *[st.booleans()] * 5), st.sampled_from(list(Mode)))
def test_what_the_engine_has_itself_comes_first(costs: FlatCosts, local: int, load: Load, mode: Mode):
    request = RequestFacts("r", local + 1, 16)
    decision = decide(request, local, Located(local, local), PolicySettings(mode), costs=costs, load=load)
    assert (decision.action, decision.n_tokens) == (Action.NONE, 0)
    assert decision.reason is DecisionReason.LOCAL_HIT


def test_a_pull_is_not_waited_for_longer_than_computing_surely_takes():
    settings = PolicySettings(Mode.ON, pull_base_s=0.1, pull_s_per_token=0.001, max_pull_wait_s=60)
    assert pull_wait_s(2000, settings, Estimate(0.5, 0.1, is_known=True)) == pytest.approx(0.8)
    assert pull_wait_s(2000, settings, Estimate(9.0, 0.1, is_known=True)) == pytest.approx(2.1)
    assert pull_wait_s(2000, settings, Estimate(0.5, 0.1, is_known=False)) == pytest.approx(2.1)


def test_what_is_reloaded_before_a_pull_does_not_use_up_its_time():
    settings = PolicySettings(Mode.ON, pull_base_s=0.1, pull_s_per_token=0.001, max_pull_wait_s=60)
    known = FlatCosts(floor_s=0.01, s_per_byte=0.0, s_per_token=2e-4)
    wait_s = [decide(LONG, 160, Located(n, n + 1600), settings, costs=known).wait_s for n in (160, 16_160)]
    assert wait_s == [pytest.approx(0.1 + 0.32), pytest.approx(0.1 + 0.32 + 16.0)]


# ---- modes and guards


def test_shadow_decides_as_on_and_pulls_nothing():
    settings = PolicySettings(Mode.SHADOW)
    known = FlatCosts(floor_s=0.1, s_per_byte=0.0, s_per_token=1e-3)
    decision = decide(LONG, 0, Located(160, 1760), settings, costs=known)
    assert (decision.action, decision.n_tokens, decision.reason) == (Action.RELOAD, 160, DecisionReason.SHADOW)
    assert decision.estimates is not None
    assert decision.estimates.saved_s == pytest.approx(1.5)
    assert decide(LONG, 0, Located(160, 640), settings, costs=known).reason is DecisionReason.BELOW_FLOOR


@pytest.mark.parametrize(
    ("load", "candidate", "reason"),
    [
        (Load(is_held_off=True), Candidate(b"a", 1600), DecisionReason.ENGINE_GUARDED),
        (Load(is_held_off=True, may_try=True), Candidate(b"a", 1600), DecisionReason.PROBE),
        (Load(is_held_off=True), Candidate(b"a", 1600, may_be_tried=True), DecisionReason.ENGINE_GUARDED),
        (Load(), Candidate(b"a", 1600, is_held_off=True), DecisionReason.PAIR_GUARDED),
        (Load(), Candidate(b"a", 1600, is_held_off=True, may_be_tried=True), DecisionReason.PROBE),
        (Load(can_pull=False), Candidate(b"a", 1600, is_held_off=True, may_be_tried=True), DecisionReason.BUSY),
        (Load(), Candidate(b"a", 1600, n_in_flight=8), DecisionReason.SOURCE_BUSY),
        (Load(is_control=True), Candidate(b"a", 1600), DecisionReason.CONTROL),
        (Load(), Candidate(b"a", 1600), DecisionReason.PULL),
    ],
)
def test_what_holds_a_pull_back_is_said(load: Load, candidate: Candidate, reason: DecisionReason):
    decision = decide(REQUEST, 0, Located(160, 1600), ON, [candidate], load=load)
    assert decision.reason is reason
    is_pull = reason in (DecisionReason.PULL, DecisionReason.PROBE)
    assert (decision.action, decision.n_tokens) == ((Action.PULL, 1600) if is_pull else (Action.RELOAD, 160))


# ---- sources


def chosen(request: str, candidates: list[Candidate]) -> Decision:
    reach = max(each.reachable_tokens for each in candidates)
    return decide(RequestFacts(request, 100_001, 16), 0, Located(0, reach), ON, candidates)


def test_a_thousand_requests_spread_over_equal_sources_within_three_sigma():
    candidates = [Candidate(bytes([n]) * 16, 4096) for n in range(8)]
    counts = Counter(chosen(f"request-{n}", candidates).producer for n in range(1000))
    sigma = math.sqrt(1000 * (1 / 8) * (7 / 8))
    assert len(counts) == 8
    assert all(abs(count - 125) <= 3 * sigma for count in counts.values()), counts


def test_a_source_is_chosen_by_one_over_one_plus_waiting():
    waiting = [0, 1, 3, 7]
    candidates = [Candidate(bytes([n]) * 16, 4096, n_waiting=w) for n, w in enumerate(waiting)]
    counts = Counter(chosen(f"request-{n}", candidates).producer for n in range(4000))
    weights = [1 / (1 + w) for w in waiting]
    for n, weight in enumerate(weights):
        share = weight / sum(weights)
        expected, sigma = 4000 * share, math.sqrt(4000 * share * (1 - share))
        assert abs(counts[bytes([n]) * 16] - expected) <= 4 * sigma, (waiting[n], counts)


@given(st.text(max_size=20), st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=8, unique=True))
def test_a_request_chooses_the_same_source_in_any_order_and_while_it_is_there(request_id: str, names: list[bytes]):
    candidates = [Candidate(name, 4096) for name in names]
    first = chosen(request_id, candidates).producer
    assert chosen(request_id, candidates[::-1]).producer == first
    others = [each for each in candidates if each.producer != first]
    if others:
        second = chosen(request_id, others).producer
        assert chosen(request_id, [each for each in candidates if each.producer in (first, second)]).producer == first


def test_only_the_longest_prefixes_within_a_page_are_candidates():
    candidates = [Candidate(b"a" * 16, 4096), Candidate(b"b" * 16, 4080), Candidate(b"c" * 16, 4064)]
    counts = Counter(chosen(str(n), candidates).producer for n in range(300))
    assert set(counts) == {b"a" * 16, b"b" * 16}
    assert all(chosen(str(n), candidates).n_tokens == 4096 for n in range(10))


def test_while_a_producer_is_off_the_others_are_pulled_from_as_far_as_they_reach():
    candidates = [Candidate(b"a" * 16, 4096, is_held_off=True), Candidate(b"b" * 16, 1024)]
    decision = chosen("r", candidates)
    assert (decision.producer, decision.n_tokens) == (b"b" * 16, 1024)
    busy = [Candidate(b"a" * 16, 4096, n_in_flight=8), Candidate(b"b" * 16, 1024)]
    assert chosen("r", busy).producer == b"b" * 16


class CostsOfProducers(FlatCosts):
    """The producers named take so long, the others nothing."""

    def __init__(self, **pull_s: float) -> None:
        super().__init__(0.0, 0.0, 1e-3)
        self.pull_s = pull_s

    def pull(self, producer: bytes, n_bytes: int, n_in_flight: int) -> Estimate:
        return Estimate(self.pull_s.get(producer.decode(), 0.0), 0.0, is_known=True)


@pytest.mark.parametrize("quick_tokens", [4096, 1024])
def test_where_the_drawn_producer_is_too_slow_one_that_pays_is_pulled_from(quick_tokens: int):
    costs = CostsOfProducers(slow=50.0)
    candidates = [Candidate(b"slow", 4096), Candidate(b"quick", quick_tokens)]
    for n in range(50):
        decision = decide(RequestFacts(f"r{n}", 9000, 16), 0, Located(0, 4096), ON, candidates, costs)
        assert (decision.reason, decision.producer) == (DecisionReason.PULL, b"quick")
        assert decision.n_tokens == quick_tokens
    useless = [Candidate(b"slow", 4096), Candidate(b"quick", 496), Candidate(b"off", 4096, is_held_off=True)]
    assert decide(REQUEST, 0, Located(0, 4000), ON, useless, costs).reason is DecisionReason.NOT_WORTH_IT
    tried = [Candidate(b"slow", 4096, may_be_tried=True), Candidate(b"quick", 1024)]
    assert decide(REQUEST, 0, Located(0, 4000), ON, tried, costs).reason is DecisionReason.PROBE


@given(
    st.lists(
        st.builds(Candidate, st.binary(max_size=3), tokens, st.integers(0, 9), st.integers(0, 9), *[st.booleans()] * 2),
        max_size=6,
        unique_by=lambda each: each.producer,
    ),
    tokens,
    tokens,
)
def test_no_choice_of_sources_brings_more_than_is_located_or_less_than_is_resident(
    candidates: list[Candidate], resident: int, more: int
):
    decision = decide(LONG, 0, Located(resident, resident + more), ON, candidates)
    assert resident <= decision.n_tokens <= resident + more
    if decision.action is Action.PULL and candidates and decision.producer:
        source = next(each for each in candidates if each.producer == decision.producer)
        assert source.reachable_tokens > resident
