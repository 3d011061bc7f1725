"""The page that says what the simulated fleet reproduces: published numbers beside simulated ones, and how far they are
apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvpeer.sim.fleet.curves import break_even, curve_rows
from kvpeer.sim.fleet.experiments import (
    GPT_OSS_EARLIER_RUN,
    GPT_OSS_RUN,
    LLAMA_RUN,
    LOCAL_HITS,
    SLOW_SOURCE,
    VARIANTS,
    Runs,
)
from kvpeer.sim.fleet.pool import (
    ARMS,
    AUTO,
    LLAMA_SETUP,
    NO_PULLS,
    STATIC,
    STATIC_BY_AGENTS,
    Arm,
    Stage,
    Variant,
    ceiling_per_s,
)
from kvpeer.sim.fleet.published import (
    CURVES,
    GPT_OSS_EARLIER_POOL,
    GPT_OSS_POOL,
    LLAMA_POOL,
    PeerCurve,
    PoolRow,
    PublishedPool,
)

__all__ = ["page"]


def page(runs: Runs, seeds: Sequence[int]) -> str:
    """The whole page, in Markdown."""
    sections = [
        ("", _HEAD.format(n_seeds=len(seeds)), ""),
        ("## Pull or recompute: one request, idle engines", _CURVES, ""),
        *((f"### {curve.model}", "", _curve(curve)) for curve in CURVES),
        ("## Break-even", _BREAK_EVEN, _break_evens()),
        ("## A pool of shared prefixes on Llama-3.1-8B", _POOL, _headlines(runs, LLAMA_RUN, LLAMA_POOL)),
        ("### Stage by stage", "", _stages(runs, LLAMA_RUN, LLAMA_POOL)),
        ("### What comes from where", _SHARES, _shares(runs, LLAMA_RUN)),
        ("### How much hangs on what had to be inferred", _INFERRED, _variants(runs)),
        ("### What deviates", _DEVIATIONS.format(missing_ms=1e3 * _missing_s(runs)), ""),
        ("## A pool of shared prefixes on gpt-oss-120b", _GPT_OSS_POOL, ""),
        *(section for run, pool in _GPT_OSS for section in _gpt_oss(runs, run, pool)),
        ("## kvpeer's own policy on the pools", _AUTO, _arms(runs, LLAMA_RUN, ARMS)),
        ("", "On gpt-oss-120b:", _arms(runs, GPT_OSS_RUN, (NO_PULLS, STATIC, AUTO))),
        ("## Local hits: nothing is pulled", _LOCAL_HITS, _local_hits(runs)),
        ("## A source that is slow", _SLOW_SOURCE, _slow_source(runs)),
        ("## Not reproduced yet", _OPEN, ""),
    ]
    return "\n\n".join(part.strip() for section in sections for part in section if part) + "\n"


_GPT_OSS = ((GPT_OSS_RUN, GPT_OSS_POOL), (GPT_OSS_EARLIER_RUN, GPT_OSS_EARLIER_POOL))


def _gpt_oss(runs: Runs, run: Variant, pool: PublishedPool) -> list[tuple[str, str, str]]:
    stack = "The earlier stack" if run is GPT_OSS_EARLIER_RUN else "The later stack"
    return [
        (f"### {stack}", "", _headlines(runs, run, pool)),
        ("", _stages(runs, run, pool), ""),
        ("", "What comes from where:", _shares(runs, run)),
    ]


def _curve(curve: PeerCurve) -> str:
    return _table(
        ("tokens", "recompute", "simulated", "held out", "pull", "simulated", "held out"),
        (
            (
                f"{row.n_tokens:,}",
                f"{row.recompute_ms:,.0f}",
                _beside(row.sim_recompute_ms, row.recompute_ms),
                _beside(row.held_out_recompute_ms, row.recompute_ms),
                f"{row.pull_ms:,.0f}",
                _beside(row.sim_pull_ms, row.pull_ms),
                _beside(row.held_out_pull_ms, row.pull_ms),
            )
            for row in curve_rows(curve)
        ),
    )


def _break_evens() -> str:
    def tokens(n_tokens: int | None) -> str:
        return "never" if n_tokens is None else f"{n_tokens:,}"

    found = [(curve, break_even(curve)) for curve in CURVES]
    return _table(
        ("model", "published", "simulated: equal from", "kvpeer, calibrated, pulls from"),
        ((curve.model, curve.break_even, tokens(at.equal_tokens), tokens(at.policy_tokens)) for curve, at in found),
    )


def _changes(without: Sequence[Stage], pulls: Sequence[Stage], at_per_s: float) -> tuple[float, float]:
    """What pulls change in the median at a rate, and in the ceiling, in percent."""
    at = [stage.offered_per_s for stage in without].index(at_per_s)
    median = pulls[at].latency_s_p50 / without[at].latency_s_p50 - 1
    return 100 * median, 100 * (ceiling_per_s(pulls) / ceiling_per_s(without) - 1)


def _headlines(runs: Runs, run: Variant, pool: PublishedPool) -> str:
    median, ceiling = _changes(runs.of(NO_PULLS, run), runs.of(STATIC, run), pool.median_at_per_s)
    changes = [
        (f"median latency at {pool.median_at_per_s:.0f} requests/s", pool.median_percent, median),
        ("ceiling, requests/s", pool.ceiling_percent, ceiling),
        ("peak tokens/s", pool.peak_tokens_percent, ceiling),
    ]
    return _table(
        ("what pulls change", "published", "simulated", "deviation, points"),
        (
            (name, f"{said:+.0f} %", f"{simulated:+.0f} %", f"{simulated - said:+.0f}")
            for name, said, simulated in changes
            if said is not None
        ),
    )


def _stages(runs: Runs, run: Variant, pool: PublishedPool) -> str:
    parts = []
    for name, rows, arm in (
        ("Without pulls", pool.without, NO_PULLS),
        ("With pulls, a static floor of 2,048 tokens", pool.pulls, STATIC),
    ):
        table = _table(
            ("offered/s", "median latency, s", "simulated", "achieved/s", "simulated"),
            (_stage(row, stage) for row, stage in zip(rows, runs.of(arm, run), strict=True)),
        )
        parts.append(f"{name}:\n\n{table}")
    return "\n\n".join(parts)


def _stage(row: PoolRow, stage: Stage) -> tuple[str, ...]:
    latency = f"{row.latency_s_p50:.2f}", _beside(stage.latency_s_p50, row.latency_s_p50, 2)
    if row.achieved_per_s is None:
        return f"{row.offered_per_s:.0f}", *latency, "", f"{stage.achieved_per_s:.1f}"
    achieved = f"{row.achieved_per_s:.1f}", _beside(stage.achieved_per_s, row.achieved_per_s, 1)
    return f"{row.offered_per_s:.0f}", *latency, *achieved


def _shares(runs: Runs, run: Variant) -> str:
    without, pulls = runs.of(NO_PULLS, run), runs.of(STATIC, run)
    return _table(
        ("offered/s", "computed, without pulls", "computed, with pulls", "pulled"),
        (
            (
                f"{one.offered_per_s:.0f}",
                f"{100 * one.computed_share:.0f} %",
                f"{100 * other.computed_share:.0f} %",
                f"{100 * other.pulled_share:.0f} %",
            )
            for one, other in zip(without, pulls, strict=True)
        ),
    )


def _variants(runs: Runs) -> str:
    def row(variant: Variant) -> tuple[str, ...]:
        without, pulls = runs.of(NO_PULLS, variant), runs.of(STATIC, variant)
        median, gain = _changes(without, pulls, LLAMA_POOL.median_at_per_s)
        ceilings = (f"{ceiling_per_s(stages):.1f}" for stages in (without, pulls))
        return variant.name, f"{median:+.0f} %", *ceilings, f"{gain:+.0f} %"

    published = ("*published*", "-43 %", "10.4", "12.6", "+22 %")
    return _table(
        ("pool", "median at 8/s", "ceiling without", "ceiling with pulls", "gain"),
        [published, *(row(variant) for variant in (LLAMA_RUN, *VARIANTS))],
    )


def _missing_s(runs: Runs) -> float:
    """How much of an engine's time a pull would take, if all that the ceilings with pulls are too high by were its
    doing."""
    missing_s = []
    pulls = runs.of(STATIC, LLAMA_RUN)
    for rows, stages in ((LLAMA_POOL.without, runs.of(NO_PULLS, LLAMA_RUN)), (LLAMA_POOL.pulls, pulls)):
        published_per_s = max(row.achieved_per_s or 0.0 for row in rows)
        missing_s.append(LLAMA_SETUP.n_engines / published_per_s - LLAMA_SETUP.n_engines / ceiling_per_s(stages))
    pulled_share = max(pulls, key=lambda stage: stage.achieved_per_s).pulled_share
    return (missing_s[1] - missing_s[0]) / pulled_share


def _arms(runs: Runs, run: Variant, arms: Sequence[Arm]) -> str:
    stages = {arm.name: runs.of(arm, run) for arm in arms}
    return _table(
        ("offered/s", *stages),
        (
            (
                f"{row[0].offered_per_s:.0f}",
                *(f"{stage.latency_s_p50:.2f} / {stage.latency_s_p95:.2f}" for stage in row),
            )
            for row in zip(*stages.values(), strict=True)
        ),
    )


def _local_hits(runs: Runs) -> str:
    return _table(
        ("offered/s", "pulled", "computed"),
        (
            (f"{stage.offered_per_s:.0f}", f"{100 * stage.pulled_share:.1f} %", f"{100 * stage.computed_share:.1f} %")
            for stage in runs.of(AUTO, LOCAL_HITS)
        ),
    )


def _slow_source(runs: Runs) -> str:
    return _table(
        ("policy", "median, s", "95 %, s", "pulled", "computed"),
        (
            (
                arm.name,
                f"{stage.latency_s_p50:.2f}",
                f"{stage.latency_s_p95:.2f}",
                f"{100 * stage.pulled_share:.0f} %",
                f"{100 * stage.computed_share:.0f} %",
            )
            for arm in (NO_PULLS, STATIC_BY_AGENTS, AUTO)
            for stage in runs.of(arm, SLOW_SOURCE)[-1:]
        ),
    )


def _beside(simulated: float, published: float, digits: int = 0) -> str:
    return f"{simulated:,.{digits}f} ({100 * (simulated / published - 1):+.0f} %)"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# ---- what is said around the tables

_HEAD = """
# Published results, reproduced by simulation

Written by `make reproduce`; edits are lost. Numbers of pools are means over {n_seeds} seeds.

`kvpeer sim fleet` simulates engines, a router and pulls between the engines in virtual time, with the policy of
`core/policy` that serving engines use ([simulation.md](simulation.md) says what is modelled). This page sets what comes
out beside what llm-d published of its own pulls between peers on H200 GPUs. In brackets: how far the simulation is off.

A cost is fitted to one table, by the policy's own fit, or computed from a data sheet. None is chosen to meet a number
on this page, and what is off is left off.
"""

_CURVES = """
Milliseconds to the first token. *Simulated*: the fleet, fitted to the whole table. *Held out*: fitted to all rows but
this one, so that the row tests the model; first and last rows are then extrapolated.
"""

_BREAK_EVEN = """
Tokens. *Equal from*: the shortest prompt whose pull takes no longer than computing it. *kvpeer pulls from*: where the
policy begins by itself, calibrated with the fitted costs, with its margin of a quarter. 128 tokens are the shortest
prompt of which a page can be pulled.

"""

_POOL = """
Four engines, 64 prefixes of 16K tokens, placement by load, stages of 60 s one after the other on a fleet that is empty
at first. Costs of prefills and pulls are those fitted to the *curves* above, those of decodes come from the data sheet;
nothing is fitted to the pool's latencies under load or to its rates. (How long questions and outputs are had to be
inferred from its table.)
"""

_SHARES = """
Parts of the prompts' prefix tokens. What is neither pulled nor computed was on the device or in the own host pool.

"""

_INFERRED = """
Question and output are not published ([pool.py](../runtime/kvpeer/sim/fleet/pool.py) says how they were inferred), and
decodes are taken to read memory at its full bandwidth. The same pool with other values:

"""

_DEVIATIONS = """
The gain of the median agrees; the simulated ceilings are too high, the one with pulls far more than the one without. So
in the published fleet a request takes more of an engine than its prefill and decode at their measured or least costs;
and if all the rest is the pulls' doing, each took about {missing_ms:.0f} ms of its engine, more than the 155 ms that
one takes in all while the engine is idle. Candidates that are not modelled: copies between host and device and stores
into the host pool beside the steps, a scheduling loop that serves peers while it should begin a step, an index that
knows less of what peers have. Nothing published tells them apart, so no constant stands for them. Peak tokens grow like
the ceiling here, because each request has as many; the published +32 % beside +22 % says that theirs had not.
"""

_GPT_OSS_POOL = """
Sixteen engines, 128 prefixes of 48K tokens, 256 asked and 64 generated: all of it published, nothing inferred from the
pool, nothing fitted to it. It was measured twice; costs are those fitted to the curve of the same time. Of the earlier
measurement it is published that about 58 % of requests pulled.

The simulated ceilings without pulls are too high here too. With pulls the later stack kept up with all that was
offered, as the simulated one does; the earlier one did not, and nothing in its own curve says why. So the engine time
that pulls of Llama-3.1-8B seem to have taken may have been a fault of their stack, and not the price of pulls as such.
Where all that was offered was served, the "ceiling" with pulls is no limit. That the earlier stack's gain comes out to
the percent is chance: both of its ceilings are 40 % too high.
"""

_AUTO = """
Median / 95 % latency in seconds. *Served by agents*: pulls do not wait for the steps of engines. *kvpeer auto* is what
one gets without setting anything: costs are learnt while the pool runs, and there is no floor once they are known.

Where engines keep up, the floor and `auto` do the same. Far beyond the ceiling `auto` refuses some pulls as not worth
it, and is behind the floor that always pulls: it compares what the request itself would wait, and leaves out that
computing holds up all others in the engine ([policy.md](policy.md) says so).
"""

_LOCAL_HITS = """
Eight prefixes fit into every device. Once each engine has them, nothing is pulled, whatever the rate. (Published, of
another model: "nothing pulls".)

"""

_SLOW_SOURCE = """
The pool at 8 requests/s, where pulls from and to one of the four engines take forty times as long, as over a link that
fell back to a slow transport. The second of two stages.

"""

_OPEN = """
The conversations of GLM at concurrency 64 (+9.6 % requests, +11.8 % input tokens), which need their trace's shape and
prefill and decode on different engines; the document questions and hot sets of gpt-oss-120b; the fork of 43 children; a
thousand nodes. The router's own scoring code takes the place of `sim/fleet/placement.py` when there is one.
"""
