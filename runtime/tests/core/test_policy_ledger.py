"""A simulated engine over the real classes, on a clock of its own: what is learnt, what is turned off, what comes back.

Every request finds its whole prefix at one of some producers. The engine computes or pulls as decided, takes the time
that the test's world says, and reports what an adapter reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpeer.core.policy import (
    Action,
    Calibration,
    Candidate,
    Decision,
    GuardSettings,
    Ledger,
    Load,
    Located,
    Mode,
    PolicySettings,
    RequestFacts,
)
from kvpeer.core.policy.ledger import LOST_AFTER
from kvpeer.core.reasons import DecisionReason

PAGE_TOKENS, PAGE_BYTES = 16, 16 * 10_000
STEP_TOKENS = 2048
TAIL_TOKENS = 200
"""Tokens behind the shared prefix: computed in any case, so that the engine always sees some computing."""

GUARD = GuardSettings(min_samples=8, window=32, retry_s=30, retry_s_max=120, probes_to_return=3)


@dataclass
class World:
    """What things really take."""

    floor_s: float = 0.03
    s_per_byte: float = 1e-9
    s_per_token: float = 5e-5
    step_s: float = 0.005
    is_failing: bool = False
    stalls_every: int = 0
    """Each so many-th pull takes `stall_s` more; 0: none."""
    stall_s: float = 3.0
    n_pulls: int = 0

    def pull_s(self, n_tokens: int) -> float:
        return self.floor_s + self.s_per_byte * (n_tokens // PAGE_TOKENS * PAGE_BYTES)


@dataclass
class Engine:
    world: World
    ledger: Ledger
    now: float = 1000.0
    n_requests: int = 0
    lost_s: float = 0.0
    """Time spent beyond what computing everything would have taken."""
    changes: list[str] = field(default_factory=list)
    reasons: list[DecisionReason] = field(default_factory=list)

    def request(
        self, n_tokens: int = 4096, producers: Sequence[bytes] = (b"a",), reaches: Mapping[bytes, int] | None = None
    ) -> Decision:
        """reaches: how many tokens a producer has where that is not all of them."""
        self.n_requests += 1
        facts = RequestFacts(f"r{self.n_requests}", n_tokens + TAIL_TOKENS, PAGE_TOKENS, PAGE_BYTES)
        candidates = [Candidate(producer, (reaches or {}).get(producer, n_tokens)) for producer in producers]
        decision = self.ledger.decide(facts, 0, Located(0, n_tokens), candidates, Load(), self.now)
        self.ledger.begun(facts, decision, self.now)
        started, n_loaded = self.now, 0
        if decision.action is Action.PULL:
            needed_s = self.world.pull_s(decision.n_tokens)
            self.world.n_pulls += 1
            if self.world.stalls_every and self.world.n_pulls % self.world.stalls_every == 0:
                needed_s += self.world.stall_s
            is_over = needed_s <= decision.wait_s and not self.world.is_failing
            n_loaded = decision.n_tokens if is_over else 0
            seconds = needed_s if is_over else decision.wait_s
            self.now += seconds
            outcome = self.ledger.ended(facts.request, n_loaded, seconds, self.now)
            self.changes += [str(change) for change in (outcome.changes if outcome else ())]
        self._compute(n_loaded, facts.prompt_tokens)
        self.lost_s += (self.now - started) - self._computing_s(0, facts.prompt_tokens)
        self.reasons.append(decision.reason)
        self.now += 1.0
        return decision

    def _compute(self, n_context: int, until: int) -> None:
        for at in range(n_context, until, STEP_TOKENS):
            n = min(STEP_TOKENS, until - at)
            seconds = self.world.step_s + n * self.world.s_per_token
            self.now += seconds
            self.ledger.computed(n, n * (at + n / 2), seconds)

    def _computing_s(self, start: int, until: int) -> float:
        n_steps = -(-(until - start) // STEP_TOKENS)
        return n_steps * self.world.step_s + (until - start) * self.world.s_per_token


def engine(world: World | None = None, calibration: Calibration | None = None, **policy: object) -> Engine:
    chosen = {"mode": Mode.ON, "guard": GUARD, "calibration": calibration or Calibration(), **policy}
    return Engine(world or World(), Ledger(PolicySettings(**chosen), STEP_TOKENS))  # type: ignore[arg-type]


def test_while_nothing_is_known_the_floor_decides_as_ever():
    fresh = engine()
    assert fresh.request(496).reason is DecisionReason.BELOW_FLOOR
    assert fresh.request(512).reason is DecisionReason.PULL


def test_what_pays_goes_on_being_pulled_and_saves_time():
    paying = engine()
    reasons = Counter(paying.request(8192).reason for _ in range(200))
    assert reasons[DecisionReason.PULL] >= 180
    assert reasons[DecisionReason.CONTROL] <= 20
    assert paying.lost_s < 0
    assert paying.changes == []


def test_pulls_that_are_slow_are_soon_not_made_and_are_made_again_when_they_pay():
    slow = World(floor_s=1.0)
    harmed = engine(slow)
    for _ in range(60):
        harmed.request(8192)
    pulls = [reason for reason in harmed.reasons[20:] if reason in (DecisionReason.PULL, DecisionReason.PROBE)]
    assert set(pulls) == {DecisionReason.PROBE}
    assert len(pulls) <= 2
    slow.floor_s = 0.03
    for _ in range(400):
        harmed.request(8192)
    assert Counter(harmed.reasons[-50:])[DecisionReason.PULL] >= 45


def test_harm_that_no_estimate_foretells_turns_pulling_off_and_it_comes_back_when_it_pays():
    """Most pulls are quick, so that each looks worth it; together they lose time."""
    erratic = World(stalls_every=4)
    harmed = engine(erratic, max_pull_wait_s=60.0, pull_s_per_token=1.0, pull_base_s=60.0)
    for _ in range(80):
        harmed.request(8192)
    assert "is off" in harmed.changes[0]
    reasons = Counter(harmed.reasons)
    assert reasons[DecisionReason.PAIR_GUARDED] >= 35, "tries that paid by luck turn it on again, for eight pulls"
    assert reasons[DecisionReason.ENGINE_GUARDED] == 0
    erratic.stalls_every = 0
    for _ in range(200):
        harmed.request(8192)
    assert not harmed.ledger.guards.is_off(b"a")
    assert "is on again" in harmed.changes[-1]
    assert Counter(harmed.reasons[-50:])[DecisionReason.PULL] >= 45


def test_a_producer_that_fails_is_turned_off_and_the_other_one_is_not():
    both = engine(World())
    good, bad = b"good", b"bad"
    for n in range(60):
        both.world.is_failing = n % 2 == 0
        both.request(8192, [bad] if n % 2 == 0 else [good])
    assert both.ledger.guards.is_off(bad)
    assert not both.ledger.guards.is_off(good)
    both.world.is_failing = False
    chosen = [both.request(8192, [bad, good]) for _ in range(10)]
    assert {decision.producer for decision in chosen if decision.reason is DecisionReason.PULL} == {good}


def test_a_producer_that_recovered_is_found_although_another_one_has_a_part_of_what_it_has():
    both = engine(World(is_failing=True))
    far, near = b"far", b"near"
    for _ in range(20):
        both.request(8192, [far])
    assert both.ledger.guards.is_off(far)
    both.world.is_failing = False
    for _ in range(600):
        both.request(8192, [far, near], {near: 1024})
    assert not both.ledger.guards.is_off(far)
    assert both.reasons.count(DecisionReason.PROBE) >= GUARD.probes_to_return
    assert both.request(8192, [far, near], {near: 1024}).n_tokens == 8192


@pytest.mark.parametrize("is_calibrated", [True, False])
def test_however_many_producers_are_slow_one_in_a_while_is_tried(is_calibrated: bool):
    calibration = Calibration(pull_floor_s=1.0, prefill_s_per_token=5e-5, is_calibrated=is_calibrated)
    slow = engine(World(floor_s=1.0), calibration if is_calibrated else None)
    n_first = 0 if is_calibrated else 20
    for n in range(400):
        slow.request(4096, [b"p%d" % (n % 50)])
    later = Counter(slow.reasons[n_first:])
    assert later[DecisionReason.PULL] == 0
    assert 3 <= later[DecisionReason.PROBE] <= 1 + (slow.now - 1000.0) / GUARD.retry_s


def test_a_quick_producer_among_slow_ones_is_found_and_used():
    mixed = engine(World(floor_s=1.0), guard=GuardSettings(is_on=False))
    for n in range(30):
        mixed.request(8192, [b"slow%d" % n])
    mixed.world.floor_s = 0.01
    for _ in range(60):
        mixed.request(8192, [b"quick"])
    assert Counter(mixed.reasons[-20:])[DecisionReason.PULL] >= 19


factors = st.sampled_from([0.1, 1.0, 10.0])


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(
    factors,
    factors,
    factors,
    st.sampled_from([0.003, 0.03, 0.3, 2.0]),
    st.sampled_from([1e-5, 5e-5, 3e-4]),
    st.sampled_from([1024, 4096, 16384]),
)
def test_every_estimate_may_be_wrong_by_ten_times(
    floor_factor: float, byte_factor: float, prefill_factor: float, floor_s: float, s_per_token: float, n_tokens: int
):
    """Whatever is wrong with the calibration, harm ends within the guard's window, and what pays is pulled in the
    end."""
    world = World(floor_s=floor_s, s_per_token=s_per_token)
    wrong = Calibration(
        pull_floor_s=world.floor_s * floor_factor,
        pull_s_per_byte=world.s_per_byte * byte_factor,
        step_s=world.step_s * prefill_factor,
        prefill_s_per_token=world.s_per_token * prefill_factor,
        is_calibrated=True,
    )
    run = engine(world, wrong, max_pull_wait_s=30.0, pull_s_per_token=0.01)
    saving_s = n_tokens * world.s_per_token - world.pull_s(n_tokens)
    n_first = GUARD.window + GUARD.min_samples
    for _ in range(n_first):
        run.request(n_tokens)
    # A loss of less than a step and a twentieth of the pull is a tie: which steps are saved is not known beforehand.
    tie_s = n_first * (world.step_s + 0.05 * world.pull_s(n_tokens))
    assert run.lost_s <= (GUARD.window + 1) * max(0.0, -saving_s) + tie_s
    for _ in range(150):
        run.request(n_tokens)
    later = Counter(run.reasons[-100:])
    if saving_s < -0.3 * world.pull_s(n_tokens):
        assert later[DecisionReason.PULL] == 0, later
        assert later[DecisionReason.PROBE] <= 5, later
    if saving_s > 0.6 * world.pull_s(n_tokens):
        assert later[DecisionReason.PULL] + later[DecisionReason.PROBE] >= 80, later


def test_auto_finds_the_length_from_which_pulls_pay():
    world = World(floor_s=0.2, s_per_byte=1e-10, s_per_token=1e-4)
    auto = engine(world, min_cached_token_delta=None, margin=0.0)
    lengths = (1024, 1536, 3072, 4096)
    for n in range(400):
        auto.request(lengths[n % len(lengths)])
    pulled = Counter(lengths[n % len(lengths)] for n in range(200, 400) if auto.reasons[n] is DecisionReason.PULL)
    break_even = 0.2 / (1e-4 + 0.005 / STEP_TOKENS - 1e-10 * PAGE_BYTES / PAGE_TOKENS)
    assert 1536 < break_even < 3072
    assert pulled[4096] >= 45
    assert pulled[3072] >= 45
    assert pulled[1024] == pulled[1536] == 0


def test_shadow_pulls_nothing_and_says_what_it_would_have_saved():
    shadow = engine(mode=Mode.SHADOW, calibration=Calibration(pull_floor_s=0.03, is_calibrated=True))
    decisions = [shadow.request(8192) for _ in range(50)]
    assert {decision.action for decision in decisions} == {Action.NONE}
    last = decisions[-1]
    assert last.reason is DecisionReason.SHADOW
    assert last.estimates is not None
    truth = 8192 * (5e-5 + 0.005 / STEP_TOKENS) - shadow.world.pull_s(8192)
    assert last.estimates.saved_s == pytest.approx(truth, rel=0.2)


def test_without_costs_the_floor_alone_decides_and_nothing_is_judged():
    plain = engine(World(floor_s=3.0), uses_costs=False)
    assert {plain.request(8192).reason for _ in range(60)} == {DecisionReason.PULL}
    assert plain.changes == []


def test_no_more_pulls_than_allowed_run_from_one_source():
    ledger = Ledger(PolicySettings(Mode.ON, pulls_per_source_max=2))
    reasons = []
    for n in range(3):
        facts = RequestFacts(f"r{n}", 2000, 16, 1000)
        decision = ledger.decide(facts, 0, Located(0, 1600), [Candidate(b"a", 1600)], Load(), 0.0)
        ledger.begun(facts, decision, 0.0)
        reasons.append(decision.reason)
    assert reasons == [DecisionReason.PULL, DecisionReason.PULL, DecisionReason.SOURCE_BUSY]
    facts = RequestFacts("r3", 2000, 16)
    lost_at = LOST_AFTER * ledger.settings.max_pull_wait_s
    for now, reason in ((lost_at - 0.1, DecisionReason.SOURCE_BUSY), (lost_at, DecisionReason.PULL)):
        assert ledger.decide(facts, 0, Located(0, 1600), [Candidate(b"a", 1600)], Load(), now).reason is reason
    ledger.forget("r0")
    again = ledger.decide(facts, 0, Located(0, 1600), [Candidate(b"a", 1600)], Load(), 0.0)
    assert again.reason is DecisionReason.PULL


def test_asking_again_for_the_same_request_gives_the_same_answer():
    asked = engine(World(floor_s=0.01))
    asked.world.s_per_token = 1e-9  # nothing is computed that would tell what computing takes
    for _ in range(30):
        facts = RequestFacts(f"x{asked.n_requests}", 9000, PAGE_TOKENS, PAGE_BYTES)
        answers = {
            asked.ledger.decide(facts, 0, Located(0, 8192), [Candidate(b"a", 8192)], Load(), asked.now).reason
            for _ in range(3)
        }
        assert len(answers) == 1
        asked.request(8192)


def test_a_control_stays_one_while_other_pulls_end():
    ledger = Ledger(PolicySettings(Mode.ON, guard=GUARD, pulls_per_source_max=20))

    def decided(name: str) -> DecisionReason:
        facts = RequestFacts(name, 9000, PAGE_TOKENS, PAGE_BYTES)
        decision = ledger.decide(facts, 0, Located(0, 8192), [Candidate(b"a", 8192)], Load(), 0.0)
        ledger.begun(facts, decision, 0.0)
        return decision.reason

    def ended(name: str) -> None:
        outcome = ledger.ended(name, 8192, 0.05, 0.0)
        assert outcome is not None
        assert outcome.saved_s is None

    names = [f"r{n}" for n in range(GUARD.min_samples - 1)]
    assert {decided(name) for name in [*names, "last", "late"]} == {DecisionReason.PULL}
    for name in [*names, "last"]:
        ended(name)
    assert decided("control") is DecisionReason.CONTROL
    ended("late")
    assert decided("control") is DecisionReason.CONTROL
    assert decided("another") is DecisionReason.PULL


def test_the_end_of_what_was_no_pull_says_nothing():
    ledger = Ledger(PolicySettings(Mode.ON))
    assert ledger.ended("unknown", 100, 1.0, 0.0) is None
    ledger.forget("unknown")
