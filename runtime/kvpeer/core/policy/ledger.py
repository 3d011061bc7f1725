"""The memory behind the decisions of one engine: what pulls and prefills cost, what pulls saved, what the guard says.

An adapter asks for decisions and reports what it sees: pulls that began and ended, steps that were computed. It owns
clock and threads; here is neither. Not thread-safe.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvpeer.core.policy.costs import STEP_TOKENS, PrefillCosts, PullCosts
from kvpeer.core.policy.decision import (
    Action,
    Candidate,
    Decision,
    Estimates,
    Load,
    Located,
    RequestFacts,
    decide,
)
from kvpeer.core.policy.fit import Estimate
from kvpeer.core.policy.guard import GuardChange, Guards
from kvpeer.core.policy.settings import PolicySettings
from kvpeer.core.reasons import DecisionReason

__all__ = ["Ledger", "PullOutcome"]

PULLS_MAX = 1024
"""Pulls under way that are remembered: far more than an engine has. One that is never reported is forgotten then."""

LOST_AFTER = 3.0
"""A pull that nobody reports for so many times the longest wait is not counted as under way any more: a report that
went missing must not use up a source's budget for good. (It waits for a thread for half its time at most.)"""

SUPPORT_MIN = 0.3
"""With less evidence about computing so many tokens, pulls are not judged by it. One control is enough, and stays so
for some twenty further samples of other sizes."""

SOURCES_REMEMBERED_MAX = 1024
"""Producers whose last pull is remembered, for the time of the next try; as many as a cluster has members."""


@dataclass(frozen=True, slots=True)
class PullOutcome:
    """What became of a pull. `saved_s`: what it saved, negative if it lost time, None if nobody can say yet how long
    computing would have taken. `estimated_s`: how long it was thought to take."""

    seconds: float
    estimated_s: float
    saved_s: float | None
    changes: Sequence[GuardChange] = ()


@dataclass(frozen=True, slots=True)
class _Pull:
    producer: bytes
    page_bytes: int
    page_tokens: int
    n_resident_tokens: int
    n_in_flight: int
    estimates: Estimates | None
    lost_at: float
    is_probe: bool


@dataclass(slots=True)
class _Costs:
    """See `decision.Costs`."""

    pulls: PullCosts
    prefills: PrefillCosts

    def pull(self, producer: bytes, n_bytes: int, n_in_flight: int) -> Estimate:
        return self.pulls.estimate(producer, n_bytes, n_in_flight)

    def prefill(self, n_tokens: int, n_context: int) -> Estimate:
        return self.prefills.estimate(n_tokens, n_context)


@dataclass(slots=True)
class _Control:
    """Which request is computed to learn how long that takes: one behind so many pulls that could not be judged. It
    stays the one until the next: it is asked about as long as it cannot be scheduled, and pulls end meanwhile."""

    after_pulls: int
    n_unjudged: int = 0
    request: str | None = None

    def is_due(self, request: str) -> bool:
        return self.request == request or self.n_unjudged >= self.after_pulls

    def take(self, request: str) -> None:
        if self.request != request:
            self.request, self.n_unjudged = request, 0

    def unjudged(self) -> None:
        self.n_unjudged += 1


@dataclass(slots=True)
class Ledger:
    """See the module docstring. step_tokens: as many as the engine computes in one step at most."""

    settings: PolicySettings
    step_tokens: int = STEP_TOKENS
    guards: Guards = field(init=False)
    _costs: _Costs = field(init=False)
    _control: _Control = field(init=False)
    _pulls: OrderedDict[str, _Pull] = field(default_factory=OrderedDict)
    _pulled_at: OrderedDict[bytes, float] = field(default_factory=OrderedDict)
    _next_probe_at: float = -math.inf

    def __post_init__(self) -> None:
        calibration = self.settings.calibration
        self.guards = Guards(self.settings.guard)
        self._costs = _Costs(PullCosts(calibration), PrefillCosts(calibration, self.step_tokens))
        self._control = _Control(self.settings.guard.min_samples)

    def decide(
        self,
        request: RequestFacts,
        local_tokens: int,
        located: Located,
        candidates: Sequence[Candidate],
        load: Load,
        now: float,
    ) -> Decision:
        """See `decision.decide`; what it needs to know of costs, guards and pulls under way is added here. May be asked
        again for the same request."""
        if not self.settings.uses_costs:
            return decide(
                request, local_tokens, located, self.settings, self._counted(candidates, located, now), None, load
            )
        load = replace(
            load,
            is_held_off=self.guards.engine.is_off,
            may_try=now >= self._next_probe_at and self.guards.engine.may_try(now),
            is_control=self.settings.guard.is_on and self._control.is_due(request.request),
        )
        named = [
            replace(
                each,
                is_held_off=self.guards.is_off(each.producer),
                may_be_tried=self._may_try(each, now),
            )
            for each in self._counted(candidates, located, now)
        ]
        decision = decide(request, local_tokens, located, self.settings, named, self._costs, load)
        if decision.reason is DecisionReason.CONTROL:
            self._control.take(request.request)
        return decision

    def begun(self, request: RequestFacts, decision: Decision, now: float) -> None:
        """The decision is being carried out. Ignored unless it is a pull."""
        if decision.action is not Action.PULL:
            return
        self.guards.begun(decision.producer, now)
        self._pulled_at[decision.producer] = now
        self._pulled_at.move_to_end(decision.producer)
        if len(self._pulled_at) > SOURCES_REMEMBERED_MAX:
            self._pulled_at.popitem(last=False)
        is_probe = decision.reason is DecisionReason.PROBE
        if is_probe:
            self._next_probe_at = now + self.settings.guard.retry_s
        n_pulled = decision.estimates.n_tokens if decision.estimates is not None else 0
        self._pulls[request.request] = _Pull(
            decision.producer,
            request.page_bytes,
            request.page_tokens,
            decision.n_tokens - n_pulled,
            self._n_in_flight(decision.producer, now),
            decision.estimates,
            now + LOST_AFTER * self.settings.max_pull_wait_s,
            is_probe,
        )
        if len(self._pulls) > PULLS_MAX:
            self._pulls.popitem(last=False)

    def ended(self, request: str, n_tokens: int, seconds: float, now: float) -> PullOutcome | None:
        """A load is over: so many tokens beyond the engine's own were loaded, and it took so long. None unless it was
        a pull. What was aborted from outside is to be left out by `forget`."""
        pull = self._pulls.pop(request, None)
        if pull is None or pull.estimates is None or not math.isfinite(seconds):
            return None
        n_pulled = min(max(0, n_tokens - pull.n_resident_tokens), pull.estimates.n_tokens)
        if n_pulled > 0:
            n_bytes = n_pulled // pull.page_tokens * pull.page_bytes
            self._costs.pulls.observe(pull.producer, n_bytes, pull.n_in_flight, seconds)
        prefill = self._costs.prefill(n_pulled, pull.estimates.n_context)
        estimated_s = pull.estimates.pull.seconds
        if n_pulled > 0 and prefill.support < SUPPORT_MIN:
            self._control.unjudged()
            return PullOutcome(seconds, estimated_s, None)
        saved_s = prefill.seconds - seconds
        if pull.is_probe and saved_s > 0:
            self._next_probe_at = now  # what pays need not be rationed, and three in a row turn pulling on again
        changes = self.guards.judge(pull.producer, saved_s, now, seconds=seconds)
        return PullOutcome(seconds, estimated_s, saved_s, changes)

    def forget(self, request: str) -> None:
        """The request ended before its pull did: its duration says nothing."""
        self._pulls.pop(request, None)

    def computed(self, n_tokens: int, n_pairs: float, seconds: float) -> None:
        """A step that computed so many tokens, attending to so many others in all, took so long."""
        self._costs.prefills.observe(n_tokens, n_pairs, seconds)

    def expected_step_s(self, n_tokens: int, n_pairs: float) -> float:
        """How long such a step was thought to take when the last decision was made."""
        return self._costs.prefills.step_s(n_tokens, n_pairs)

    # ---- inside

    def _counted(self, candidates: Sequence[Candidate], located: Located, now: float) -> list[Candidate]:
        """The candidates with this engine's pulls from each; one without a name where nobody knows them."""
        known = candidates or (Candidate(b"", located.reachable_tokens),)
        return [replace(each, n_in_flight=self._n_in_flight(each.producer, now)) for each in known]

    def _n_in_flight(self, producer: bytes, now: float) -> int:
        return sum(pull.producer == producer and now < pull.lost_at for pull in self._pulls.values())

    def _may_try(self, candidate: Candidate, now: float) -> bool:
        """Whether, if nothing is to be pulled from it, one pull may be made all the same: of all producers together one
        in so long a time, unless it pays."""
        if now < self._next_probe_at:
            return False
        if self.guards.is_off(candidate.producer):
            return self.guards.may_try(candidate.producer, now)
        if candidate.n_in_flight:
            return False
        return now - self._pulled_at.get(candidate.producer, -math.inf) >= self.settings.guard.retry_s
