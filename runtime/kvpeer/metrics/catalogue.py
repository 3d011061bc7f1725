"""All metrics of kvpeer, by the process that shows them."""

from __future__ import annotations

from dataclasses import dataclass

from kvpeer.metrics.definitions import METRICS
from kvpeer.metrics.engines import SGLANG_METRICS, VLLM_METRICS
from kvpeer.metrics.metric import Metric, MetricType
from kvpeer.metrics.operator import OPERATOR_METRICS
from kvpeer.metrics.policy import POLICY_METRICS

__all__ = ["CATALOGUE", "Section", "series"]


@dataclass(frozen=True, slots=True)
class Section:
    """Metrics that are shown at one place. `where`: which place that is, and what to know about it."""

    title: str
    where: str
    metrics: tuple[Metric, ...]


CATALOGUE: tuple[Section, ...] = (
    Section("Agent", "`GET /metrics` on `metrics.host:metrics.port` of each agent.", METRICS),
    Section(
        "Decisions to pull",
        "Made in the engine's scheduler process, and shown where its metrics are, with the engine's labels beside "
        "these (vLLM: on\nthe /metrics of its API server). [policy.md](policy.md) says how to read them. SGLang's "
        "adapter has the decisions and\nthe effect in mode shadow alone.",
        tuple(POLICY_METRICS.values()),
    ),
    Section(
        "vLLM",
        "On the /metrics of vLLM's API server, with vLLM's labels (`model_name`, `engine`) beside these. An engine has "
        "the\nconnector or the tier; both count under the same names.",
        tuple(VLLM_METRICS.values()),
    ),
    Section(
        "SGLang",
        "On SGLang's /metrics, with `--enable-metrics`, beside its own of the storage (`sglang:prefetched_tokens_total`"
        "\nand others).",
        tuple(SGLANG_METRICS.values()),
    ),
    Section("Operator", "`GET /metrics` on port 8081 of each replica.", OPERATOR_METRICS),
)


def series() -> dict[str, Metric]:
    """Every name that Prometheus may have of them, those of a histogram's parts included."""
    named: dict[str, Metric] = {}
    for metric in (metric for section in CATALOGUE for metric in section.metrics):
        is_histogram = metric.type is MetricType.HISTOGRAM
        for suffix in ("_bucket", "_sum", "_count") if is_histogram else ("",):
            named[metric.name + suffix] = metric
    return named
