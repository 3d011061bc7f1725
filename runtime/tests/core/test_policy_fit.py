"""Cost models: they learn what is so, follow what changes, and stay numbers whatever they are fed."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpeer.core.policy import Calibration, Fit, PrefillCosts, PullCosts
from kvpeer.core.policy.costs import PAIRS_MAX
from kvpeer.core.policy.fit import KNOWN_AFTER_SAMPLES
from kvpeer.model import ConfigError, LocalProtocolError

START = (0.02, 1e-9, 0.01)

anything = st.floats(allow_nan=True, allow_infinity=True)
adversarial = st.lists(st.tuples(st.tuples(anything, anything, anything), anything), max_size=60)
sizes = st.tuples(st.floats(0, 10), st.floats(0, 1e12), st.floats(0, 100))


def is_sound(fit: Fit, at: tuple[float, float, float]) -> bool:
    estimate = fit.estimate(at)
    return all(math.isfinite(x) and x >= 0 for x in (estimate.seconds, estimate.deviation_s, *fit.costs))


@given(adversarial, sizes)
def test_no_samples_whatever_blow_it_up(samples: list[tuple[tuple[float, float, float], float]], at):
    fit = Fit(START)
    for where, seconds in samples:
        fit.observe(where, seconds)
        assert is_sound(fit, at)
    assert is_sound(fit, (math.nan, math.inf, -math.inf))


@given(st.floats(0, 1e9), sizes, st.integers(1, 30))
def test_the_same_sample_over_and_over_makes_nothing_uncertain_without_limit(seconds: float, where, hundreds: int):
    fit = Fit(START)
    for _ in range(10 * hundreds):
        fit.observe(where, seconds)
    wide = fit.estimate((1, 1e9, 10))
    assert wide.deviation_s <= 101 * (wide.seconds + 1.13)


@given(adversarial, sizes, sizes)
def test_larger_sizes_never_take_less(samples, at, more):
    fit = Fit(START)
    for where, seconds in samples:
        fit.observe(where, seconds)
    larger = tuple(a + b for a, b in zip(at, more, strict=True))
    assert fit.estimate(larger).seconds >= fit.estimate(at).seconds * (1 - 1e-9)


def learn(fit: Fit, costs: tuple[float, float, float], n: int, seed: int, noise: float = 0.1) -> None:
    rng = random.Random(seed)
    for _ in range(n):
        where = (1.0, rng.uniform(1e6, 1e9), float(rng.randrange(4)))
        truth = sum(c * x for c, x in zip(costs, where, strict=True))
        fit.observe(where, truth * rng.uniform(1 - noise, 1 + noise))


@pytest.mark.parametrize("factors", list(itertools.product((0.1, 1.0, 10.0), repeat=2)))
@pytest.mark.parametrize("seed", range(5))
def test_a_start_wrong_by_ten_times_is_corrected_within_a_window(factors: tuple[float, float], seed: int):
    truth = (START[0] * factors[0], START[1] * factors[1], START[2] * factors[0])
    fit = Fit(START)
    learn(fit, truth, 32, seed)
    for n_bytes in (1e8, 1e9):
        expected = truth[0] + truth[1] * n_bytes
        assert fit.estimate((1, n_bytes, 0)).seconds == pytest.approx(expected, rel=0.35)


@pytest.mark.parametrize("factor", [0.1, 10.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_lasting_change_by_ten_times_is_followed_within_a_window(factor: float, seed: int):
    fit = Fit(START)
    learn(fit, START, 200, seed)
    changed = (START[0] * factor, START[1] * factor, START[2] * factor)
    learn(fit, changed, 32, seed + 1)
    assert fit.estimate((1, 5e8, 0)).seconds == pytest.approx(changed[0] + changed[1] * 5e8, rel=0.35)


@given(st.floats(0, math.inf), sizes.filter(lambda at: sum(at) > 0))
def test_one_outlier_moves_little(seconds: float, where):
    fit = Fit(START)
    learn(fit, START, 100, seed=1)
    before = fit.estimate((1, 5e8, 0)).seconds
    fit.observe(where, seconds)
    assert fit.estimate((1, 5e8, 0)).seconds == pytest.approx(before, rel=0.15)


def test_an_estimate_is_known_after_enough_samples_or_by_calibration():
    fit = Fit(START)
    for n in range(KNOWN_AFTER_SAMPLES):
        assert fit.is_known is fit.estimate((1, 0, 0)).is_known is False, n
        fit.observe((1, 0, 0), 0.02)
    assert fit.is_known
    assert Fit(START, is_calibrated=True).is_known


def test_what_was_not_seen_is_less_certain_than_what_was():
    fit = Fit(START)
    for _ in range(30):
        fit.observe((1, 1e6, 0), 0.021)
    near, far = fit.estimate((1, 1e6, 0)), fit.estimate((1, 1e10, 0))
    assert near.deviation_s < 0.25 * near.seconds
    assert far.deviation_s > 0.5 * far.seconds
    assert near.support > 5
    assert far.support < 0.1
    fit.observe((1, 1e10, 0), 10.02)
    assert 0.5 < fit.estimate((1, 1e10, 0)).support <= 1.1
    calibrated = Fit(START, is_calibrated=True).estimate((1, 1e10, 0))
    assert calibrated.deviation_s < 0.5 * calibrated.seconds


@pytest.mark.parametrize("start", [(), (0.0,), (-1.0, 1.0), (math.nan,), (math.inf,)])
def test_costs_to_start_from_are_positive(start: tuple[float, ...]):
    with pytest.raises(LocalProtocolError, match="positive"):
        Fit(start)


# ---- pulls and prefills


def test_each_producer_has_its_own_model_and_new_ones_start_from_all():
    pulls = PullCosts(Calibration())
    assert not pulls.estimate(b"near", 10**9, 0).is_known
    for n in range(60):
        n_bytes = (1 + n % 7) * 10**8
        pulls.observe(b"near", n_bytes, 0, 0.01 + n_bytes * 1e-10)
        pulls.observe(b"far", n_bytes, 0, 0.1 + n_bytes * 1e-8)
    near, far, new = (pulls.estimate(name, 10**9, 0) for name in (b"near", b"far", b"new"))
    assert near.seconds == pytest.approx(0.11, rel=0.3)
    assert far.seconds == pytest.approx(10.1, rel=0.3)
    assert near.seconds < new.seconds < far.seconds
    assert all(each.is_known for each in (near, far, new))


def test_pulls_under_way_make_a_pull_longer():
    pulls = PullCosts(Calibration())
    for n in range(80):
        n_bytes, n_in_flight = (1 + n % 7) * 10**7, n % 4
        pulls.observe(b"p", n_bytes, n_in_flight, 0.02 + n_bytes * 1e-9 + 0.1 * n_in_flight)
    alone, crowded = pulls.estimate(b"p", 10**7, 0).seconds, pulls.estimate(b"p", 10**7, 3).seconds
    assert crowded - alone == pytest.approx(0.3, rel=0.25)


def test_only_so_many_producers_are_remembered():
    pulls = PullCosts(Calibration())
    for n in range(PAIRS_MAX + 10):
        pulls.observe(str(n).encode(), 10**6, 0, 0.02)
    assert len(pulls) == PAIRS_MAX


def test_prefill_costs_are_learnt_from_steps_and_grow_faster_than_the_tokens():
    prefills = PrefillCosts(Calibration(), step_tokens=2048)
    rng = random.Random(3)
    for _ in range(100):
        n_tokens, context = rng.randrange(64, 2048), rng.randrange(0, 40_000)
        n_pairs = n_tokens * (context + n_tokens / 2)
        prefills.observe(n_tokens, n_pairs, 0.01 + n_tokens * 3e-5 + n_pairs * 6e-10)
    for n_tokens, context in ((8192, 0), (8192, 32_768), (32_768, 0)):
        truth = n_tokens * (3e-5 + 0.01 / 2048) + n_tokens * (context + n_tokens / 2) * 6e-10
        assert prefills.estimate(n_tokens, context).seconds == pytest.approx(truth, rel=0.2)
    assert prefills.estimate(0, 1000).seconds == 0
    assert prefills.estimate(20_000, 0).seconds > 2 * prefills.estimate(10_000, 0).seconds


@pytest.mark.parametrize("name", ["pull_floor_s", "pull_s_per_byte", "prefill_s_per_token"])
def test_a_calibration_that_makes_no_sense_is_refused_by_name(name: str):
    with pytest.raises(ConfigError, match=name):
        Calibration(**{name: 0.0})
