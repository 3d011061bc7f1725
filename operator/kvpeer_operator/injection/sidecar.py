"""The containers and volumes that a pod gets.

The agent can neither stop nor evict the engine: its container has no probe and does not end with the agent, what it
mounts is optional, and it has the pod's quality of service. Both containers satisfy the "restricted" pod security
standard.
"""

from __future__ import annotations

import copy
from typing import Any

from kvpeer_operator.injection.names import (
    AGENT_CONTAINER,
    PAYLOAD_CONTAINER,
    PAYLOAD_FOLDER,
    PAYLOAD_VOLUME,
    RUN_FOLDER,
    RUN_VOLUME,
    SECRET_FOLDER,
    SECRET_KEY,
    SECRET_VOLUME,
    secret_name,
)
from kvpeer_operator.injection.quality import Quality, agent_resources, payload_resources
from kvpeer_operator.injection.settings import agent_environment
from kvpeer_operator.models import PeerCacheCluster

__all__ = ["AGENT_SCRIPT", "PAYLOAD_SCRIPT", "SECURITY_CONTEXT", "agent_container", "payload_container", "volumes"]

RESTART_S = 10
"""From an agent's end to its next start, which takes half a second of a core."""

AGENT_SCRIPT = f"""\
trap 'ended=1; kill -TERM $agent' TERM
while [ -z "$ended" ]; do
  kvpeer agent & agent=$!
  wait $agent
  [ -n "$ended" ] || {{ sleep {RESTART_S} & agent=$!; wait $agent; }}
done
wait
"""
"""Starts the agent again whenever it ends, until the container is told to. A container that ended would do harm: before
the engine it holds the engine's start, and later the pod is not ready, and gets no requests, until it runs again."""

PAYLOAD_SCRIPT = f"cp -R /payload/. {PAYLOAD_FOLDER}/"

SECURITY_CONTEXT: dict[str, Any] = {
    "runAsNonRoot": True,
    "runAsUser": 65532,
    # A mounted Secret belongs to root's group, unless the pod has an fsGroup, which all its containers are in.
    "runAsGroup": 0,
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}

_SECRET_MODE = 0o440


def payload_container(cluster: PeerCacheCluster, quality: Quality) -> dict[str, Any]:
    """Copies the Python package for engines into the pod, then ends."""
    return _container(
        PAYLOAD_CONTAINER,
        cluster.spec.images.payload,
        cluster,
        payload_resources(quality),
        command=["sh", "-c", PAYLOAD_SCRIPT],
        volumeMounts=[{"name": PAYLOAD_VOLUME, "mountPath": PAYLOAD_FOLDER}],
    )


def agent_container(cluster: PeerCacheCluster, quality: Quality) -> dict[str, Any]:
    """The agent, as a native sidecar: it starts before the engine and ends after it."""
    spec = cluster.spec
    mounts: list[dict[str, Any]] = [{"name": RUN_VOLUME, "mountPath": RUN_FOLDER}]
    if spec.security.mode == "SharedSecret":
        mounts.append({"name": SECRET_VOLUME, "mountPath": SECRET_FOLDER, "readOnly": True})
    ports = spec.ports.model_dump()
    return _container(
        AGENT_CONTAINER,
        spec.images.agent,
        cluster,
        agent_resources(quality, spec.agent.cpu, spec.agent.memory_overhead, spec.pool.size, spec.pool.hugepages),
        restartPolicy="Always",
        command=["sh", "-c", AGENT_SCRIPT],
        env=agent_environment(cluster),
        ports=[{"name": f"kvp-{name}", "containerPort": port, "protocol": "TCP"} for name, port in ports.items()],
        volumeMounts=mounts,
    )


def volumes(cluster: PeerCacheCluster) -> list[dict[str, Any]]:
    """The volumes of both containers."""
    made: list[dict[str, Any]] = [{"name": RUN_VOLUME, "emptyDir": {}}, {"name": PAYLOAD_VOLUME, "emptyDir": {}}]
    security = cluster.spec.security
    if security.mode == "SharedSecret":
        secret = {
            "secretName": security.secret_name or secret_name(cluster.metadata.name),
            "items": [{"key": SECRET_KEY, "path": SECRET_KEY}],
            "defaultMode": _SECRET_MODE,
            "optional": True,
        }
        made.append({"name": SECRET_VOLUME, "secret": secret})
    return made


def _container(
    name: str, image: str, cluster: PeerCacheCluster, resources: dict[str, Any], **further: Any
) -> dict[str, Any]:
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": cluster.spec.images.pull_policy,
        **further,
        **({"resources": resources} if resources else {}),
        "securityContext": copy.deepcopy(SECURITY_CONTEXT),
    }
