"""Objects that the API server must refuse, and where in the object it must say so. Judged here by an emulation of its
admission, and on a cluster by itself."""

from __future__ import annotations

import copy
from typing import Any

__all__ = ["BAD", "BASE_OF", "CLUSTER", "GONE", "POLICY", "changed", "id_of"]

CLUSTER = {
    "apiVersion": "kvpeer.io/v1alpha1",
    "kind": "PeerCacheCluster",
    "metadata": {"name": "chat"},
    "spec": {"images": {"agent": "agent:1", "payload": "agent:1"}},
}
POLICY = {
    "apiVersion": "kvpeer.io/v1alpha1",
    "kind": "P2PPolicy",
    "metadata": {"name": "chat"},
    "spec": {"clusterRef": {"name": "chat"}},
}
BASE_OF = {"cluster": CLUSTER, "policy": POLICY}
GONE = object()
"""In place of a value: the field is left out."""

BAD: list[tuple[str, str, Any, str, str]] = [
    # object, path to set, value, path in the refusal, words in the refusal
    ("cluster", "metadata.name", "a" * 41, "metadata.name", "at most 40 characters"),
    ("cluster", "metadata.name", "9lives", "metadata.name", "begin with a letter"),
    ("cluster", "metadata.name", "my.chat", "metadata.name", "no dots"),
    ("cluster", "spec", GONE, "", "'spec' is a required property"),
    ("cluster", "spec.images", GONE, "spec", "'images' is a required property"),
    ("cluster", "spec.images.agent", GONE, "spec.images", "'agent' is a required property"),
    ("cluster", "spec.images.payload", GONE, "spec.images", "'payload' is a required property"),
    ("cluster", "spec.images.agent", "", "spec.images.agent", "non-empty"),
    ("cluster", "spec.images.agent", "agent :1", "spec.images.agent", "does not match"),
    ("cluster", "spec.images.pullPolicy", "Sometimes", "spec.images.pullPolicy", "is not one of"),
    ("cluster", "spec.images.pullSecrets", "login", "spec.images.pullSecrets", "is not of type 'array'"),
    ("cluster", "spec.images.pullSecrets", ["Login"], "spec.images.pullSecrets[0]", "does not match"),
    ("cluster", "spec.images.pullSecrets", ["a", "a"], "spec.images.pullSecrets[1]", "Duplicate"),
    ("cluster", "spec.images.pullSecrets", list("abcdefghi"), "spec.images.pullSecrets", "too long"),
    ("cluster", "spec.pool.size", "64", "spec.pool.size", "does not match"),
    ("cluster", "spec.pool.size", "64GB", "spec.pool.size", "does not match"),
    ("cluster", "spec.pool.size", "0Gi", "spec.pool.size", "does not match"),
    ("cluster", "spec.pool.size", 64, "spec.pool.size", "is not of type 'string'"),
    ("cluster", "spec.pool.size", "63Mi", "spec.pool.size", "from 64Mi to 16Ti"),
    ("cluster", "spec.pool.size", "17Ti", "spec.pool.size", "from 64Mi to 16Ti"),
    ("cluster", "spec.pool.hugepages", "4Mi", "spec.pool.hugepages", "is not one of"),
    ("cluster", "spec.pool.sise", "64Gi", "spec.pool.sise", "unknown field"),
    ("cluster", "spec.agent.cpu", "0", "spec.agent.cpu", "does not match"),
    ("cluster", "spec.agent.cpu", "1.5", "spec.agent.cpu", "does not match"),
    ("cluster", "spec.agent.memoryOverhead", "256Mi", "spec.agent.memoryOverhead", "from 512Mi to 64Gi"),
    ("cluster", "spec.agent.logLevel", "trace", "spec.agent.logLevel", "is not one of"),
    ("cluster", "spec.directory.replicas", 0, "spec.directory.replicas", "less than the minimum of 1"),
    ("cluster", "spec.directory.replicas", 4, "spec.directory.replicas", "greater than the maximum of 3"),
    ("cluster", "spec.directory.virtualNodes", 8, "spec.directory.virtualNodes", "less than the minimum of 16"),
    ("cluster", "spec.directory.partitionRecordsMax", 1, "spec.directory.partitionRecordsMax", "less than the minimum"),
    ("cluster", "spec.transport.verify", "None", "spec.transport.verify", "is not one of"),
    ("cluster", "spec.transport.mode", "RDMA", "spec.transport.mode", "unknown field"),
    ("cluster", "spec.ports.control", 80, "spec.ports.control", "less than the minimum of 1024"),
    ("cluster", "spec.ports.metrics", 65536, "spec.ports.metrics", "greater than the maximum of 65535"),
    ("cluster", "spec.ports", {"control": 7947}, "spec.ports", "three different ports"),
    ("cluster", "spec.security.mode", "MutualTLS", "spec.security.mode", "is not one of"),
    ("cluster", "spec.security", {"mode": "Insecure", "secretName": "s"}, "spec.security", "remove it or set mode"),
    ("cluster", "spec.security.secretName", "Chat_Secret", "spec.security.secretName", "does not match"),
    (
        "cluster",
        "spec.engineSelector.matchLabels",
        {"app": "not a value"},
        "spec.engineSelector.matchLabels.app",
        "match",
    ),
    ("cluster", "spec.engineSelector.matchLabels", {str(i): "" for i in range(17)}, "spec.engineSelector", "too many"),
    ("policy", "spec.clusterRef", GONE, "spec", "'clusterRef' is a required property"),
    ("policy", "spec.clusterRef.name", "", "spec.clusterRef.name", "non-empty"),
    ("policy", "spec.clusterRef.name", "Chat", "spec.clusterRef.name", "does not match"),
    ("policy", "spec.clusterRef.namespace", "other", "spec.clusterRef.namespace", "unknown field"),
    ("policy", "spec.mode", True, "spec.mode", "is not one of"),  # what unquoted `On` is in YAML
    ("policy", "spec.mode", "shadow", "spec.mode", "is not one of"),
    ("policy", "spec.roles", [], "spec.roles", "non-empty"),
    ("policy", "spec.roles", ["Producer", "Producer"], "spec.roles[1]", "Duplicate"),
    ("policy", "spec.roles", ["Reader"], "spec.roles[0]", "is not one of"),
    ("policy", "spec.minCachedTokenDelta", 0, "spec.minCachedTokenDelta", "less than the minimum of 1"),
    ("policy", "spec.minCachedTokenDelta", "Auto", "spec.minCachedTokenDelta", "is not of type 'integer'"),
    ("policy", "spec.maxPullWait", "2", "spec.maxPullWait", "does not match"),
    ("policy", "spec.maxPullWait", "50ms", "spec.maxPullWait", "from 100ms to 60s"),
    ("policy", "spec.maxPullWait", "2m", "spec.maxPullWait", "from 100ms to 60s"),
]


def id_of(path: str, value: Any) -> str:
    """The same in every process, which the address of an object is not."""
    return f"no {path}" if value is GONE else f"{path}={value}"[:60]


def changed(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The object with the value at the path."""
    made = copy.deepcopy(base)
    *parents, last = path.split(".")
    at = made
    for name in parents:
        at = at.setdefault(name, {})
    if value is GONE:
        del at[last]
    else:
        at[last] = value
    return made
