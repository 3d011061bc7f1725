"""What a metric is, as plain data. Every definition of kvpeer's is made of this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

__all__ = ["LATENCY_BUCKETS_S", "OPEN", "Metric", "MetricType", "counter", "gauge", "seconds"]


class MetricType(str, Enum):
    """Kinds of Prometheus metrics in use. Quantiles come from histograms, never from home-made summaries."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


OPEN: tuple[str, ...] = ()
"""Label values that only the code which counts knows (names of tasks, of messages): few, but not listed here."""

LATENCY_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""From a round trip on the control channel (about 0.1 ms) to the longest wait for a pull. The same for all histograms,
so that they can be laid beside each other."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `labels` maps each label to its values, OPEN where they are not listed. `question`: what one asks it
    for."""

    name: str
    type: MetricType
    unit: str
    help: str
    question: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))


def counter(name: str, unit: str, text: str, question: str, **labels: tuple[str, ...]) -> Metric:
    """A counter; its name ends in _total."""
    return Metric(name, MetricType.COUNTER, unit, text, question, labels)


def gauge(name: str, unit: str, text: str, question: str, **labels: tuple[str, ...]) -> Metric:
    """A gauge."""
    return Metric(name, MetricType.GAUGE, unit, text, question, labels)


def seconds(name: str, text: str, question: str, **labels: tuple[str, ...]) -> Metric:
    """A histogram of durations, with LATENCY_BUCKETS_S."""
    return Metric(name, MetricType.HISTOGRAM, "seconds", text, question, labels)
