"""The metrics as objects: `build(registry)` makes every defined metric once, on a registry that is given."""

from __future__ import annotations

import itertools
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from kvpeer.metrics.definitions import LATENCY_BUCKETS_S, METRICS, Metric, MetricType

__all__ = ["Metrics", "build"]

_T = TypeVar("_T", bound=MetricWrapperBase)


class Metrics:
    """All metrics of an agent, looked up by their full name. Thread-safe, as prometheus_client is."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._metrics = {metric.name: _make(metric, registry) for metric in METRICS}
        self._totals: dict[str, float] = {}

    def counter(self, name: str) -> Counter:
        """The counter of this name. Raises KeyError or TypeError for one that is not defined as such."""
        return self._typed(name, Counter)

    def gauge(self, name: str) -> Gauge:
        """The gauge of this name. Raises KeyError or TypeError for one that is not defined as such."""
        return self._typed(name, Gauge)

    def histogram(self, name: str) -> Histogram:
        """The histogram of this name. Raises KeyError or TypeError for one that is not defined as such."""
        return self._typed(name, Histogram)

    def advance(self, name: str, total: float, **labels: str) -> None:
        """Brings a counter to a total that somebody else counts (a native module); a smaller total counts from 0 again.
        Call it from one thread."""
        series = name + "".join(f"|{value}" for value in labels.values())
        last = self._totals.get(series, 0)
        self._totals[series] = total
        counter = self.counter(name)
        (counter.labels(**labels) if labels else counter).inc(total - last if total >= last else total)

    def _typed(self, name: str, kind: type[_T]) -> _T:
        metric = self._metrics[name]
        if not isinstance(metric, kind):
            raise TypeError(f"{name} is a {type(metric).__name__}, not a {kind.__name__}")
        return metric


def build(registry: CollectorRegistry) -> Metrics:
    """All metrics, registered. One registry takes them once."""
    return Metrics(registry)


def _make(metric: Metric, registry: CollectorRegistry) -> MetricWrapperBase:
    extra: dict[str, Any] = {"registry": registry, "labelnames": tuple(metric.labels)}
    made: MetricWrapperBase
    if metric.type is MetricType.COUNTER:
        made = Counter(metric.name, metric.help, **extra)
    elif metric.type is MetricType.GAUGE:
        made = Gauge(metric.name, metric.help, **extra)
    else:
        made = Histogram(metric.name, metric.help, buckets=LATENCY_BUCKETS_S, **extra)
    if metric.labels and all(metric.labels.values()):
        for values in itertools.product(*metric.labels.values()):
            made.labels(*values)
    return made
