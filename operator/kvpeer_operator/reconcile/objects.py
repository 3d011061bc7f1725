"""The objects that a cluster needs in its namespace, as they should be."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kvpeer_operator.injection.names import (
    MEMBER_LABEL,
    PAYLOAD_FOLDER,
    PAYLOAD_VOLUME,
    SECRET_KEY,
    secret_name,
    service_name,
)
from kvpeer_operator.injection.quality import Quality
from kvpeer_operator.injection.sidecar import SECURITY_CONTEXT, payload_container
from kvpeer_operator.models import API_VERSION, PeerCacheCluster

__all__ = ["MANAGED_LABELS", "agents_service", "images_digest", "own_secret", "trial_name", "trial_pod"]

MANAGED_LABELS = {"app.kubernetes.io/managed-by": "kvpeer-operator"}

TRIAL_DEADLINE_S = 600
"""For pulling both images; they are far smaller than an engine's."""

_DIGEST_CHARS = 16
_TRIAL_SCRIPT = "kvpeer version && python3 -c 'from kvpeer.native import build_info; print(build_info())'"
_TRIAL_RESOURCES = {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}}


def images_digest(cluster: PeerCacheCluster) -> str:
    """Differs when other images, or the same ones otherwise pulled, have to be tried."""
    told = cluster.spec.images.model_dump_json()
    return hashlib.sha256(told.encode()).hexdigest()[:_DIGEST_CHARS]


def trial_name(cluster: PeerCacheCluster) -> str:
    """The name of the pod that tries the images."""
    return f"{cluster.metadata.name}-kvpeer-trial"


def agents_service(cluster: PeerCacheCluster) -> dict[str, Any]:
    """A headless Service by which agents find each other. Also those that are not ready, because an agent's first
    members are found before its engine is up."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {MEMBER_LABEL: cluster.metadata.name},
        "ports": [{"name": "control", "port": cluster.spec.ports.control, "protocol": "TCP"}],
    }
    return {**_head(cluster, "v1", "Service", service_name(cluster.metadata.name)), "spec": spec}


def own_secret(cluster: PeerCacheCluster, secret: str) -> dict[str, Any]:
    """The cluster's Secret. secret: 64 hexadecimal digits, freshly drawn."""
    head = _head(cluster, "v1", "Secret", secret_name(cluster.metadata.name))
    return {**head, "type": "Opaque", "stringData": {SECRET_KEY: secret}}


def trial_pod(cluster: PeerCacheCluster) -> dict[str, Any]:
    """A pod that pulls both images, copies the payload and loads its library, as an engine's pod will. So what would
    keep an engine from starting is found before any engine has it."""
    agent = {
        "name": "trial",
        "image": cluster.spec.images.agent,
        "imagePullPolicy": cluster.spec.images.pull_policy,
        "command": ["sh", "-c", _TRIAL_SCRIPT],
        "env": [{"name": "PYTHONPATH", "value": PAYLOAD_FOLDER}],
        "resources": _TRIAL_RESOURCES,
        "volumeMounts": [{"name": PAYLOAD_VOLUME, "mountPath": PAYLOAD_FOLDER, "readOnly": True}],
        "securityContext": SECURITY_CONTEXT,
    }
    spec = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": TRIAL_DEADLINE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "initContainers": [payload_container(cluster, Quality.BURSTABLE)],
        "containers": [agent],
        "volumes": [{"name": PAYLOAD_VOLUME, "emptyDir": {}}],
        "imagePullSecrets": [{"name": name} for name in cluster.spec.images.pull_secrets],
    }
    head = _head(cluster, "v1", "Pod", trial_name(cluster))
    head["metadata"]["annotations"] = {"kvpeer.io/images": images_digest(cluster)}
    made: dict[str, Any] = json.loads(json.dumps({**head, "spec": spec}))  # shares nothing with constants
    return made


def _head(cluster: PeerCacheCluster, api_version: str, kind: str, name: str) -> dict[str, Any]:
    owner = {
        "apiVersion": API_VERSION,
        "kind": cluster.kind,
        "name": cluster.metadata.name,
        "uid": cluster.metadata.uid,
        "controller": True,
    }
    metadata = {
        "name": name,
        "namespace": cluster.metadata.namespace,
        "labels": {**MANAGED_LABELS},
        "ownerReferences": [owner],
    }
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}
