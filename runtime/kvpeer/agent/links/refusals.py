"""Peers that are refused, or refuse us: each counted by reason, and logged once per peer and reason."""

from __future__ import annotations

import logging

from kvpeer.metrics import Metrics

__all__ = ["Refusals"]

REMEMBERED_MAX = 1024
"""Peers and reasons that are remembered as logged. A flood of addresses empties the memory and is logged again."""

_log = logging.getLogger(__name__)


class Refusals:
    """Not thread-safe."""

    def __init__(self, metrics: Metrics) -> None:
        self._count = metrics.counter("kvpeer_links_refusals_total")
        self._logged: set[tuple[str, str]] = set()

    def add(self, reason: str, remote: str, detail: object) -> None:
        """Counts one refusal. `remote` is the peer's address, `reason` a label of the metric."""
        self._count.labels(reason=reason).inc()
        if (remote, reason) in self._logged:
            return
        if len(self._logged) >= REMEMBERED_MAX:
            self._logged.clear()
        self._logged.add((remote, reason))
        said = str(detail) or type(detail).__name__  # errors of asyncio often say nothing
        _log.warning("no link with %s (%s; further ones are only counted): %s", remote, reason, said)
