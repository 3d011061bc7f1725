"""One look at a cluster: read, decide, perform. `reconcile` decides; an `Api` reads and performs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError

from kvpeer_operator.injection import CLUSTER_LABEL, Patch, Skip, inject, skip_patch
from kvpeer_operator.injection.names import secret_name, service_name
from kvpeer_operator.models import P2PPolicy, PeerCacheCluster, PeerCacheClusterStatus
from kvpeer_operator.recent_reads import Reader
from kvpeer_operator.reconcile import (
    Apply,
    Change,
    Create,
    Delete,
    Observed,
    Telling,
    Word,
    cluster_status,
    governing_policy,
    is_left_over,
    look_again_s,
    plan,
    policy_status,
    words,
)
from kvpeer_operator.reconcile.objects import trial_name
from kvpeer_operator.reconcile.observed import Refusal
from kvpeer_operator.work import ClusterKey

__all__ = ["Api", "ForbiddenError", "Reconciler", "Seen", "admit_pod"]

_AWAITED = ("ImagesReady", "SecretReady")
"""Conditions that come true without an event."""

_Object = Mapping[str, Any]
_Resource = TypeVar("_Resource", PeerCacheCluster, P2PPolicy)


class ForbiddenError(Exception):
    """The API server does not allow the change: a quota, pod security, another admission."""


class Api(Protocol):
    """What is asked of the API server. Every call has a deadline; other failures than these raise."""

    def get(self, kind: str, namespace: str, name: str) -> _Object | None:
        """The object; None: there is none."""

    def list(self, kind: str, namespace: str, labels: str = "") -> Sequence[_Object]:
        """The objects with these labels (a selector; empty: all)."""

    def list_at(self, kind: str, namespace: str) -> tuple[Sequence[_Object], int]:
        """All objects, and the revision at which they were read: a later read has no lower one."""

    def apply(self, obj: _Object) -> None:
        """Server-side apply by the operator's field manager; conflicts are won."""

    def create(self, obj: _Object) -> None:
        """Makes the object; nothing if it is there already. Raises ForbiddenError."""

    def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Deletes the object of this uid; nothing if it is gone."""

    def apply_status(self, obj: _Object) -> None:
        """Server-side apply of the status; nothing if the object is gone."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look at a cluster found. modes: those in effect of its policies."""

    status: PeerCacheClusterStatus
    modes: tuple[str, ...]


class Reconciler:
    """Looks at clusters, one at a time. Not thread-safe. Decides by nothing of earlier looks but why a trial pod was
    refused, and which agents were told of their policies. post: posts words to agents, and says which took them."""

    def __init__(self, api: Api, post: Callable[[Sequence[Word]], Sequence[bool]]) -> None:
        self._api = api
        self._post = post
        self._refusals: dict[ClusterKey, Refusal] = {}
        self._tellings: dict[ClusterKey, Telling] = {}
        self.seen: dict[ClusterKey, Seen] = {}
        """By cluster, what the last look found."""

    def look(self, key: ClusterKey, now: float, timestamp: str, secret: str) -> float | None:
        """Brings the cluster's namespace one step further and its status up to date; returns after how many seconds it
        is to be looked at again, None if there is no such cluster. now and timestamp: the same time, in seconds and as
        the API server writes it. secret: for a new Secret.

        Raises whatever the API raises; the next look begins anew.
        """
        found = self._api.get("PeerCacheCluster", key.namespace, key.name)
        objects, revision = self._api.list_at("P2PPolicy", key.namespace)
        policies = _readable(P2PPolicy, objects)
        if found is None:
            self._refusals.pop(key, None)
            self._tellings.pop(key, None)
            self.seen.pop(key, None)
            self._write_policies(key, policies, None, timestamp)
            return None
        observed = self._observe(key, PeerCacheCluster.model_validate(found), policies, revision)
        for change in plan(observed, now, secret):
            self._perform(key, change, now)
        observed = replace(observed, untold=self._tell(key, observed, now))
        status = cluster_status(observed, timestamp)
        if status != observed.cluster.status:
            self._api.apply_status(_with_status(observed.cluster, status))
        self.seen[key] = Seen(status, self._write_policies(key, policies, observed, timestamp))
        missing = [each for each in status.conditions if each.type in _AWAITED and each.status != "True"]
        return min(look_again_s(observed, is_ready=not missing), self._tellings[key].wait_s(now))

    def _tell(self, key: ClusterKey, observed: Observed, now: float) -> frozenset[str]:
        """Posts what is due; returns the pods whose agents do not know their policy yet."""
        telling, all_words = self._tellings.setdefault(key, Telling()), words(observed)
        due = telling.due(all_words, now)
        for word, is_taken in zip(due, self._post(due), strict=True):
            telling.ended(word, now, is_taken=is_taken)
        return telling.untold(all_words)

    def _observe(
        self, key: ClusterKey, cluster: PeerCacheCluster, policies: tuple[P2PPolicy, ...], revision: int
    ) -> Observed:
        namespace = key.namespace
        secret = self._api.get("Secret", namespace, cluster.spec.security.secret_name or secret_name(key.name))
        return Observed(
            cluster=cluster,
            policies=policies,
            revision=revision,
            pods=tuple(self._api.list("Pod", namespace, f"{CLUSTER_LABEL}={key.name}")),
            service=self._api.get("Service", namespace, service_name(key.name)),
            secret=None if secret and is_left_over(secret, cluster) else secret,
            trial=self._api.get("Pod", namespace, trial_name(cluster)),
            refusal=self._refusals.get(key),
        )

    def _perform(self, key: ClusterKey, change: Change, now: float) -> None:
        if isinstance(change, Delete):
            self._api.delete(change.kind, key.namespace, change.name, change.uid)
        elif isinstance(change, Apply):
            self._api.apply(change.object)
        elif isinstance(change, Create):
            is_trial = change.object["kind"] == "Pod"
            try:
                self._api.create(change.object)
            except ForbiddenError as error:
                if not is_trial:
                    raise
                self._refusals[key] = Refusal.of(str(error), now)
            else:
                if is_trial:
                    self._refusals.pop(key, None)

    def _write_policies(
        self, key: ClusterKey, policies: tuple[P2PPolicy, ...], observed: Observed | None, timestamp: str
    ) -> tuple[str, ...]:
        """Returns the modes that are in effect. observed: None where there is no cluster."""
        cluster, pods, untold = (observed.cluster, observed.pods, observed.untold) if observed else (None, (), ())
        modes = []
        for policy in policies:
            if policy.spec.cluster_ref.name == key.name:
                status = policy_status(policy, cluster, policies, pods, untold, timestamp)
                modes.append(status.effective_mode)
                if status != policy.status:
                    self._api.apply_status(_with_status(policy, status))
        return tuple(modes)


def admit_pod(api: Reader, pod: _Object, namespace: str) -> tuple[Patch, Skip | None]:
    """What becomes of a pod that is being created, and why it is left alone. Raises whatever the API raises; the
    webhook's failurePolicy then admits the pod unchanged."""
    labels = dict(pod["metadata"].get("labels") or {})
    name = labels.get(CLUSTER_LABEL, "")
    found = api.get("PeerCacheCluster", namespace, name) if name else None
    cluster = PeerCacheCluster.model_validate(found) if found else None
    policies = _readable(P2PPolicy, api.list("P2PPolicy", namespace)) if cluster else ()
    budgets = [*api.list("ResourceQuota", namespace), *api.list("LimitRange", namespace)] if cluster else []
    result = inject(pod, cluster, governing_policy(policies, name, labels), budgets)
    return (result, None) if isinstance(result, Patch) else (skip_patch(pod, result), result)


def _readable(kind: type[_Resource], objects: Iterable[_Object]) -> tuple[_Resource, ...]:
    """Those that this version understands: one that it does not must not keep the others from working."""
    read: list[_Resource] = []
    for each in objects:
        try:
            read.append(kind.model_validate(each))
        except ValidationError:
            continue
    return tuple(read)


def _with_status(resource: PeerCacheCluster | P2PPolicy, status: Any) -> dict[str, Any]:
    return {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {"name": resource.metadata.name, "namespace": resource.metadata.namespace},
        "status": status.model_dump(by_alias=True, mode="json"),
    }
