"""The metrics as objects: `build(registry)` makes every metric of the agent once, on a registry that is given; other
processes name theirs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.metrics import MetricWrapperBase

from kvpeer.metrics.definitions import METRICS
from kvpeer.metrics.metric import LATENCY_BUCKETS_S, Metric, MetricType

__all__ = ["Metrics", "build", "made"]

_T = TypeVar("_T", bound=MetricWrapperBase)


class Metrics:
    """The metrics of one process, looked up by their full name. Thread-safe, as prometheus_client is."""

    def __init__(self, registry: CollectorRegistry, metrics: Iterable[Metric]) -> None:
        self._metrics = {metric.name: made(metric, registry) for metric in metrics}
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


def build(registry: CollectorRegistry, metrics: Iterable[Metric] = METRICS) -> Metrics:
    """These metrics and the `process_*` of the Prometheus client, registered. One registry takes them once."""
    ProcessCollector(registry=registry)
    return Metrics(registry, metrics)


def made(metric: Metric, registry: CollectorRegistry) -> MetricWrapperBase:
    """The metric, registered; series whose labels have listed values are there from the start."""
    extra: dict[str, Any] = {"registry": registry, "labelnames": tuple(metric.labels)}
    one: MetricWrapperBase
    if metric.type is MetricType.COUNTER:
        one = Counter(metric.name, metric.help, **extra)
    elif metric.type is MetricType.GAUGE:
        one = Gauge(metric.name, metric.help, **extra)
    else:
        one = Histogram(metric.name, metric.help, buckets=LATENCY_BUCKETS_S, **extra)
    if metric.labels and all(metric.labels.values()):
        for values in itertools.product(*metric.labels.values()):
            one.labels(*values)
    return one
