"""What was read from the cluster about one PeerCacheCluster, and what follows from it alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpeer_operator.injection import INJECTED_ANNOTATION, SETTINGS_ANNOTATION, SKIPPED_ANNOTATION
from kvpeer_operator.injection.names import AGENT_CONTAINER
from kvpeer_operator.models import P2PPolicy, PeerCacheCluster

__all__ = [
    "Observed",
    "Refusal",
    "agent_runs",
    "annotation",
    "is_left_over",
    "is_member",
    "is_over",
    "is_skipped",
    "settings_of",
]

Object = Mapping[str, Any]
"""A Kubernetes object as the API server gives it."""

_OVER = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True)
class Refusal:
    """The API server did not let us make the trial pod. reason: PodSecurity, Quota or Refused. at: seconds since the
    epoch."""

    reason: str
    message: str
    at: float

    @classmethod
    def of(cls, message: str, at: float) -> Refusal:
        """The refusal with this message of the API server."""
        is_quota = "exceeded quota" in message or "failed quota" in message
        reason = "Quota" if is_quota else "PodSecurity" if "violates PodSecurity" in message else "Refused"
        return cls(reason, message, at)


@dataclass(frozen=True, slots=True)
class Observed:
    """One look at a cluster's namespace.

    pods: those with the cluster's label. secret: the one that the cluster uses. trial: the pod that runs the images
    once. refusal: why that could not be made, when it was tried last. revision: of the API server's objects, when the
    policies were read. untold: uids of pods whose engines run with an earlier policy.
    """

    cluster: PeerCacheCluster
    policies: tuple[P2PPolicy, ...] = ()
    revision: int = 0
    pods: tuple[Object, ...] = ()
    service: Object | None = None
    secret: Object | None = None
    trial: Object | None = None
    refusal: Refusal | None = None
    untold: frozenset[str] = frozenset()


def is_left_over(obj: Object, cluster: PeerCacheCluster) -> bool:
    """Whether the object was an earlier cluster's of the same name: the garbage collector is about to take it away, and
    there is no event when it has."""
    owners = {each["uid"] for each in obj["metadata"].get("ownerReferences") or () if each["kind"] == cluster.kind}
    return bool(owners) and cluster.metadata.uid not in owners


def annotation(pod: Object, name: str) -> str:
    """An annotation's value; empty for none."""
    return str((pod["metadata"].get("annotations") or {}).get(name, ""))


def is_over(pod: Object) -> bool:
    """Whether the pod serves no more, or will not for long."""
    ended = (pod.get("status") or {}).get("phase") in _OVER
    return ended or bool(pod["metadata"].get("deletionTimestamp"))


def is_member(pod: Object, cluster: str) -> bool:
    """Whether the pod has an agent of this cluster."""
    return annotation(pod, INJECTED_ANNOTATION) == cluster


def is_skipped(pod: Object) -> bool:
    """Whether the pod opted in and runs without an agent: left alone, or made while no webhook answered."""
    return bool(annotation(pod, SKIPPED_ANNOTATION)) or not annotation(pod, INJECTED_ANNOTATION)


def agent_runs(pod: Object) -> bool:
    """Whether the kubelet says that the pod's agent is ready."""
    statuses = (pod.get("status") or {}).get("initContainerStatuses") or ()
    return any(each["name"] == AGENT_CONTAINER and each.get("ready", False) for each in statuses)


def settings_of(pod: Object) -> str:
    """Digest of the settings that the pod was made with."""
    return annotation(pod, SETTINGS_ANNOTATION)
