"""The connector's numbers in vLLM's own /metrics, beside vLLM's.

Each side gathers in a `Tally`; vLLM carries what `Tally.take` returned, as plain dicts, from workers and scheduler to
the API server's process, where `PromMetrics` turns it into Prometheus metrics. The agent has a /metrics of its own
for the cluster's view.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvpeer.engines.vllm.tally import merge_counts
from kvpeer.metrics.engines import VLLM_METRICS
from kvpeer.metrics.metric import LATENCY_BUCKETS_S, Metric, MetricType
from kvpeer.metrics.policy import POLICY_METRICS

__all__ = ["METRICS", "ConnectorStats", "PromMetrics"]

METRICS: Mapping[str, Metric] = MappingProxyType({**VLLM_METRICS, **POLICY_METRICS})
"""By the name that the code counts under."""


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
    """Registers `METRICS` in vLLM's registry and feeds them. Series whose labels have listed values are there from the
    start: a rate needs a first value."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {key: _made(metric, metric_types, labelnames) for key, metric in METRICS.items()}
        for key, metric in METRICS.items():
            for values in itertools.product(per_engine_labelvalues.values(), *metric.labels.values()):
                self._metrics[key].labels(*values[0], *values[1:])

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one interval's numbers of one engine."""
        values = self.per_engine_labelvalues[engine_idx]
        for key, labels in transfer_stats_data.get("counts", {}).items():
            for label, amount in labels.items():
                own = [label] if METRICS[key].labels else []
                self._metrics[key].labels(*values, *own).inc(amount)
        for key, labels in transfer_stats_data.get("gauges", {}).items():
            for label, value in labels.items():
                self._metrics[key].labels(*values, label).set(value)
        for key, samples in transfer_stats_data.get("samples", {}).items():
            histogram = self._metrics[key].labels(*values)
            for sample in samples:
                histogram.observe(sample)


def _made(metric: Metric, metric_types: Any, labelnames: list[str]) -> Any:
    labels = [*labelnames, *metric.labels]
    if metric.type is MetricType.HISTOGRAM:
        return metric_types[Histogram](metric.name, metric.help, labels, buckets=LATENCY_BUCKETS_S)
    kind = Gauge if metric.type is MetricType.GAUGE else Counter
    return metric_types[kind](metric.name, metric.help, labels)
