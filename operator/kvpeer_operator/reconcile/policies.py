"""Which policy governs a pod: the oldest of those that select it."""

from __future__ import annotations

from collections.abc import Iterable

from kvpeer_operator.models import P2PPolicy

__all__ = ["governing_policy", "selecting_policies"]


def selecting_policies(policies: Iterable[P2PPolicy], cluster: str, labels: dict[str, str]) -> list[P2PPolicy]:
    """The policies that select a pod of this cluster, oldest first; of equally old ones the first by name."""
    chosen = [each for each in policies if each.spec.cluster_ref.name == cluster and each.spec.selector.matches(labels)]
    # Times of the API server are RFC 3339 in UTC, which sort as text; what is being deleted governs nothing more.
    alive = [each for each in chosen if each.metadata.deletion_timestamp is None]
    return sorted(alive, key=lambda each: (each.metadata.creation_timestamp, each.metadata.name))


def governing_policy(policies: Iterable[P2PPolicy], cluster: str, labels: dict[str, str]) -> P2PPolicy | None:
    """The policy that governs a pod of this cluster with these labels; None: none does."""
    return next(iter(selecting_policies(policies, cluster, labels)), None)
