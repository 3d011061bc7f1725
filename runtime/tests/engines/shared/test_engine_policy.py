"""What an adapter sees becomes what the policy knows: steps, loads of several ranks, and metrics of all that."""

from __future__ import annotations

import logging

import pytest
from kvpeer.core.policy import Decision, GuardSettings, Load, Located, Mode, PolicySettings, RequestFacts
from kvpeer.core.policy.costs import PROMPT_TOKENS_MIN
from kvpeer.core.reasons import DecisionReason
from kvpeer.engines.policy import REPORTS_MAX, STEPS_MAX, EnginePolicy
from kvpeer.engines.vllm.tally import Tally
from kvpeer.metrics.policy import POLICY_METRICS

GUARD = GuardSettings(min_samples=4, window=8)


class Driver:
    """An engine that computes 10,000 tokens a second and reports what its ranks say."""

    def __init__(self, mode: Mode = Mode.ON) -> None:
        self.now = 100.0
        self.tally = Tally()
        settings = PolicySettings(mode, guard=GUARD, max_pull_wait_s=60.0)
        self.policy = EnginePolicy(settings, self.tally, lambda: self.now, logging.getLogger("tests"))
        self.n = 0

    def compute(self, n_tokens: int, n_steps: int = 10) -> None:
        for _ in range(n_steps):
            self.n += 1
            self.policy.step_scheduled(self.n, [(0, n_tokens, 0)])
            self.now += n_tokens * 1e-4
            self.policy.step_ended(self.n)

    def decide(self, n_tokens: int = 2048, *, is_counted: bool = True) -> tuple[RequestFacts, Decision]:
        self.n += 1
        facts = RequestFacts(f"r{self.n}", n_tokens + 1, 16, 1000)
        located = Located(0, n_tokens)
        return facts, self.policy.decide(facts, 0, located, (), Load(), is_counted=is_counted)

    def pull(self, *seconds_of_ranks: float, n_tokens: int = 2048, is_void: bool = False) -> DecisionReason:
        facts, decision = self.decide(n_tokens)
        self.policy.begun(facts, decision)
        for seconds in seconds_of_ranks:
            self.policy.reported(facts.request, n_tokens, seconds, is_void=is_void)
        self.policy.ended([facts.request])
        return decision.reason

    def take(self) -> dict[str, dict[str, dict[str, float]]]:
        return self.tally.take() or {"counts": {}, "gauges": {}}


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_decisions_are_counted_once_by_their_reason(driver: Driver) -> None:
    driver.decide()
    driver.decide(is_counted=False)
    driver.decide(496)
    assert driver.take()["counts"]["decisions"] == {"pull": 1, "below_floor": 1}


def test_a_pull_takes_as_long_as_its_slowest_rank_and_saves_what_computing_would_have_taken(driver: Driver) -> None:
    driver.compute(2048)
    driver.take()
    driver.pull(0.05, 0.15, 0.1)
    counts = driver.take()["counts"]
    assert counts["measured"] == {"pull": pytest.approx(0.15)}
    assert counts["pull_effect"] == {"saved": pytest.approx(0.2048 - 0.15, rel=0.2)}


def test_a_pull_brings_what_its_worst_rank_loaded(driver: Driver) -> None:
    driver.compute(2048)
    driver.take()
    facts, decision = driver.decide()
    driver.policy.begun(facts, decision)
    for n_tokens in (1024, 2048):
        driver.policy.reported(facts.request, n_tokens, 0.01, is_void=False)
    driver.policy.ended([facts.request])
    saved_s = driver.take()["counts"]["pull_effect"]["saved"]
    assert saved_s == pytest.approx(0.1024 - 0.01, rel=0.2)


def test_pulls_that_cannot_be_judged_are_counted(driver: Driver) -> None:
    driver.pull(0.1)
    counts = driver.take()["counts"]
    assert counts["unjudged_pulls"] == {"": 1}
    assert "pull_effect" not in counts


def test_a_pull_that_is_void_or_was_not_reported_says_nothing(driver: Driver) -> None:
    driver.compute(2048)
    driver.take()
    driver.pull(9.0, is_void=True)
    driver.pull()
    facts, decision = driver.decide()
    driver.policy.begun(facts, decision)
    driver.policy.forget(facts.request)
    driver.policy.reported(facts.request, 2048, 9.0, is_void=False)
    driver.policy.ended([facts.request])
    assert set(driver.take()["counts"]) == {"decisions"}


def test_the_guard_says_what_it_does_in_log_and_metrics(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    driver.compute(2048)
    assert driver.take()["gauges"]["guarded"] == {"producers": 0, "engine": 0}
    with caplog.at_level(logging.INFO, "tests"):
        for _ in range(GUARD.min_samples):
            assert driver.pull(1.2) is DecisionReason.PULL
    taken = driver.take()
    assert taken["counts"]["guard_changes"] == {"producer_off": 1}
    assert taken["gauges"]["guarded"] == {"producers": 1, "engine": 0}
    assert "took 3.9" in caplog.text or "took 4" in caplog.text
    assert driver.pull() is DecisionReason.PAIR_GUARDED
    for _ in range(GUARD.probes_to_return):
        driver.now += GUARD.retry_s
        assert driver.pull(0.01) is DecisionReason.PROBE
    taken = driver.take()
    assert taken["counts"]["guard_changes"] == {"producer_on": 1}
    assert taken["gauges"]["guarded"] == {"producers": 0, "engine": 0}


def test_a_producer_that_is_gone_is_not_shown_as_guarded_for_ever(driver: Driver) -> None:
    driver.compute(2048)
    for _ in range(GUARD.min_samples):
        driver.pull(1.2)
    for wait_s, n_guarded in ((GUARD.retry_s + GUARD.retry_s_max - 1, 1), (2, 0)):
        driver.now += wait_s
        driver.decide(0)
        assert driver.take()["gauges"]["guarded"]["producers"] == n_guarded


def test_shadow_counts_what_would_have_been_saved() -> None:
    driver = Driver(Mode.SHADOW)
    driver.compute(2048)
    driver.decide(20_000)
    counts = driver.take()["counts"]
    assert counts["decisions"] == {"shadow": 1}
    assert counts["shadow_effect"]["saved"] == pytest.approx(2.0, rel=0.2)


def test_steps_that_overlap_are_timed_by_their_outputs(driver: Driver) -> None:
    policy = driver.policy
    policy.step_scheduled(1, [(0, 200, 0)])
    policy.step_scheduled(2, [(0, 200, 0)])  # scheduled ahead; it runs once the first is over
    driver.now += 1.0
    policy.step_ended(1)
    driver.now += 0.25
    policy.step_ended(2)
    assert driver.take()["counts"]["measured"] == {"step": pytest.approx(1.25)}


def test_steps_that_only_generate_or_end_a_prompt_say_nothing_of_prompts(driver: Driver) -> None:
    driver.policy.step_scheduled(1, [(n, 1, 0) for n in range(PROMPT_TOKENS_MIN)] + [(512, PROMPT_TOKENS_MIN - 1, 0)])
    driver.policy.step_ended(1)
    driver.policy.step_scheduled(2, [])
    driver.policy.step_ended(2)
    assert "measured" not in driver.take()["counts"]


def test_drafts_that_are_checked_are_no_prompts(driver: Driver) -> None:
    driver.policy.step_scheduled(1, [(4000, 5, 4)] * PROMPT_TOKENS_MIN + [(512, PROMPT_TOKENS_MIN - 1, 0)])
    driver.policy.step_ended(1)
    assert "measured" not in driver.take()["counts"]


def test_what_is_never_reported_takes_no_room_for_good(driver: Driver) -> None:
    for n in range(max(STEPS_MAX, REPORTS_MAX) + 5):
        driver.policy.step_scheduled(n, [(0, 5, 0)])
        driver.policy.reported(f"r{n}", 1, 1.0, is_void=False)
    assert len(driver.policy._steps) == STEPS_MAX
    assert len(driver.policy._reports) == REPORTS_MAX


def test_every_name_and_label_that_is_counted_is_defined() -> None:
    driver = Driver()
    driver.compute(2048)
    for _ in range(GUARD.min_samples):
        driver.pull(3.0)
    driver.pull()
    taken = driver.take()
    for kind in ("counts", "gauges"):
        for name, labels in taken[kind].items():
            metric = POLICY_METRICS[name]
            (allowed,) = metric.labels.values() if metric.labels else ((""),)
            assert set(labels) <= set(allowed or [""]), name
    assert set(POLICY_METRICS["decisions"].labels["reason"]) == {reason.value for reason in DecisionReason}
