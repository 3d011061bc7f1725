"""Which clusters are to be looked at, and when: a set of keys with times. Pure; time comes in as an argument.

Events come in bursts (a Deployment of a hundred pods); one look a second at a cluster answers them all. A look that
failed is repeated, at growing distances.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["ClusterKey", "WorkQueue"]

COALESCE_S = 1.0
"""From the first event of a burst to the look: what people wait for takes longer, and the API server is spared."""

RETRY_FIRST_S, RETRY_LAST_S = 2.0, 120.0
"""After the first failure, doubled with each further one up to the last."""

WAIT_MAX_S = 300.0
"""The longest sleep of who works on an empty queue."""


class ClusterKey(NamedTuple):
    """A PeerCacheCluster's place."""

    namespace: str
    name: str


@dataclass
class WorkQueue:
    """Belongs to one task; as many keys as there are clusters that are named by anything."""

    _due: dict[ClusterKey, float] = field(default_factory=dict)
    _failures: dict[ClusterKey, int] = field(default_factory=dict)

    def changed(self, key: ClusterKey, now: float) -> None:
        """Something about this cluster changed. One that failed before keeps its distance."""
        if key not in self._failures:
            self._due[key] = min(self._due.get(key, now + COALESCE_S), now + COALESCE_S)

    def take(self, now: float) -> ClusterKey | None:
        """A cluster that is to be looked at now, taken out; None: none is."""
        due = min(self._due, key=self._due.__getitem__, default=None)
        if due is None or self._due[due] > now:
            return None
        del self._due[due]
        return due

    def done(self, key: ClusterKey, now: float, again_s: float | None) -> None:
        """The look is over, and the next one due after so many seconds, if nothing changes before. None: there is no
        such cluster, and it is forgotten."""
        self._failures.pop(key, None)
        if again_s is not None:
            self._due[key] = min(self._due.get(key, now + again_s), now + again_s)

    def failed(self, key: ClusterKey, now: float) -> float:
        """The look failed; returns after how many seconds it is repeated."""
        n_failures = self._failures.get(key, 0)
        self._failures[key] = n_failures + 1
        wait_s = min(RETRY_LAST_S, RETRY_FIRST_S * 2.0 ** min(n_failures, 16))
        self._due[key] = now + wait_s
        return wait_s

    def n_due(self, now: float) -> int:
        """How many clusters are to be looked at now."""
        return sum(at <= now for at in self._due.values())

    def wait_s(self, now: float) -> float:
        """Until the next look, at most WAIT_MAX_S."""
        return max(0.0, min((at - now for at in self._due.values()), default=WAIT_MAX_S))
