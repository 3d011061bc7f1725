"""The connector's numbers in vLLM's own /metrics, beside vLLM's.

Each side gathers in a `Tally`; vLLM carries what `Tally.take` returned, as plain dicts, from workers and scheduler to
the API server's process, where `PromMetrics` turns it into Prometheus metrics. The agent has a /metrics of its own
for the cluster's view.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvpeer.engines.vllm.tally import merge_counts
from kvpeer.metrics.definitions import MetricType
from kvpeer.metrics.policy import POLICY_METRICS

__all__ = ["METRICS", "SECONDS_BUCKETS", "ConnectorStats", "PromMetrics"]

SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


@dataclass(frozen=True)
class _Metric:
    name: str
    documentation: str
    label: str = ""
    is_histogram: bool = False
    is_gauge: bool = False


METRICS = {
    "lookups": _Metric(
        "kvpeer_vllm_lookups_total",
        "Lookups by outcome: hit, timeout, deferred_full (too many were waiting), not_awaited (answers were worth less "
        "than the wait), or why the first page was not found.",
        "outcome",
    ),
    "lookup_seconds": _Metric(
        "kvpeer_vllm_lookup_seconds", "Time the agent took to answer a lookup.", is_histogram=True
    ),
    "accepted_tokens": _Metric(
        "kvpeer_vllm_accepted_tokens_total", "Tokens whose load vLLM accepted, by source: own_pool, peer.", "source"
    ),
    "declined_tokens": _Metric(
        "kvpeer_vllm_declined_tokens_total", "Tokens that could be had and were not loaded, by reason.", "reason"
    ),
    "loaded_pages": _Metric(
        "kvpeer_vllm_loaded_pages_total",
        "Page parts of accepted loads by outcome, counted by each rank; all but hit are computed by the engine.",
        "outcome",
    ),
    "loaded_bytes": _Metric("kvpeer_vllm_loaded_bytes_total", "Bytes loaded into the engine, over all ranks."),
    "load_seconds": _Metric(
        "kvpeer_vllm_load_seconds", "Time from the start of a load to its end, on a rank.", is_histogram=True
    ),
    "published_pages": _Metric(
        "kvpeer_vllm_published_pages_total",
        "Page parts by outcome of their publish, counted by each rank: written, present, refused (by the pool), "
        "queue_full, no_agent, revoked (preempted meanwhile), timeout, inconsistent.",
        "outcome",
    ),
    "published_bytes": _Metric("kvpeer_vllm_published_bytes_total", "Bytes copied into the pool, over all ranks."),
    "publish_seconds": _Metric(
        "kvpeer_vllm_publish_seconds", "Time from the start of a publish to its end, on a rank.", is_histogram=True
    ),
    "unshared_requests": _Metric(
        "kvpeer_vllm_unshared_requests_total",
        "Requests whose pages are neither loaded nor published, by reason: lora, streaming_session, not_connected.",
        "reason",
    ),
    "errors": _Metric(
        "kvpeer_vllm_errors_total", "Unexpected errors, each with a traceback in the log, by place.", "place"
    ),
    **{
        name: _Metric(
            metric.name, metric.help, label=next(iter(metric.labels), ""), is_gauge=metric.type is MetricType.GAUGE
        )
        for name, metric in POLICY_METRICS.items()
    },
}
"""By the name that the code counts under. The label values are closed lists in the code."""


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """What one or several `Tally.take` calls returned; vLLM adds up those of all ranks and steps."""

    def reset(self) -> None:
        """Forgets everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """Adds `other` to this; returns this."""
        merge_counts(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns one number a counter and label, for vLLM's periodic log line."""
        return {
            f"{metric}[{label}]" if label else metric: amount
            for metric, labels in self.data.get("counts", {}).items()
            for label, amount in labels.items()
        }

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.get(kind) for kind in ("counts", "samples", "gauges"))


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Registers `METRICS` in vLLM's registry and feeds them."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {key: _made(metric, metric_types, labelnames) for key, metric in METRICS.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one interval's numbers of one engine."""
        values = self.per_engine_labelvalues[engine_idx]
        for key, labels in transfer_stats_data.get("counts", {}).items():
            for label, amount in labels.items():
                own = [label] if METRICS[key].label else []
                self._metrics[key].labels(*values, *own).inc(amount)
        for key, labels in transfer_stats_data.get("gauges", {}).items():
            for label, value in labels.items():
                self._metrics[key].labels(*values, label).set(value)
        for key, samples in transfer_stats_data.get("samples", {}).items():
            histogram = self._metrics[key].labels(*values)
            for sample in samples:
                histogram.observe(sample)


def _made(metric: _Metric, metric_types: Any, labelnames: list[str]) -> Any:
    if metric.is_histogram:
        return metric_types[Histogram](metric.name, metric.documentation, labelnames, buckets=SECONDS_BUCKETS)
    labels = [*labelnames, *filter(None, [metric.label])]
    if metric.is_gauge:
        return metric_types[Gauge](metric.name, metric.documentation, labels)
    return metric_types[Counter](metric.name, metric.documentation, labels)
