"""Which pools are run for the page, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvpeer.sim.fleet.pool import (
    ARMS,
    AUTO,
    GPT_OSS_EARLIER_SETUP,
    GPT_OSS_SETUP,
    LLAMA_SETUP,
    NO_PULLS,
    STATIC,
    STATIC_BY_AGENTS,
    Arm,
    Stage,
    Variant,
    mean_stages,
)

__all__ = [
    "GPT_OSS_EARLIER_RUN",
    "GPT_OSS_RUN",
    "LLAMA_RUN",
    "LOCAL_HITS",
    "SLOW_SOURCE",
    "VARIANTS",
    "Runs",
    "planned",
]

LLAMA_RUN = Variant()

GPT_OSS_RUN = Variant("gpt-oss-120b", GPT_OSS_SETUP)

GPT_OSS_EARLIER_RUN = Variant("gpt-oss-120b, earlier stack", GPT_OSS_EARLIER_SETUP)

VARIANTS = (
    Variant("question 192, output 64", workload=replace(LLAMA_SETUP.workload, question_tokens=192, output_tokens=64)),
    Variant("question 64, output 192", workload=replace(LLAMA_SETUP.workload, question_tokens=64, output_tokens=192)),
    Variant("decodes at 70 % of the memory's bandwidth", memory_share=0.7),
)

LOCAL_HITS = Variant("local hits", rates_per_s=(4.0, 8.0, 12.0), workload=replace(LLAMA_SETUP.workload, n_prefixes=8))

SLOW_SOURCE = Variant("slow source", rates_per_s=(8.0, 8.0), stage_s=120.0, slow_engines={0: 40.0})


@dataclass(frozen=True, slots=True)
class Runs:
    """The stages of each run, by (arm, variant), for each seed."""

    stages: Mapping[tuple[str, str], Sequence[Sequence[Stage]]]

    def of(self, arm: Arm, variant: Variant) -> list[Stage]:
        """The means over the seeds."""
        return mean_stages(self.stages[arm.name, variant.name])


def planned() -> list[tuple[Arm, Variant]]:
    """All runs that the page is made of, for each seed."""
    return [
        *((arm, LLAMA_RUN) for arm in ARMS),
        *((arm, run) for run in (GPT_OSS_RUN, GPT_OSS_EARLIER_RUN) for arm in (NO_PULLS, STATIC, AUTO)),
        *((arm, variant) for variant in VARIANTS for arm in (NO_PULLS, STATIC)),
        (AUTO, LOCAL_HITS),
        *((arm, SLOW_SOURCE) for arm in (NO_PULLS, STATIC_BY_AGENTS, AUTO)),
    ]
