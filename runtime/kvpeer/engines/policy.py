"""The policy of one engine with everything around it: decisions are counted, guards' changes logged, times taken.

An adapter reports what it sees; what it cannot see (steps, say) it leaves out, and the policy then knows less. Belongs
to one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvpeer.core.policy import Candidate, Decision, Ledger, Load, Located, PolicySettings, RequestFacts
from kvpeer.core.policy.costs import PROMPT_TOKENS_MIN, STEP_TOKENS
from kvpeer.core.reasons import DecisionReason
from kvpeer.engines.pace import Pace
from kvpeer.engines.traces import NO_LOOKUP, NO_TRACES, DecisionTraces, Lookup

__all__ = ["EnginePolicy", "PolicyMeter"]

STEPS_MAX = 64
"""Steps under way that are remembered. An engine has two or three; more is an engine that reports nothing."""

REPORTS_MAX = 1024
"""Loads of which some ranks have reported. An engine has a dozen."""


class PolicyMeter(Protocol):
    """Counts under the names of `kvpeer.metrics.policy`."""

    def count(self, metric: str, label: str = "", amount: float = 1) -> None: ...
    def set_gauge(self, metric: str, label: str, value: float) -> None: ...


@dataclass(frozen=True, slots=True)
class _Step:
    n_tokens: int
    n_pairs: float
    n_prompt_tokens: int
    scheduled_at: float


@dataclass(slots=True)
class _Reported:
    """What the ranks said of a load so far: the least that one of them loaded, and the longest that one took."""

    n_tokens: int
    seconds: float
    is_void: bool


@dataclass(slots=True)
class EnginePolicy:
    """See the module docstring."""

    settings: PolicySettings
    meter: PolicyMeter
    clock: Callable[[], float]
    logger: logging.Logger
    step_tokens: int = STEP_TOKENS
    pace: Pace = field(default_factory=Pace)
    """Of the steps so far."""
    traces: DecisionTraces = NO_TRACES
    _ledger: Ledger = field(init=False)
    _steps: dict[int, _Step] = field(default_factory=dict)
    _last_output_at: float = 0.0
    _reports: dict[str, _Reported] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ledger = Ledger(self.settings, self.step_tokens)
        for scope in ("producers", "engine"):
            self.meter.set_gauge("guarded", scope, 0)

    def decide(
        self,
        request: RequestFacts,
        local_tokens: int,
        located: Located,
        candidates: Sequence[Candidate],
        load: Load,
        *,
        is_counted: bool = True,
        lookup: Lookup = NO_LOOKUP,
    ) -> Decision:
        """See `Ledger.decide`. is_counted: False for one that is only asked again. lookup: for the request's trace."""
        decision = self._ledger.decide(request, local_tokens, located, candidates, load, self.clock())
        self.traces.decided(request, local_tokens, located, candidates, decision, lookup)
        if is_counted:
            self._show_guarded()
            self.meter.count("decisions", decision.reason.value)
            if decision.reason is DecisionReason.SHADOW and decision.estimates is not None:
                self._count_effect("shadow_effect", decision.estimates.saved_s)
        return decision

    def change(self, settings: PolicySettings) -> None:
        """Decides by these settings from now on. What was learnt stays; the guard is that of the start."""
        self.settings = self._ledger.settings = settings

    def begun(self, request: RequestFacts, decision: Decision) -> None:
        """The decision is being carried out."""
        self._reports.pop(request.request, None)
        self._ledger.begun(request, decision, self.clock())

    def reported(self, request: str, n_tokens: int, seconds: float, *, is_void: bool) -> None:
        """A rank's load is over: so many tokens were loaded. is_void: why it ended says nothing about its producer."""
        known = self._reports.pop(request, None) or _Reported(n_tokens, seconds, is_void)
        known.n_tokens = min(known.n_tokens, n_tokens)
        known.seconds = max(known.seconds, seconds)
        known.is_void |= is_void
        self._reports[request] = known
        if len(self._reports) > REPORTS_MAX:
            del self._reports[next(iter(self._reports))]

    def ended(self, requests: Iterable[str]) -> None:
        """All ranks' loads of these requests are over and reported."""
        for request in requests:
            known = self._reports.pop(request, None)
            if known is not None:
                self.traces.loaded(request, known.n_tokens, known.seconds, is_void=known.is_void)
            if known is None or known.is_void:
                self._ledger.forget(request)
            else:
                self._judge(request, known)

    def forget(self, request: str) -> None:
        """The request is over; a pull of it that is still under way says nothing."""
        self._reports.pop(request, None)
        self._ledger.forget(request)
        self.traces.over(request)

    # ---- steps

    def step_scheduled(self, step: int, requests: Iterable[tuple[int, int, int]]) -> None:
        """A step begins as soon as the one before is over: per request (tokens computed before, tokens in it, drafts
        among them). A request that computes more than one token that is no draft computes its prompt."""
        n_tokens, n_pairs, n_prompt_tokens = 0, 0.0, 0
        for n_computed, n_scheduled, n_draft in requests:
            n_tokens += n_scheduled
            n_pairs += n_scheduled * (n_computed + n_scheduled / 2)
            n_prompt_tokens += n_scheduled if n_scheduled - n_draft > 1 else 0
        if n_tokens:
            self._steps[step] = _Step(n_tokens, n_pairs, n_prompt_tokens, self.clock())
            if len(self._steps) > STEPS_MAX:
                del self._steps[next(iter(self._steps))]

    def step_ended(self, step: int) -> None:
        """The output of a step is here. Those with few tokens of prompts say nothing about costs."""
        now, ended = self.clock(), self._steps.pop(step, None)
        if ended is None:
            self._last_output_at = now
            return
        seconds = now - max(ended.scheduled_at, self._last_output_at)
        has_prompt = ended.n_prompt_tokens >= PROMPT_TOKENS_MIN
        self.pace.step_took(seconds, ended.n_tokens, has_prompt=has_prompt)
        if has_prompt:
            self.meter.count("estimated", "step", self._ledger.expected_step_s(ended.n_tokens, ended.n_pairs))
            self.meter.count("measured", "step", seconds)
            self._ledger.computed(ended.n_tokens, ended.n_pairs, seconds)
        self._last_output_at = now

    # ---- inside

    def _judge(self, request: str, known: _Reported) -> None:
        outcome = self._ledger.ended(request, known.n_tokens, known.seconds, self.clock())
        if outcome is None:
            return
        self.meter.count("estimated", "pull", outcome.estimated_s)
        self.meter.count("measured", "pull", outcome.seconds)
        if outcome.saved_s is None:
            self.meter.count("unjudged_pulls")
        else:
            self._count_effect("pull_effect", outcome.saved_s)
        for change in outcome.changes:
            scope = "engine" if change.producer is None else "producer"
            self.meter.count("guard_changes", f"{scope}_{'off' if change.is_off else 'on'}")
            self.logger.log(logging.WARNING if change.is_off else logging.INFO, "kvpeer: %s", change)
        if outcome.changes:
            self._show_guarded()

    def _show_guarded(self) -> None:
        self.meter.set_gauge("guarded", "producers", self._ledger.guards.n_pairs_off(self.clock()))
        self.meter.set_gauge("guarded", "engine", int(self._ledger.guards.engine.is_off))

    def _count_effect(self, metric: str, saved_s: float) -> None:
        self.meter.count(metric, "saved" if saved_s >= 0 else "lost", abs(saved_s))
