"""Metrics of decisions to pull, which are made in engine processes: each adapter shows them where its engine's metrics
are, with the engine's labels beside these."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvpeer.metrics.metric import Metric, counter, gauge

__all__ = ["DECISION_REASONS", "POLICY_METRICS"]

DECISION_REASONS = (
    "local_hit", "nothing_found", "reload", "pull", "mode_off", "below_floor", "busy", "no_time", "not_worth_it",
    "source_busy", "pair_guarded", "engine_guarded", "probe", "control", "shadow",
)  # fmt: skip
"""Those of `kvpeer.core.reasons`; a test compares."""

_EFFECTS = ("saved", "lost")
_ESTIMATED = ("pull", "step")

POLICY_METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "decisions": counter(
            "kvpeer_policy_decisions_total", "", "Requests by what was decided, once for each attempt to run one.",
            "Why are pages pulled, or not?", reason=DECISION_REASONS,
        ),
        "pull_effect": counter(
            "kvpeer_policy_pull_effect_seconds_total", "seconds",
            "Time that pulls saved or lost against computing the same tokens; failed pulls lose all their time.",
            "Does pulling pay?", effect=_EFFECTS,
        ),
        "shadow_effect": counter(
            "kvpeer_policy_shadow_effect_seconds_total", "seconds",
            "Time that pulls would have saved or lost by the estimates, in mode shadow.",
            "Would pulling pay?", effect=_EFFECTS,
        ),
        "unjudged_pulls": counter(
            "kvpeer_policy_unjudged_pulls_total", "",
            "Pulls of which nobody can say what they saved: too little was computed here so far.",
            "Does the guard see anything?",
        ),
        "estimated": counter(
            "kvpeer_policy_estimated_seconds_total", "seconds",
            "How long pulls and engine steps were estimated to take.", "Are estimates right?", what=_ESTIMATED,
        ),
        "measured": counter(
            "kvpeer_policy_measured_seconds_total", "seconds", "How long the same pulls and engine steps took.",
            "Are estimates right?", what=_ESTIMATED,
        ),
        "guard_changes": counter(
            "kvpeer_policy_guard_changes_total", "", "Times that the guard turned pulling off or on; the log says why.",
            "Did pulling do harm?", change=("producer_off", "producer_on", "engine_off", "engine_on"),
        ),
        "guarded": gauge(
            "kvpeer_policy_guarded", "",
            "Producers that nothing is pulled from because it did harm; for the engine, 1 while that goes for all.",
            "Is pulling off?", scope=("producers", "engine"),
        ),
    }
)  # fmt: skip
"""By the name that adapters count under."""
