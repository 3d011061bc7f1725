"""One request on an idle pair of engines, computed and pulled: the simulated curves, and where they meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvpeer.core.policy import Calibration, Mode, PolicySettings
from kvpeer.core.reasons import DecisionReason
from kvpeer.sim.fleet.fleet import Fleet, FleetProfile
from kvpeer.sim.fleet.profile import EngineProfile, LinkProfile, fitted
from kvpeer.sim.fleet.published import PeerCurve
from kvpeer.sim.fleet.workload import Outcome, Request

__all__ = ["BreakEven", "CurveRow", "break_even", "curve_rows", "one_request"]

TOKENS_MAX = 1 << 17
"""No published curve is longer; a break-even beyond is none."""

IN_FLIGHT_SHARE = 0.1
"""Calibrated costs of a pull beside others are not published; the policy starts from this part of the floor."""


@dataclass(frozen=True, slots=True)
class CurveRow:
    """Published and simulated times to first token of a prefix. `held_out_*`: simulated by what was fitted to all other
    rows of the table: what the model says where it was not told."""

    n_tokens: int
    recompute_ms: float
    pull_ms: float
    sim_recompute_ms: float
    sim_pull_ms: float
    held_out_recompute_ms: float
    held_out_pull_ms: float


@dataclass(frozen=True, slots=True)
class BreakEven:
    """From which length on a pull takes no longer than computing, and from which one on the policy pulls, with its
    margin and calibrated with the fitted costs. None: not up to TOKENS_MAX."""

    equal_tokens: int | None
    policy_tokens: int | None


def curve_rows(curve: PeerCurve) -> list[CurveRow]:
    """The published table, row by row, with what the simulated fleet makes of it."""
    whole = fitted(curve)
    rows = []
    for row, n_tokens in enumerate(curve.tokens):
        held_out = fitted(curve, without_row=row)
        simulated = [
            one_request(*costs, n_tokens, settings).first_token_s * 1e3
            for costs in (whole, held_out)
            for settings in (_NEVER, _ALWAYS)
        ]
        rows.append(CurveRow(n_tokens, curve.recompute_ms[row], curve.pull_ms[row], *simulated))
    return rows


def break_even(curve: PeerCurve) -> BreakEven:
    """Where pulling begins to pay, by the simulated fleet."""
    engine, link = fitted(curve)

    def pulls_no_slower(n_tokens: int) -> bool:
        pulled, computed = (one_request(engine, link, n_tokens, settings) for settings in (_ALWAYS, _NEVER))
        return pulled.pulled_tokens > 0 and pulled.first_token_s <= computed.first_token_s

    settings = PolicySettings(
        Mode.ON, None, pull_base_s=_PATIENT_S, max_pull_wait_s=_PATIENT_S, calibration=_calibration(engine, link)
    )

    def is_pulled(n_tokens: int) -> bool:
        return one_request(engine, link, n_tokens, settings).reason is DecisionReason.PULL

    page_tokens = engine.page_tokens
    return BreakEven(*(_first_page(has, page_tokens) for has in (pulls_no_slower, is_pulled)))


def one_request(engine: EngineProfile, link: LinkProfile, n_tokens: int, settings: PolicySettings) -> Outcome:
    """A prompt that one of two idle engines has in its host pool, asked of the other one."""
    profile = replace(engine, device_tokens=2 * TOKENS_MAX, host_tokens=2 * TOKENS_MAX)
    fleet = Fleet(FleetProfile(2, profile, link, settings, lambda request, engines, rng: engines[1]))
    fleet.engines[0].host.put("prefix", n_tokens)
    return fleet.serve([Request("one", "prefix", n_tokens, 0, 1, 0.0)])[0]


_PATIENT_S = 30.0
"""The published engines wait so long for a load."""

_NEVER = PolicySettings(Mode.OFF)
_ALWAYS = PolicySettings(Mode.ON, 1, uses_costs=False, pull_base_s=_PATIENT_S, max_pull_wait_s=_PATIENT_S)


def _calibration(engine: EngineProfile, link: LinkProfile) -> Calibration:
    """The fitted costs as an operator would set them; a cost that was fitted as 0 is next to nothing instead."""
    least = 1e-15
    return Calibration(
        pull_floor_s=max(least, link.floor_s),
        pull_s_per_byte=max(least, link.s_per_byte),
        pull_s_per_pull_in_flight=max(least, IN_FLIGHT_SHARE * link.floor_s),
        step_s=least,
        prefill_s_per_token=max(least, engine.prefill_s_per_token),
        prefill_s_per_pair=max(least, engine.prefill_s_per_pair),
        is_calibrated=True,
    )


def _first_page(has: Callable[[int], bool], page_tokens: int) -> int | None:
    """The shortest prompt in whole pages of which it is so, where it is so of all longer ones too."""
    low, high = 1, TOKENS_MAX // page_tokens
    if not has(high * page_tokens):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if has(middle * page_tokens) else (middle + 1, high)
    return low * page_tokens
