"""A fleet of engines: every request ends once, nothing is invented, and a seed says all there is to say."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpeer.core.policy import Mode, PolicySettings
from kvpeer.core.reasons import DecisionReason
from kvpeer.model import LocalProtocolError
from kvpeer.sim.fleet.fleet import Fleet, FleetProfile
from kvpeer.sim.fleet.placement import by_load, by_prefix
from kvpeer.sim.fleet.profile import EngineProfile, LinkProfile
from kvpeer.sim.fleet.workload import Request, SharedPrefixes

PAGE = 64
ENGINE = EngineProfile(
    kv_bytes_per_token=1000,
    request_s=0.01,
    prefill_s_per_token=1e-4,
    prefill_s_per_pair=1e-9,
    weight_bytes=4.8e9,  # 1 ms a step
    device_tokens=20_000,
    host_tokens=10_000,
    step_tokens=2048,
)
LINK = LinkProfile(floor_s=0.005, s_per_byte=1e-9)
OFF = PolicySettings(Mode.OFF)
FLOOR = PolicySettings(Mode.ON, 512, uses_costs=False)
AUTO = PolicySettings(Mode.ON, None)
POLICIES = st.sampled_from([OFF, FLOOR, AUTO, PolicySettings(Mode.SHADOW, None)])


def fleet_of(n_engines: int, policy: PolicySettings, seed: int = 0, link: LinkProfile = LINK, **changes) -> Fleet:
    return Fleet(FleetProfile(n_engines, ENGINE, link, policy, **changes), seed)


def last_engine(request, engines, rng):
    return engines[-1]


@st.composite
def workloads(draw):
    """Up to 60 requests that come in bursts, for few prefixes of various lengths, some of them without a question."""
    lengths = draw(st.lists(st.integers(0, 6000), min_size=1, max_size=5))
    at, requests = 0.0, []
    for idx in range(draw(st.integers(1, 60))):
        at += draw(st.sampled_from([0.0, 0.0, 0.01, 0.3]))
        prefix = draw(st.integers(0, len(lengths) - 1))
        question = draw(st.integers(0 if lengths[prefix] else 1, 300))
        requests.append(Request(f"{idx}", f"prefix {prefix}", lengths[prefix], question, draw(st.integers(1, 40)), at))
    return requests


@settings(max_examples=40, deadline=None)
@given(
    workloads(), st.integers(1, 4), POLICIES, st.booleans(), st.sampled_from([by_load, by_prefix]), st.floats(0.0, 20.0)
)
def test_every_request_ends_once_with_all_of_its_prompt(requests, n_engines, policy, by_engines, placement, floor_s):
    link = LinkProfile(floor_s, 1e-9, by_engines)
    fleet = fleet_of(n_engines, policy, link=link, placement=placement)
    outcomes = fleet.serve(requests)
    assert Counter(outcome.request.name for outcome in outcomes) == Counter(request.name for request in requests)
    for outcome in outcomes:
        parts = outcome.local_tokens, outcome.reloaded_tokens, outcome.pulled_tokens
        assert all(n_tokens >= 0 and n_tokens % PAGE == 0 for n_tokens in parts)
        assert sum(parts) <= outcome.request.prefix_tokens
        assert outcome.computed_tokens >= 1
        least_s = ENGINE.request_s + ENGINE.prefill_s(outcome.computed_tokens, sum(parts))
        assert outcome.first_token_s >= least_s * 0.999
        assert outcome.ended_at - outcome.first_token_at >= (outcome.request.output_tokens - 1) * 0.001 * 0.999
    for engine in fleet.engines:
        assert engine.n_waiting == 0
        assert engine.device.pinned_tokens == 0


@settings(max_examples=20, deadline=None)
@given(workloads(), st.integers(1, 4), POLICIES, st.booleans())
def test_a_fleet_in_which_nothing_is_reused_computes_everything_whatever_the_policy(requests, n, policy, by_engines):
    alone = [replace(request, prefix=f"only of {request.name}") for request in requests]
    outcomes = fleet_of(n, policy, link=replace(LINK, by_engines=by_engines)).serve(alone)
    assert outcomes == fleet_of(n, OFF).serve(alone)
    assert all(outcome.computed_tokens == outcome.request.prompt_tokens for outcome in outcomes)


def stage(seed: int) -> list[Request]:
    return SharedPrefixes(6, 4096, 64, 16).stage(0, 0.0, 20.0, 5.0, Random(seed))


@pytest.mark.parametrize("policy", [FLOOR, AUTO], ids=["floor", "auto"])
def test_a_seed_repeats_and_another_one_does_not(policy):
    first, again, other = (fleet_of(3, policy, seed).serve(stage(1)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_pulls_are_made_only_where_they_are_allowed_and_never_below_the_floor():
    assert not any(outcome.pulled_tokens for outcome in fleet_of(3, OFF).serve(stage(1)))
    pulled = [outcome.pulled_tokens for outcome in fleet_of(3, FLOOR).serve(stage(1)) if outcome.pulled_tokens]
    assert pulled
    assert min(pulled) >= 512


def test_an_idle_engine_takes_what_its_costs_say():
    outcome = fleet_of(1, OFF).serve([Request("one", "prefix", 5000, 0, 11, 3.0)])[0]
    steps = [(2048, 1024), (2048, 2048 + 1024), (904, 4096 + 452)]
    assert outcome.first_token_s == pytest.approx(0.01 + sum(n * 1e-4 + n * mean * 1e-9 for n, mean in steps))
    read_tokens = sum(5000 + n for n in range(1, 11))
    assert outcome.latency_s - outcome.first_token_s == pytest.approx(10 * 0.001 + read_tokens * 1000 / 4.8e12)


def test_a_pull_takes_its_floor_its_bytes_and_the_last_page():
    fleet = fleet_of(2, FLOOR, placement=last_engine)
    fleet.engines[0].host.put("prefix", 4096)
    outcome = fleet.serve([Request("one", "prefix", 4096, 0, 1, 0.0)])[0]
    assert (outcome.pulled_tokens, outcome.computed_tokens) == (4032, 64)
    last_page_s = ENGINE.prefill_s(64, 4032)
    assert outcome.first_token_s == pytest.approx(0.01 + 0.005 + 4032 * 1000 * 1e-9 + last_page_s)


def test_requests_for_a_prefix_that_is_being_pulled_wait_for_it_instead_of_pulling_it_again():
    fleet = fleet_of(2, FLOOR, placement=last_engine)
    fleet.engines[0].host.put("prefix", 4096)
    outcomes = fleet.serve([Request(f"{idx}", "prefix", 4096, 64, 1, 0.0) for idx in range(5)])
    parts = Counter((outcome.pulled_tokens, outcome.local_tokens) for outcome in outcomes)
    assert parts == {(4096, 0): 1, (0, 4096): 4}


def test_what_waits_for_the_end_of_a_step_does_not_wait_for_one_that_has_nothing_to_compute():
    fleet, called_at = fleet_of(2, FLOOR, placement=last_engine), []
    fleet.engines[0].host.put("prefix", 4096)
    reader = fleet.engines[1]
    reader.submit(Request("one", "prefix", 4096, 0, 1, 0.0))
    # Just when the request was taken in, and before the step begins that sets it aside for its pull.
    fleet.kernel.at(0.01, lambda: reader.between_steps(lambda: called_at.append(fleet.kernel.now)))
    fleet.kernel.run_until(1.0)
    assert called_at == [0.01]


def test_a_pull_that_does_not_come_in_time_is_computed():
    fleet = fleet_of(2, FLOOR, link=LinkProfile(60.0, 1e-9), placement=last_engine)
    fleet.engines[0].host.put("prefix", 4096)
    outcome = fleet.serve([Request("one", "prefix", 4096, 0, 1, 0.0)])[0]
    wait_s = FLOOR.pull_base_s + 4032 * FLOOR.pull_s_per_token
    assert (outcome.reason, outcome.pulled_tokens) == (DecisionReason.PULL, 0)
    assert outcome.first_token_s == pytest.approx(0.01 + wait_s + ENGINE.prefill_s(4096, 0))


def test_the_engine_learns_that_pulls_do_not_pay_and_stops_them():
    def n_pulled(policy: PolicySettings) -> int:
        fleet = fleet_of(2, policy, link=LinkProfile(2.0, 1e-9), placement=last_engine)
        requests = [Request(f"{idx}", f"prefix {idx}", 2048, 64, 1, 3.0 * idx) for idx in range(40)]
        for request in requests:
            fleet.kernel.at(request.arrived_at, lambda r=request: fleet.engines[0].host.put(r.prefix, 2048))
        return sum(outcome.reason is DecisionReason.PULL for outcome in fleet.serve(requests))

    assert n_pulled(FLOOR) == 40
    assert n_pulled(AUTO) <= 20


def test_a_request_reloads_what_the_device_lost_and_the_own_host_pool_has():
    fleet = fleet_of(1, AUTO)
    fleet.engines[0].host.put("prefix", 4096)
    outcome = fleet.serve([Request("one", "prefix", 4096, 64, 1, 0.0)])[0]
    assert (outcome.reason, outcome.reloaded_tokens) == (DecisionReason.RELOAD, 4096)


def test_requests_that_do_not_fit_together_wait_for_each_other():
    requests = [Request(f"{idx}", f"prefix {idx}", 12_000, 0, 5, 0.0) for idx in range(3)]
    outcomes = fleet_of(1, OFF).serve(requests)
    ends = [outcome.ended_at for outcome in outcomes]
    assert [outcome.first_token_at > end for outcome, end in zip(outcomes[1:], ends, strict=False)] == [True, True]


def test_a_request_whose_prefix_alone_fits_waits_without_keeping_others_out():
    requests = [
        Request("first", "prefix 0", 12_000, 0, 5, 0.0),
        Request("too much", "prefix 1", 7_900, 100, 5, 0.0),
        Request("next", "prefix 2", 12_000, 0, 5, 0.0),
    ]
    fleet = fleet_of(1, OFF)
    first, second, _ = fleet.serve(requests)
    assert second.first_token_at > first.ended_at
    assert fleet.engines[0].device.pinned_tokens == 0


def test_what_would_never_fit_is_refused_at_once():
    with pytest.raises(LocalProtocolError, match="larger than the device"):
        fleet_of(1, OFF).serve([Request("one", "prefix", 20_000, 0, 1, 0.0)])
