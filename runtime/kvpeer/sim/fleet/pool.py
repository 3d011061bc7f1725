"""The published pools of shared prefixes, stage by stage, on a simulated fleet: without pulls, with the published
policy, and with kvpeer's.

Costs of prefills and pulls come from the curve of single requests, those of decodes from the hardware, memory and
workload from the published setup. Nothing is fitted to the pools' own latencies or rates; for the two numbers
that one setup does not say (question and output) see `LLAMA_SETUP`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from kvpeer.core.policy import Mode, PolicySettings
from kvpeer.sim.fleet.fleet import Fleet, FleetProfile
from kvpeer.sim.fleet.profile import LinkProfile, fitted
from kvpeer.sim.fleet.published import GPT_OSS, GPT_OSS_EARLIER, LLAMA, PeerCurve
from kvpeer.sim.fleet.workload import Outcome, SharedPrefixes

__all__ = [
    "ARMS",
    "AUTO",
    "GPT_OSS_EARLIER_SETUP",
    "GPT_OSS_SETUP",
    "LLAMA_SETUP",
    "NO_PULLS",
    "STATIC",
    "STATIC_BY_AGENTS",
    "Arm",
    "PoolSetup",
    "Stage",
    "Variant",
    "ceiling_per_s",
    "mean_stages",
    "run_pool",
]


@dataclass(frozen=True, slots=True)
class PoolSetup:
    """A published pool: the curve whose costs its engines have, their memory, and what is asked. `weight_bytes`: what
    each step reads at least."""

    curve: PeerCurve
    n_engines: int
    weight_bytes: float
    device_tokens: int
    host_tokens: int
    rates_per_s: tuple[float, ...]
    workload: SharedPrefixes


STAGE_S = 60.0
"""As published."""

LLAMA_SETUP = PoolSetup(
    curve=LLAMA,
    n_engines=4,
    weight_bytes=8.03e9 * 2,  # the model card's parameters, 2 bytes each
    device_tokens=500_000,
    host_tokens=32 * 2**30 // LLAMA.kv_bytes_per_token,
    rates_per_s=(2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 20.0, 24.0),
    workload=SharedPrefixes(n_prefixes=64, prefix_tokens=16_384, question_tokens=128, output_tokens=128),
)
"""All as published but question and output, which are inferred: 2,420 tokens/s at 10.3 requests/s and 3,184 at 12.6 are
235 and 253 tokens a request, so 256 asked for; and the 0.53 s from the first to the last token at 2 requests/s leave
time to read the weights from memory some 140 times at most, so half of the 256 are generated."""

GPT_OSS_EARLIER_SETUP = PoolSetup(
    curve=GPT_OSS_EARLIER,
    n_engines=16,
    weight_bytes=5.1e9 * 4.25 / 8,  # the model card's active parameters, in MXFP4; a batch reads more experts
    device_tokens=1_220_000,
    host_tokens=88 * 2**30 // GPT_OSS_EARLIER.kv_bytes_per_token,
    rates_per_s=(4.0, 8.0, 12.0, 16.0, 20.0, 24.0),
    workload=SharedPrefixes(n_prefixes=128, prefix_tokens=49_152, question_tokens=256, output_tokens=64),
)
"""All as published; the curve is the one of the same stack."""

GPT_OSS_SETUP = replace(GPT_OSS_EARLIER_SETUP, curve=GPT_OSS, rates_per_s=(6.0, 12.0, 18.0, 24.0, 30.0))
"""The same pool, measured again on the later stack."""

PATIENT_S = 30.0
"""The published engines wait so long for a load."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy, and who serves pulls: see `LinkProfile`."""

    name: str
    settings: PolicySettings
    by_engines: bool


_STATIC = PolicySettings(Mode.ON, 2048, uses_costs=False, pull_base_s=PATIENT_S, max_pull_wait_s=PATIENT_S)

NO_PULLS = Arm("no pulls", PolicySettings(Mode.OFF), by_engines=True)
STATIC = Arm("static floor", _STATIC, by_engines=True)
STATIC_BY_AGENTS = Arm("static floor, served by agents", _STATIC, by_engines=False)
AUTO = Arm("kvpeer auto", PolicySettings(Mode.ON, None), by_engines=False)
ARMS = (NO_PULLS, STATIC, STATIC_BY_AGENTS, AUTO)
"""The first two are the published ones. `AUTO` is kvpeer as it comes: no floor but the costs, nothing calibrated, pulls
served by agents. The third tells what of the difference is the policy."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage's numbers. Shares are of its prompts' prefix tokens."""

    offered_per_s: float
    achieved_per_s: float
    latency_s_p50: float
    latency_s_p95: float
    first_token_s_p50: float
    pulled_share: float
    computed_share: float


@dataclass(frozen=True, slots=True)
class Variant:
    """What a run of the pool has different from the published one. `slow_engines`: how many times as long pulls from
    and to which engine take."""

    name: str = "the pool of this page"
    setup: PoolSetup = LLAMA_SETUP
    rates_per_s: Sequence[float] | None = None
    stage_s: float = STAGE_S
    workload: SharedPrefixes | None = None
    memory_share: float = 1.0
    slow_engines: Mapping[int, float] = field(default_factory=dict)


def run_pool(arm: Arm, seed: int, variant: Variant = Variant()) -> list[Stage]:
    """The stages of one arm, one after the other on the same fleet, which is empty at first; each begins when all
    requests of the one before have ended."""
    setup, workload = variant.setup, variant.workload or variant.setup.workload
    engine, link = fitted(setup.curve)
    engine = replace(
        engine,
        weight_bytes=setup.weight_bytes,
        device_tokens=setup.device_tokens,
        host_tokens=setup.host_tokens,
        memory_bytes_per_s=engine.memory_bytes_per_s * variant.memory_share,
    )
    link = LinkProfile(link.floor_s, link.s_per_byte, arm.by_engines)
    fleet = Fleet(FleetProfile(setup.n_engines, engine, link, arm.settings), seed)
    for idx, slowness in variant.slow_engines.items():
        fleet.engines[idx].line.slowness = slowness
    stages = []
    for idx, rate_per_s in enumerate(variant.rates_per_s or setup.rates_per_s):
        begins_at = fleet.kernel.now
        requests = workload.stage(idx, begins_at, rate_per_s, variant.stage_s, fleet.rng)
        stages.append(_stage(fleet.serve(requests), rate_per_s, begins_at))
    return stages


def mean_stages(runs: Sequence[Sequence[Stage]]) -> list[Stage]:
    """The means over several seeds, stage by stage."""
    return [
        Stage(*(fmean(getattr(stage, name) for stage in stages) for name in Stage.__slots__))
        for stages in zip(*runs, strict=True)
    ]


def ceiling_per_s(stages: Sequence[Stage]) -> float:
    """The most requests a second that were completed in a stage."""
    return max(stage.achieved_per_s for stage in stages)


def _stage(outcomes: Sequence[Outcome], rate_per_s: float, begins_at: float) -> Stage:
    latencies_s = sorted(outcome.latency_s for outcome in outcomes)
    n_prefix_tokens = sum(outcome.request.prefix_tokens for outcome in outcomes)
    n_question_tokens = sum(outcome.request.question_tokens for outcome in outcomes)
    n_computed_tokens = sum(outcome.computed_tokens for outcome in outcomes) - n_question_tokens
    return Stage(
        rate_per_s,
        len(outcomes) / (max(outcome.ended_at for outcome in outcomes) - begins_at),
        median(latencies_s),
        latencies_s[int(0.95 * len(latencies_s))],
        median(outcome.first_token_s for outcome in outcomes),
        sum(outcome.pulled_tokens for outcome in outcomes) / n_prefix_tokens,
        n_computed_tokens / n_prefix_tokens,
    )
