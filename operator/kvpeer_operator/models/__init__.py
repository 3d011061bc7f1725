"""The custom resources of kvpeer.io/v1alpha1 as pydantic models: what the manifests in crds/ are generated from.

A field is here when something honours it today. Objects that the API server admitted can be read with
`PeerCacheCluster.model_validate(object)`.
"""

from __future__ import annotations

from kvpeer_operator.models.base import API_GROUP, API_VERSION, Condition, Labels
from kvpeer_operator.models.cluster import (
    AgentSettings,
    DirectorySettings,
    ImageSettings,
    MemberCounts,
    PeerCacheCluster,
    PeerCacheClusterSpec,
    PeerCacheClusterStatus,
    PoolSettings,
    PortSettings,
    SecuritySettings,
    TransportSettings,
)
from kvpeer_operator.models.policy import ClusterReference, P2PPolicy, P2PPolicySpec, P2PPolicyStatus

__all__ = [
    "API_GROUP",
    "API_VERSION",
    "AgentSettings",
    "ClusterReference",
    "Condition",
    "DirectorySettings",
    "ImageSettings",
    "Labels",
    "MemberCounts",
    "P2PPolicy",
    "P2PPolicySpec",
    "P2PPolicyStatus",
    "PeerCacheCluster",
    "PeerCacheClusterSpec",
    "PeerCacheClusterStatus",
    "PoolSettings",
    "PortSettings",
    "SecuritySettings",
    "TransportSettings",
]
