"""Published results and what the simulated fleet makes of them: what agrees keeps agreeing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvpeer.cli import main
from kvpeer.sim.fleet import Runs, page, planned, run_pool
from kvpeer.sim.fleet.curves import break_even, curve_rows
from kvpeer.sim.fleet.pool import AUTO, NO_PULLS, STATIC, Variant
from kvpeer.sim.fleet.profile import EngineProfile, LinkProfile, fitted
from kvpeer.sim.fleet.published import (
    CURVES,
    GLM,
    GPT_OSS,
    GPT_OSS_EARLIER_POOL,
    GPT_OSS_POOL,
    LLAMA,
    LLAMA_POOL,
    PeerCurve,
)

SHORT = Variant("short", rates_per_s=(4.0, 8.0), stage_s=15.0)


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.model)
def test_curves_are_met_within_a_tenth_and_rows_that_were_held_out_within_a_quarter(curve):
    for row in curve_rows(curve):
        assert row.sim_recompute_ms == pytest.approx(row.recompute_ms, rel=0.1)
        assert row.sim_pull_ms == pytest.approx(row.pull_ms, rel=0.1)
        assert row.held_out_recompute_ms == pytest.approx(row.recompute_ms, rel=0.25)
        assert row.held_out_pull_ms == pytest.approx(row.pull_ms, rel=0.25)


def test_break_evens_are_where_they_were_published():
    assert break_even(GLM).equal_tokens == pytest.approx(8700, rel=0.05)
    assert break_even(GPT_OSS).equal_tokens < 2048
    # Said to be near 2K; the table has it between these two.
    assert LLAMA.tokens[0] < break_even(LLAMA).equal_tokens < LLAMA.tokens[1]


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.model)
def test_the_policy_begins_to_pull_no_earlier_than_it_pays(curve):
    found = break_even(curve)
    assert found.equal_tokens <= found.policy_tokens


def test_a_curve_that_costs_made_gives_these_costs_back():
    engine = EngineProfile(100_000, 0.02, 3e-5, 8e-10)
    link = LinkProfile(0.05, 1e-10)
    tokens = (1024, 4096, 8192, 16_384)
    recompute_s = [engine.request_s + engine.prefill_s(n, 0) for n in tokens]
    pull_s = [
        engine.request_s + link.floor_s + (n - 64) * 100_000 * link.s_per_byte + engine.prefill_s(64, n - 64)
        for n in tokens
    ]
    curve = PeerCurve("made", 100_000, tokens, tuple(1e3 * s for s in recompute_s), tuple(1e3 * s for s in pull_s), "")
    found_engine, found_link = fitted(curve)
    # A little of what the fit started from is left in it.
    for name in ("request_s", "prefill_s_per_token", "prefill_s_per_pair"):
        assert getattr(found_engine, name) == pytest.approx(getattr(engine, name), rel=0.06)
    assert found_link.floor_s == pytest.approx(link.floor_s, rel=0.06)
    assert found_link.s_per_byte == pytest.approx(link.s_per_byte, rel=0.06)


def test_pulls_lower_the_median_of_the_pool_as_much_as_was_published():
    without, pulls = (run_pool(arm, 1, replace(SHORT, stage_s=60.0))[1] for arm in (NO_PULLS, STATIC))
    change_percent = 100 * (pulls.latency_s_p50 / without.latency_s_p50 - 1)
    assert change_percent == pytest.approx(LLAMA_POOL.median_percent, abs=12)


@pytest.mark.parametrize("arguments", [["--seeds", "0"], ["--jobs", "0"], ["--page", "/no/such/folder/page.md"]])
def test_what_cannot_be_run_is_said_before_anything_runs(arguments, capsys):
    assert main(["sim", "fleet", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


def test_the_page_has_every_published_number():
    stages = {}
    for arm, variant in planned():
        stages[arm.name, variant.name] = [run_pool(arm, 1, replace(variant, stage_s=1.0))]
    text = page(Runs(stages), [1])
    for curve in CURVES:
        for published_ms in (*curve.recompute_ms, *curve.pull_ms):
            assert f"| {published_ms:,.0f} |" in text
    for pool in (LLAMA_POOL, GPT_OSS_POOL, GPT_OSS_EARLIER_POOL):
        for row in (*pool.without, *pool.pulls):
            assert f"| {row.offered_per_s:.0f} | {row.latency_s_p50:.2f} |" in text
    assert all(not line.endswith(" ") for line in text.splitlines())


@pytest.mark.parametrize("arm", [NO_PULLS, STATIC, AUTO], ids=lambda arm: arm.name)
def test_a_small_run_is_what_it_was(arm):
    found = [
        (round(stage.latency_s_p50, 4), round(stage.latency_s_p95, 4), round(stage.pulled_share, 4))
        for stage in run_pool(arm, 7, SHORT)
    ]
    assert found == GOLDEN[arm.name]


GOLDEN = {
    "no pulls": [(1.5851, 3.3775, 0.0), (3.4515, 7.9975, 0.0)],
    "static floor": [(1.1967, 2.1828, 0.2333), (1.066, 2.3971, 0.3792)],
    "kvpeer auto": [(1.1779, 2.1828, 0.2333), (1.0337, 2.4317, 0.38)],
}
"""Of seed 7. A change of the simulation or of the policy changes them: look at docs/reproduction.md before you do."""
