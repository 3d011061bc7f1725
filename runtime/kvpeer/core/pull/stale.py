"""Who is told that locations are stale."""

from __future__ import annotations

import numpy as np

from kvpeer.core.pull.effects import Portion, ReportStale
from kvpeer.core.ring import Ring
from kvpeer.wire.messages import StaleReport
from kvpeer.wire.packing import U2, U4, pack

__all__ = ["stale_reports"]


def stale_reports(stale: Portion, ring: Ring) -> list[ReportStale]:
    """Returns one report for each owner, of the pages whose records it has."""
    owners = ring.owners(stale.partitions)
    reports = []
    for idx in np.unique(owners[owners >= 0]).tolist():
        theirs = stale.at(np.flatnonzero((owners == idx).any(axis=1)))
        report = StaleReport(
            theirs.producer,
            theirs.keys,
            pack(theirs.partitions, U2),
            pack(np.ascontiguousarray(theirs.holders["slot"]), U4),
            pack(np.ascontiguousarray(theirs.holders["generation"]), U4),
        )
        reports.append(ReportStale(ring.members[idx], report))
    return reports
