"""`inject`: from a pod as it is created to the patch that gives it an agent, or the reason why it is left alone.

What the user set is kept: containers, commands, variables and mounts are added to, never replaced; PYTHONPATH gets our
folder in front. A pod that has an agent is not changed again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvpeer_operator.injection.budget import budget_refusal
from kvpeer_operator.injection.command_line import Engine
from kvpeer_operator.injection.engines import EngineContainer, find_engine, flags_of, refusal
from kvpeer_operator.injection.names import (
    BECAUSE_ANNOTATION,
    CLUSTER_LABEL,
    INJECTED_ANNOTATION,
    MEMBER_LABEL,
    PAYLOAD_FOLDER,
    PAYLOAD_VOLUME,
    POLICY_ANNOTATION,
    RUN_FOLDER,
    RUN_VOLUME,
    SETTINGS_ANNOTATION,
    SKIPPED_ANNOTATION,
    SOCKET,
    TOLD_ANNOTATION,
)
from kvpeer_operator.injection.quality import quality_of
from kvpeer_operator.injection.reasons import Skip, SkipReason
from kvpeer_operator.injection.room import pod_refusal
from kvpeer_operator.injection.settings import policy_variables, settings_digest
from kvpeer_operator.injection.sidecar import agent_container, payload_container, volumes
from kvpeer_operator.json_patch import json_patch
from kvpeer_operator.models import ClusterReference, P2PPolicy, P2PPolicySpec, PeerCacheCluster

__all__ = ["Patch", "inject", "skip_patch"]

_Pod = Mapping[str, Any]

_IMAGES_REASONS = {"PodSecurity": SkipReason.POD_SECURITY, "Quota": SkipReason.QUOTA}
"""Reasons of the condition ImagesReady that are reasons to skip of their own."""


_NOTES = (SKIPPED_ANNOTATION, BECAUSE_ANNOTATION)


@dataclass(frozen=True, slots=True)
class Patch:
    """Operations of a JSON Patch (RFC 6902), in order; none: the pod is as it should be."""

    operations: tuple[dict[str, Any], ...]


def inject(
    pod: _Pod,
    cluster: PeerCacheCluster | None,
    policy: P2PPolicy | None,
    budgets: Iterable[Mapping[str, Any]] = (),
) -> Patch | Skip:
    """The patch that gives the pod an agent of the cluster, or why it gets none. Pure; the pod is not changed.

    cluster: the one that the pod's label names; None: there is none. policy: the one that governs the pod; None: none
    does, which is as Off. budgets: the ResourceQuota and LimitRange objects of the namespace.
    """
    if INJECTED_ANNOTATION in _annotations(pod):
        return Patch(())
    label = _labels(pod).get(CLUSTER_LABEL, "")
    if cluster is None:
        return Skip(SkipReason.NO_CLUSTER, f"there is no PeerCacheCluster {label!r} in this namespace: make it first")
    refused = _cluster_refusal(pod, cluster)
    if refused:
        return refused
    found = find_engine(pod)
    if isinstance(found, Skip):
        return found
    spec = policy.spec if policy else P2PPolicySpec(cluster_ref=ClusterReference(name=cluster.metadata.name))
    refused = refusal(pod, found) or _policy_refusal(found.engine, spec) or pod_refusal(pod, cluster, found.index)
    if refused:
        return refused
    quality = quality_of(pod["spec"])
    payload, agent = payload_container(cluster, quality), agent_container(cluster, quality)
    refused = budget_refusal(pod, payload, agent, budgets)
    if refused:
        return refused
    after = _with_agent(pod, cluster, found, spec, [payload, agent])
    annotations = {
        INJECTED_ANNOTATION: cluster.metadata.name,
        SETTINGS_ANNOTATION: settings_digest(cluster.spec),
        TOLD_ANNOTATION: ",".join(_told(pod["spec"]["containers"][found.index], found, spec)),
        POLICY_ANNOTATION: policy.metadata.name if policy else "",
    }
    kept = {key: value for key, value in _annotations(pod).items() if key not in _NOTES}
    after["metadata"]["annotations"] = {**kept, **annotations}
    after["metadata"]["labels"] = {**_labels(pod), MEMBER_LABEL: cluster.metadata.name}
    return Patch(tuple(json_patch(pod, after)))


def skip_patch(pod: _Pod, skip: Skip) -> Patch:
    """The patch that notes on the pod why it has no agent."""
    after = copy.deepcopy(dict(pod))
    after["metadata"]["annotations"] = {
        **_annotations(pod),
        SKIPPED_ANNOTATION: skip.reason.value,
        BECAUSE_ANNOTATION: skip.message,
    }
    return Patch(tuple(json_patch(pod, after)))


def _cluster_refusal(pod: _Pod, cluster: PeerCacheCluster) -> Skip | None:
    name = cluster.metadata.name
    if not cluster.spec.engine_selector.matches(_labels(pod)):
        wanted = ", ".join(f"{key}={value}" for key, value in cluster.spec.engine_selector.match_labels.items())
        return Skip(SkipReason.NOT_SELECTED, f"spec.engineSelector of {name} wants the labels {wanted}")
    images = next((each for each in cluster.status.conditions if each.type == "ImagesReady"), None)
    if images is not None and images.status == "True":
        return None
    reason = _IMAGES_REASONS.get(images.reason if images else "", SkipReason.IMAGES_NOT_READY)
    told = images.message if images else "they have not been tried yet; pods that are made later get an agent"
    return Skip(reason, f"the images of {name} are not ready in this namespace: {told}")


def _policy_refusal(engine: Engine, policy: P2PPolicySpec) -> Skip | None:
    if engine is Engine.VLLM:
        return None
    if policy.mode == "Off":
        return Skip(SkipReason.POLICY_OFF, "no P2PPolicy with mode On or Shadow governs the pod")
    if len(policy.roles) == 1:
        return Skip(
            SkipReason.POLICY_NOT_FOR_ENGINE,
            f"SGLang publishes and pulls, or neither: the policy must not have {policy.roles[0]} alone",
        )
    return None


def _with_agent(
    pod: _Pod, cluster: PeerCacheCluster, found: EngineContainer, policy: P2PPolicySpec, init: list[dict[str, Any]]
) -> dict[str, Any]:
    after = copy.deepcopy(dict(pod))
    spec = after["spec"]
    spec["containers"][found.index] = _engine(spec["containers"][found.index], found, policy)
    # Last, so that a proxy which the pod's network needs runs before.
    spec["initContainers"] = [*(spec.get("initContainers") or ()), *init]
    spec["volumes"] = [*(spec.get("volumes") or ()), *volumes(cluster)]
    secrets = [*(spec.get("imagePullSecrets") or ())]
    secrets += [{"name": name} for name in cluster.spec.images.pull_secrets if {"name": name} not in secrets]
    if secrets:
        spec["imagePullSecrets"] = secrets
    return after


def _told(container: Mapping[str, Any], found: EngineContainer, policy: P2PPolicySpec) -> list[str]:
    """The variables that are the policy's: what the pod sets itself stays as it is."""
    own = {each["name"] for each in container.get("env") or ()}
    return sorted(policy_variables(found.engine, policy).keys() - own)


def _engine(container: Mapping[str, Any], found: EngineContainer, policy: P2PPolicySpec) -> dict[str, Any]:
    changed = found.line.with_flags(container, flags_of(found))
    env = [dict(each) for each in container.get("env") or ()]
    names = {each["name"] for each in env}
    for each in env:
        if each["name"] == "PYTHONPATH" and each.get("value"):
            each["value"] = f"{PAYLOAD_FOLDER}:{each['value']}"
        elif each["name"] == "PYTHONPATH":
            each["value"] = PAYLOAD_FOLDER
    wanted = {"PYTHONPATH": PAYLOAD_FOLDER, "KVPEER_SOCKET": SOCKET, **policy_variables(found.engine, policy)}
    env += [{"name": name, "value": value} for name, value in wanted.items() if name not in names]
    mounts = [
        {"name": RUN_VOLUME, "mountPath": RUN_FOLDER, "readOnly": True},
        {"name": PAYLOAD_VOLUME, "mountPath": PAYLOAD_FOLDER, "readOnly": True},
    ]
    return {**changed, "env": env, "volumeMounts": [*(container.get("volumeMounts") or ()), *mounts]}


def _annotations(pod: _Pod) -> dict[str, str]:
    return dict(pod["metadata"].get("annotations") or {})


def _labels(pod: _Pod) -> dict[str, str]:
    return dict(pod["metadata"].get("labels") or {})
