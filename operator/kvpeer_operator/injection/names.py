"""Names that pods and the operator agree on. Changing one orphans what runs."""

from __future__ import annotations

__all__ = [
    "AGENT_CONTAINER",
    "BECAUSE_ANNOTATION",
    "CLUSTER_LABEL",
    "CONTAINER_ANNOTATION",
    "ENGINE_ANNOTATION",
    "INJECTED_ANNOTATION",
    "MEMBER_LABEL",
    "PAYLOAD_CONTAINER",
    "PAYLOAD_FOLDER",
    "PAYLOAD_VOLUME",
    "POLICY_ANNOTATION",
    "RUN_FOLDER",
    "RUN_VOLUME",
    "SECRET_FOLDER",
    "SECRET_KEY",
    "SECRET_VOLUME",
    "SETTINGS_ANNOTATION",
    "SKIPPED_ANNOTATION",
    "SOCKET",
    "TOLD_ANNOTATION",
    "VERSION_ANNOTATION",
    "secret_name",
    "service_name",
]

CLUSTER_LABEL = "kvpeer.io/cluster"
"""Label by which a pod opts in; its value is the PeerCacheCluster."""

MEMBER_LABEL = "kvpeer.io/member"
"""Label that a pod with an agent gets; the Service of all agents selects by it. Same value."""

ENGINE_ANNOTATION = "kvpeer.io/engine"
"""vllm or sglang, where the container's image and command do not tell."""
CONTAINER_ANNOTATION = "kvpeer.io/container"
"""The engine's container, where there is more than one."""
VERSION_ANNOTATION = "kvpeer.io/engine-version"
"""The engine's version, where the image's tag does not tell."""

INJECTED_ANNOTATION = "kvpeer.io/injected"
SKIPPED_ANNOTATION = "kvpeer.io/skipped"
BECAUSE_ANNOTATION = "kvpeer.io/skipped-because"
SETTINGS_ANNOTATION = "kvpeer.io/settings"
"""Digest of the cluster's settings that the pod was made with."""
TOLD_ANNOTATION = "kvpeer.io/told"
"""The engine's variables that a policy changes while it runs, with commas between: those that the pod did not set."""
POLICY_ANNOTATION = "kvpeer.io/policy"
"""Name of the policy that the pod was made with; empty for none."""

AGENT_CONTAINER = "kvpeer-agent"
PAYLOAD_CONTAINER = "kvpeer-payload"

RUN_VOLUME = "kvpeer-run"
RUN_FOLDER = "/run/kvpeer"
SOCKET = f"{RUN_FOLDER}/agent.sock"

PAYLOAD_VOLUME = "kvpeer-payload"
PAYLOAD_FOLDER = "/opt/kvpeer"

SECRET_VOLUME = "kvpeer-secret"  # noqa: S105 - a volume's name
SECRET_FOLDER = "/etc/kvpeer/secret"  # noqa: S105 - a folder
SECRET_KEY = "secret"  # noqa: S105 - a key's name


def service_name(cluster: str) -> str:
    """The headless Service that names all agents of a cluster."""
    return f"{cluster}-kvpeer-agents"


def secret_name(cluster: str) -> str:
    """The Secret that the operator makes for a cluster."""
    return f"{cluster}-kvpeer-secret"
