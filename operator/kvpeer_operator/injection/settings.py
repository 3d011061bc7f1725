"""What agents and engines are told: environment variables from the resources' fields."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from kvpeer_operator.injection.command_line import Engine
from kvpeer_operator.injection.names import RUN_FOLDER, SECRET_FOLDER, SECRET_KEY, SOCKET, service_name
from kvpeer_operator.models import P2PPolicySpec, PeerCacheCluster, PeerCacheClusterSpec

__all__ = ["agent_environment", "policy_variables", "settings_digest"]

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0}
_DIGEST_CHARS = 16


def agent_environment(cluster: PeerCacheCluster) -> list[dict[str, Any]]:
    """The environment of the agent's container; docs/configuration.md has the variables."""
    spec, name = cluster.spec, cluster.metadata.name
    # Only with a namespace is the name right in every pod, whatever its search list.
    seed = f"{service_name(name)}.{cluster.metadata.namespace}.svc:{spec.ports.control}"
    values = {
        "KVPEER_AGENT_CLUSTER": name,
        "KVPEER_AGENT_RUNTIME_DIR": f"{RUN_FOLDER}/agent",
        "KVPEER_AGENT_SOCKET": SOCKET,
        "KVPEER_AGENT_SEEDS": seed,
        "KVPEER_AGENT_CONTROL_PORT": str(spec.ports.control),
        "KVPEER_AGENT_DATA_PORT": str(spec.ports.data),
        "KVPEER_AGENT_LOG_LEVEL": spec.agent.log_level.lower(),
        "KVPEER_POOL_SIZE": spec.pool.size,
        "KVPEER_DIRECTORY_REPLICAS": str(spec.directory.replicas),
        "KVPEER_DIRECTORY_VIRTUAL_NODES": str(spec.directory.virtual_nodes),
        "KVPEER_DIRECTORY_PARTITION_RECORDS_MAX": str(spec.directory.partition_records_max),
        "KVPEER_TRANSPORT_VERIFY": spec.transport.verify.lower(),
        "KVPEER_METRICS_PORT": str(spec.ports.metrics),
        **_pages(spec),
        **_security(spec),
    }
    told = [_field("KVPEER_AGENT_NAME", "metadata.name"), _field("KVPEER_AGENT_HOST", "status.podIP")]
    return [*told, *({"name": key, "value": value} for key, value in values.items())]


def policy_variables(engine: Engine, policy: P2PPolicySpec) -> dict[str, str]:
    """What the policy means to an engine: variables that stand in its container's environment at the start, and that it
    is told of while it runs."""
    wait_s = f"{_seconds(policy.max_pull_wait):g}"
    mode = policy.mode.lower() if "Consumer" in policy.roles else "off"
    if engine is Engine.SGLANG:
        return {"KVPEER_SGLANG_MODE": mode, "KVPEER_SGLANG_GET_TIMEOUT_MAX_S": wait_s}
    return {
        "KVPEER_CONNECTOR_MODE": mode,
        "KVPEER_CONNECTOR_PUBLISH": "true" if "Producer" in policy.roles else "false",
        "KVPEER_CONNECTOR_MIN_CACHED_TOKEN_DELTA": str(policy.min_cached_token_delta),
        "KVPEER_CONNECTOR_LOAD_TIMEOUT_S": wait_s,
    }


def settings_digest(cluster: PeerCacheClusterSpec) -> str:
    """Differs when a pod that was made with these settings would be made differently with others."""
    # Whom a cluster selects is not what a pod is made with, and policies reach running pods.
    told = cluster.model_dump(by_alias=True, exclude={"engine_selector"})
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:_DIGEST_CHARS]


def _pages(spec: PeerCacheClusterSpec) -> dict[str, str]:
    if spec.pool.hugepages == "None":
        return {}
    extent = {"KVPEER_POOL_EXTENT_SIZE": "1Gi"} if spec.pool.hugepages == "1Gi" else {}
    return {"KVPEER_POOL_HUGEPAGES": spec.pool.hugepages, **extent}


def _security(spec: PeerCacheClusterSpec) -> dict[str, str]:
    if spec.security.mode == "Insecure":
        return {"KVPEER_SECURITY_MODE": "insecure"}
    return {
        "KVPEER_SECURITY_MODE": "shared_secret",
        "KVPEER_SECURITY_SECRET_FILE": f"{SECRET_FOLDER}/{SECRET_KEY}",
    }


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def _seconds(duration: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(ms|s|m)", duration).groups()  # type: ignore[union-attr]
    return int(number) * _SECONDS[unit]
