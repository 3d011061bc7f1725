"""`plan`: from what was observed to the changes that are missing. Level-based: it does not matter what happened, only
what is; without a difference there is no change, so a look at a cluster that is as it should be costs no write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvpeer_operator.models import PeerCacheCluster
from kvpeer_operator.reconcile.objects import agents_service, images_digest, own_secret, trial_pod
from kvpeer_operator.reconcile.observed import Observed, annotation

__all__ = ["Apply", "Change", "Create", "Delete", "look_again_s", "plan", "trial_fits", "trial_succeeded"]

TRIAL_RETRY_S = 60.0
"""A trial that failed or was refused is tried again after this long: an image may be pushed, a quota raised."""


LOOK_AGAIN_S = 600.0
"""A cluster is looked at this often without any event, because no watch is perfect. A look is six reads, so 50 clusters
make half a request a second of each replica."""

LOOK_AGAIN_TRYING_S = 5.0
"""While a trial runs. Its pod is none of the cluster's, so no event tells of its end, and engines wait for it."""

LOOK_AGAIN_WAITING_S = 30.0
"""While something is missing that comes without an event: a Secret of the user's, the time of another trial."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of these fields, by the operator's field manager; conflicts are won."""

    object: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Create:
    """Make the object; one that is there already is left as it is."""

    object: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the object of this name and uid, and no later one of the same name."""

    kind: str
    name: str
    uid: str


Change = Apply | Create | Delete


def plan(observed: Observed, now: float, secret: str) -> list[Change]:
    """The changes that bring the namespace to what the cluster's spec says, in the order in which they are to be made.

    now: seconds since the epoch. secret: what a new Secret would hold, drawn anew for each call; a Secret that exists
    is never changed, because running agents could not talk to those with another.
    """
    cluster = observed.cluster
    if cluster.metadata.deletion_timestamp is not None:
        return []  # what it owns goes with it
    changes: list[Change] = []
    service = agents_service(cluster)
    if not _has(observed.service, service):
        changes.append(Apply(service))
    if _needs_own_secret(cluster) and observed.secret is None:
        changes.append(Create(own_secret(cluster, secret)))
    return [*changes, *_trial_changes(observed, now)]


def look_again_s(observed: Observed, is_ready: bool) -> float:
    """After how many seconds the cluster is to be looked at again, if no event comes before. is_ready: whether images
    and Secret are."""
    if is_ready:
        return LOOK_AGAIN_S
    is_trying = observed.refusal is None and _phase(observed.trial) != "Failed" and not trial_succeeded(observed)
    return LOOK_AGAIN_TRYING_S if is_trying else LOOK_AGAIN_WAITING_S


def trial_fits(observed: Observed) -> bool:
    """Whether there is a trial, and of the images that the cluster has now."""
    trial = observed.trial
    return trial is not None and annotation(trial, "kvpeer.io/images") == images_digest(observed.cluster)


def trial_succeeded(observed: Observed) -> bool:
    """Whether the images that the cluster has now were run, by the trial or an earlier one that is noted."""
    if observed.cluster.status.tried_images == images_digest(observed.cluster):
        return True
    return trial_fits(observed) and _phase(observed.trial) == "Succeeded"


def _needs_own_secret(cluster: PeerCacheCluster) -> bool:
    security = cluster.spec.security
    return security.mode == "SharedSecret" and not security.secret_name


def _trial_changes(observed: Observed, now: float) -> list[Change]:
    trial = observed.trial
    is_noted = observed.cluster.status.tried_images == images_digest(observed.cluster)
    if trial is None:
        is_refused = observed.refusal is not None and not _is_long_ago(observed.refusal.at, now)
        return [] if is_noted or is_refused else [Create(trial_pod(observed.cluster))]
    if trial["metadata"].get("deletionTimestamp"):
        return []
    failed_long_ago = _phase(trial) == "Failed" and _is_long_ago(_ended(trial), now)
    if is_noted or not trial_fits(observed) or failed_long_ago:
        # The next look makes a new one where it is needed.
        return [Delete("Pod", trial["metadata"]["name"], trial["metadata"]["uid"])]
    return []


def _is_long_ago(then: float, now: float) -> bool:
    """Whether a trial may be made again. What seems to be yet to come was noted before a clock was put back, by this
    process or by a kubelet's."""
    return not -TRIAL_RETRY_S < now - then < TRIAL_RETRY_S


def _ended(trial: Mapping[str, Any]) -> float:
    """When the failed trial's last container ended; for one without, when it was made."""
    status = trial.get("status") or {}
    times = [
        state["terminated"]["finishedAt"]
        for key in ("initContainerStatuses", "containerStatuses")
        for each in status.get(key) or ()
        for state in [each.get("state") or {}]
        if (state.get("terminated") or {}).get("finishedAt")
    ]
    return max(map(_seconds, times), default=_seconds(trial["metadata"]["creationTimestamp"]))


def _seconds(timestamp: str) -> float:
    """Seconds since the epoch of the API server's "2026-01-01T00:00:00Z"."""
    return datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()


def _phase(pod: Mapping[str, Any] | None) -> str:
    return str(((pod or {}).get("status") or {}).get("phase", ""))


def _has(there: Any, wanted: Any) -> bool:
    """Whether an object has all that is wanted of it; what others added does not count."""
    if isinstance(wanted, Mapping):
        return isinstance(there, Mapping) and all(_has(there.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, list):
        return isinstance(there, list) and len(there) == len(wanted) and all(map(_has, there, wanted))
    return bool(there == wanted)
