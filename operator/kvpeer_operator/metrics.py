"""What the operator shows to Prometheus: what it did, and what it saw when it last looked at each cluster.

Names and labels are defined in `kvpeer.metrics.operator`. Every replica shows its own view, and replicas agree within
one look.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpeer.metrics import build
from kvpeer.metrics.operator import OPERATOR_METRICS
from prometheus_client import CollectorRegistry, start_http_server

from kvpeer_operator.injection import Patch, Skip
from kvpeer_operator.reconciler import Seen
from kvpeer_operator.work import ClusterKey

__all__ = ["Endpoint", "OperatorMetrics"]

_STOP_TIMEOUT_S = 2.0


class OperatorMetrics:
    """Counts. Thread-safe, but `looked`, which belongs to the task that looks."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._metrics = build(self.registry, OPERATOR_METRICS)

    def looked(self, outcome: str, seconds: float, seen: Mapping[ClusterKey, Seen]) -> None:
        """A look ended. outcome: done, gone or failed. seen: of all clusters, what was seen last."""
        self._metrics.counter("kvpeer_operator_looks_total").labels(outcome=outcome).inc()
        self._metrics.histogram("kvpeer_operator_look_seconds").observe(seconds)
        self._show(
            "kvpeer_operator_clusters",
            ("condition", "status"),
            Counter((each.type, each.status) for one in seen.values() for each in one.status.conditions),
        )
        members: Counter[tuple[str, ...]] = Counter()
        for one in seen.values():
            members.update({(state,): n for state, n in one.status.members.model_dump().items()})
        self._show("kvpeer_operator_members", ("state",), members)
        self._show(
            "kvpeer_operator_policies", ("mode",), Counter((mode,) for one in seen.values() for mode in one.modes)
        )

    def queued(self, n_clusters: int) -> None:
        """So many clusters are due for a look."""
        self._metrics.gauge("kvpeer_operator_queued_clusters").set(n_clusters)

    def admitted(self, patch: Patch, skip: Skip | None, seconds: float) -> None:
        """The webhook answered."""
        outcome = skip.reason.value if skip else "agent" if patch.operations else "present"
        self._answered(outcome, seconds)

    def admission_failed(self, seconds: float) -> None:
        """The webhook could not answer, and the API server lets the pod in as it is."""
        self._answered("failed", seconds)

    def certificate(self, expires_at: float) -> None:
        """The webhook's certificate ends then, in seconds since the epoch."""
        self._metrics.gauge("kvpeer_operator_certificate_expiry_timestamp_seconds").set(expires_at)

    def certificate_failed(self) -> None:
        """It could not be looked after."""
        self._metrics.counter("kvpeer_operator_certificate_failures_total").inc()

    def _answered(self, outcome: str, seconds: float) -> None:
        self._metrics.counter("kvpeer_operator_admissions_total").labels(outcome=outcome).inc()
        self._metrics.histogram("kvpeer_operator_admission_seconds").observe(seconds)

    def _show(self, name: str, labels: tuple[str, ...], counts: Mapping[tuple[str, ...], int]) -> None:
        """Sets all series of a gauge: those that are not counted are 0, and none is left from an earlier look."""
        gauge = self._metrics.gauge(name)
        for family in gauge.collect():
            for sample in family.samples:
                gauge.labels(**sample.labels).set(counts.get(tuple(sample.labels[label] for label in labels), 0))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """/metrics over HTTP, on a thread of its own: nothing there is secret, and nothing can be changed through it."""

    _server: Any
    _thread: Any

    @classmethod
    def serve(cls, port: int, metrics: OperatorMetrics) -> Endpoint:
        """Listens on all addresses. Raises OSError when the port is taken."""
        return cls(*start_http_server(port, registry=metrics.registry))

    @property
    def port(self) -> int:
        """The port in use."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stops listening. Blocks for at most _STOP_TIMEOUT_S."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_STOP_TIMEOUT_S)
