"""What one adapter counts: transfers for SGLang's own histograms, and counters of kvpeer's in its Prometheus registry.

Metric names are a promise to whoever has dashboards; `kvpeer.metrics` has them, with their label values.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import REGISTRY

from kvpeer.metrics.engines import SGLANG_METRICS
from kvpeer.metrics.policy import POLICY_METRICS
from kvpeer.metrics.registry import made

__all__ = ["TRANSFERS_MAX", "Meter", "Transfers"]

TRANSFERS_MAX = 512
"""Kept of one kind between two looks of SGLang, which looks at every scheduler step; the rest of a burst is dropped."""

_GB = 1e9

_DECIDED = ("decisions", "shadow_effect")
"""Of the policy's metrics: those of what can be decided here."""


@dataclass
class Transfers:
    """Pages and GB/s of each transfer that ended."""

    read_pages: list[int] = field(default_factory=list)
    read_gb_per_s: list[float] = field(default_factory=list)
    written_pages: list[int] = field(default_factory=list)
    written_gb_per_s: list[float] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.read_pages or self.written_pages)


class Meter:
    """Thread-safe. is_published: whether there is somebody who reads the process's Prometheus registry."""

    def __init__(self, *, is_published: bool) -> None:
        self._lock = threading.Lock()  # protects _transfers
        self._transfers = Transfers()
        self._metrics = _prometheus() if is_published else None

    def located(self, pool: str, n_pages: int, n_found: int, seconds: float) -> None:
        """A question where pages are was answered."""
        self._count("exists", pool, {"hit": n_found, "miss": n_pages - n_found}, seconds)

    def read(self, pool: str, n_pages: int, n_read: int, n_bytes: int, seconds: float) -> None:
        """Pages were read into the host pool; n_bytes of those that arrived."""
        self._count("get", pool, {"hit": n_read, "miss": n_pages - n_read}, seconds)
        with self._lock:
            if n_read and len(self._transfers.read_pages) < TRANSFERS_MAX:
                self._transfers.read_pages.append(n_read)
                self._transfers.read_gb_per_s.append(n_bytes / _GB / max(seconds, 1e-9))

    def written(self, pool: str, n_pages: int, n_written: int, n_bytes: int, seconds: float) -> None:
        """Pages were published, or found to be there."""
        self._count("set", pool, {"stored": n_written, "refused": n_pages - n_written}, seconds)
        with self._lock:
            if n_written and len(self._transfers.written_pages) < TRANSFERS_MAX:
                self._transfers.written_pages.append(n_written)
                self._transfers.written_gb_per_s.append(n_bytes / _GB / max(seconds, 1e-9))

    def decided(self, metric: str, label: str, amount: float) -> None:
        """Counts under a name of `kvpeer.metrics.policy`."""
        if self._metrics is not None:
            (label_name,) = POLICY_METRICS[metric].labels
            self._metrics[metric].labels(**{label_name: label}).inc(amount)

    def failed(self, place: str) -> None:
        """An unexpected error was logged and answered with a miss."""
        if self._metrics is not None:
            self._metrics["errors"].labels(place=place).inc()

    def drain(self) -> Transfers:
        """Returns the transfers since the last call."""
        with self._lock:
            drained, self._transfers = self._transfers, Transfers()
        return drained

    def _count(self, operation: str, pool: str, pages: dict[str, int], seconds: float) -> None:
        if self._metrics is None:
            return
        for outcome, n in pages.items():
            if n:
                self._metrics["pages"].labels(operation=operation, pool=pool, outcome=outcome).inc(n)
        self._metrics["call_seconds"].labels(operation=operation, pool=pool).observe(seconds)


@functools.cache
def _prometheus() -> dict[str, Any]:
    """The process's metrics, made once: a backend may be attached again in the same process."""
    decided = {name: POLICY_METRICS[name] for name in _DECIDED}
    return {name: made(metric, REGISTRY) for name, metric in {**SGLANG_METRICS, **decided}.items()}
