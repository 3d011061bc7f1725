"""Counts and samples that one side of the connector gathers between two engine steps."""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["SAMPLES_MAX", "Tally", "merge_counts"]

SAMPLES_MAX = 512
"""Samples kept of one histogram between two steps; the rest of a burst is dropped, the counters are exact."""


class Tally:
    """Counters and gauges by (metric, label value) and samples by metric, taken as plain dicts. Thread-safe; the lock
    protects the dicts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, dict[str, float]] = {}
        self._samples: dict[str, list[float]] = {}
        self._gauges: dict[str, dict[str, float]] = {}

    def count(self, metric: str, label: str = "", amount: float = 1) -> None:
        """Adds to a counter."""
        with self._lock:
            labels = self._counts.setdefault(metric, {})
            labels[label] = labels.get(label, 0) + amount

    def observe(self, metric: str, value: float) -> None:
        """Adds a sample to a histogram."""
        with self._lock:
            samples = self._samples.setdefault(metric, [])
            if len(samples) < SAMPLES_MAX:
                samples.append(value)

    def set_gauge(self, metric: str, label: str, value: float) -> None:
        """Sets a gauge; the last value before the next `take` is seen."""
        with self._lock:
            self._gauges.setdefault(metric, {})[label] = value

    def take(self) -> dict[str, Any] | None:
        """Returns what was gathered since the last call as {"counts": ..., "samples": ..., "gauges": ...}, or None when
        there is nothing."""
        with self._lock:
            if not self._counts and not self._samples and not self._gauges:
                return None
            taken: dict[str, Any] = {"counts": self._counts, "samples": self._samples, "gauges": self._gauges}
            self._counts, self._samples, self._gauges = {}, {}, {}
            return taken


def merge_counts(into: dict[str, Any], other: dict[str, Any]) -> None:
    """Adds what one `Tally.take` returned to what another returned."""
    for metric, labels in other.get("counts", {}).items():
        merged = into.setdefault("counts", {}).setdefault(metric, {})
        for label, amount in labels.items():
            merged[label] = merged.get(label, 0) + amount
    for metric, values in other.get("gauges", {}).items():
        into.setdefault("gauges", {}).setdefault(metric, {}).update(values)
    for metric, samples in other.get("samples", {}).items():
        kept = into.setdefault("samples", {}).setdefault(metric, [])
        kept.extend(samples[: max(0, SAMPLES_MAX - len(kept))])
