"""Whether a pod has a place for the agent: names, ports, folders, the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpeer_operator.injection.names import (
    AGENT_CONTAINER,
    PAYLOAD_CONTAINER,
    PAYLOAD_FOLDER,
    PAYLOAD_VOLUME,
    RUN_FOLDER,
    RUN_VOLUME,
    SECRET_VOLUME,
)
from kvpeer_operator.injection.quality import Quality, quality_of
from kvpeer_operator.injection.reasons import Skip, SkipReason
from kvpeer_operator.models import PeerCacheCluster

__all__ = ["pod_refusal"]

_OWN_VARIABLES = ("KVPEER_SOCKET",)


def pod_refusal(pod: Mapping[str, Any], cluster: PeerCacheCluster, engine_index: int) -> Skip | None:
    """Why the agent has no place in this pod; None: it has."""
    spec = pod["spec"]
    containers = [*(spec.get("initContainers") or ()), *spec["containers"]]
    ports = cluster.spec.ports
    if spec.get("hostNetwork"):
        return Skip(
            SkipReason.HOST_NETWORK_PORT_CLASH,
            "on the host's network the agents of one node would want the same ports: remove hostNetwork",
        )
    if spec.get("resources"):
        return Skip(
            SkipReason.POD_LEVEL_RESOURCES,
            "the pool has no place in spec.resources of the pod: give resources to its containers instead",
        )
    taken = {each["name"] for each in (*containers, *(spec.get("volumes") or ()))}
    clash = taken & {AGENT_CONTAINER, PAYLOAD_CONTAINER, RUN_VOLUME, PAYLOAD_VOLUME, SECRET_VOLUME}
    if clash:
        return Skip(SkipReason.NAME_CLASH, f"the pod has a container or volume named {min(clash)}: rename it")
    mounted = {each["mountPath"] for each in spec["containers"][engine_index].get("volumeMounts") or ()}
    if mounted & {RUN_FOLDER, PAYLOAD_FOLDER}:
        folder = min(mounted & {RUN_FOLDER, PAYLOAD_FOLDER})
        return Skip(SkipReason.NAME_CLASH, f"the engine's container mounts something at {folder}: mount it elsewhere")
    used = {port["containerPort"] for each in containers for port in each.get("ports") or ()}
    for name, port in (("control", ports.control), ("data", ports.data), ("metrics", ports.metrics)):
        if port in used:
            return Skip(
                SkipReason.PORT_CLASH,
                f"port {port} is a container's of the pod: set spec.ports.{name} of {cluster.metadata.name} to another",
            )
    if cluster.spec.pool.hugepages != "None" and quality_of(spec) is Quality.BEST_EFFORT:
        return Skip(
            SkipReason.HUGEPAGES_IN_BEST_EFFORT,
            "huge pages need requests: give the engine requests of its own, or set spec.pool.hugepages to None",
        )
    return _environment_refusal(spec["containers"][engine_index])


def _environment_refusal(container: Mapping[str, Any]) -> Skip | None:
    variables = {each["name"]: each for each in container.get("env") or ()}
    if "valueFrom" in variables.get("PYTHONPATH", {}):
        return Skip(
            SkipReason.ENVIRONMENT_OVERRIDE,
            "PYTHONPATH comes from elsewhere (valueFrom), so nothing can be put before it: give it a value",
        )
    for name in _OWN_VARIABLES:
        if name in variables:
            return Skip(SkipReason.ENVIRONMENT_OVERRIDE, f"the engine's container sets {name}: remove it")
    return None
