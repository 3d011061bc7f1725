"""The closed list of reasons why a pod is left alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Skip", "SkipReason"]


class SkipReason(str, Enum):
    """Values stand in the annotation kvpeer.io/skipped and in metrics."""

    NO_CLUSTER = "no-cluster"
    """There is no PeerCacheCluster of the name in the pod's label."""
    NOT_SELECTED = "not-selected"
    """The cluster's engineSelector does not match the pod."""
    IMAGES_NOT_READY = "images-not-ready"
    """No pod of this namespace has run both images yet; a broken image would keep the engine from starting."""
    POD_SECURITY = "pod-security"
    """The namespace's pod security refused the agent."""
    QUOTA = "quota"
    """The namespace's quota or limits have no room for the agent."""
    UNKNOWN_ENGINE = "unknown-engine"
    """No container is known to run vLLM or SGLang."""
    SEVERAL_ENGINES = "several-engines"
    """More than one container could be the engine."""
    COMMAND_OVERRIDE = "command-override"
    """The container's command is nothing that flags can safely be added to."""
    ENVIRONMENT_OVERRIDE = "environment-override"
    """The container sets a variable that the agent needs to itself."""
    CONFLICTING_KV_TRANSFER_CONFIG = "conflicting-kv-transfer-config"
    """vLLM has another KV connector."""
    CONFLICTING_HICACHE_BACKEND = "conflicting-hicache-backend"
    """SGLang has another storage backend."""
    HIERARCHICAL_CACHE_OFF = "hierarchical-cache-off"
    """SGLang runs without HiCache, whose host memory only the pod's owner can size."""
    UNSUPPORTED_OPTION = "unsupported-option"
    """The engine has an option with which it would refuse to share, and not start."""
    UNKNOWN_VERSION = "unknown-version"
    """Nothing tells which version of the engine this is."""
    UNSUPPORTED_VERSION = "unsupported-version"
    """The adapters do not know this version of the engine."""
    HOST_NETWORK_PORT_CLASH = "host-network-port-clash"
    """On the host's network two agents of one node would want the same ports."""
    PORT_CLASH = "port-clash"
    """A container of the pod has one of the agent's ports."""
    NAME_CLASH = "name-clash"
    """The pod has a container or volume with one of the agent's names."""
    POD_LEVEL_RESOURCES = "pod-level-resources"
    """The pod has one budget for all containers, in which the pool has no place."""
    HUGEPAGES_IN_BEST_EFFORT = "hugepages-in-best-effort"
    """Huge pages need requests, which would change the pod's quality of service."""
    POLICY_OFF = "policy-off"
    """The policy is Off, and an SGLang engine cannot be told to publish alone."""
    POLICY_NOT_FOR_ENGINE = "policy-not-for-engine"
    """The policy asks for what this engine's adapter cannot do."""


@dataclass(frozen=True, slots=True)
class Skip:
    """A pod is left alone. `message` says what to do about it."""

    reason: SkipReason
    message: str
