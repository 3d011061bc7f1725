"""P2PPolicy: when the engines of some pods pull pages from peers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from kvpeer_operator.models.base import (
    API_VERSION,
    RULES,
    Condition,
    Duration,
    Labels,
    Metadata,
    Model,
    duration_bounds,
    rule,
)

__all__ = ["ClusterReference", "P2PPolicy", "P2PPolicySpec", "P2PPolicyStatus"]

CONDITIONS_MAX = 16


class ClusterReference(Model):
    """A PeerCacheCluster of the same namespace."""

    name: Annotated[
        str,
        StringConstraints(min_length=1, max_length=40, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$"),
        Field(description="Its name."),
    ]


class P2PPolicySpec(Model):
    """What the engines should do. A change reaches running engines within seconds, without a restart."""

    cluster_ref: Annotated[
        ClusterReference,
        Field(
            json_schema_extra={
                RULES: [
                    rule("self == oldSelf", "cannot be changed: make a new P2PPolicy for the other PeerCacheCluster")
                ]
            },
            description="The cluster whose pods this is about.",
        ),
    ]
    selector: Annotated[
        Labels, Field(description="Pods of the cluster that this is about. Where policies overlap, the oldest governs.")
    ] = Labels()
    mode: Annotated[
        Literal["Off", "Shadow", "On"],
        Field(
            description="On: pull pages from peers. Shadow: decide and count what pulls would have saved, and compute. "
            "Off: publish, and reload the own pool only; new SGLang pods are left alone."
        ),
    ] = "Off"
    roles: Annotated[
        tuple[Literal["Producer", "Consumer"], ...],
        Field(
            min_length=1,
            max_length=2,
            json_schema_extra={"x-kubernetes-list-type": "set"},
            description="Producer: publishes its pages. Consumer: pulls those of peers. SGLang engines must be both.",
        ),
    ] = ("Producer", "Consumer")
    min_cached_token_delta: Annotated[
        int,
        Field(
            ge=1,
            le=1 << 20,
            description="Fewer tokens than this are computed rather than pulled (vLLM; SGLang has its own threshold).",
        ),
    ] = 512
    max_pull_wait: Annotated[
        Duration,
        Field(
            json_schema_extra=duration_bounds("100ms", "60s"),
            description="A request waits at most this long for its pages, then what is missing is computed.",
        ),
    ] = "2s"


class P2PPolicyStatus(Model):
    """What the policy does."""

    observed_generation: Annotated[int, Field(ge=0, description="Generation of the spec that this is about.")] = 0
    effective_mode: Annotated[
        Literal["Off", "Shadow", "On"],
        Field(description="What its engines do: Off as long as the policy governs nothing."),
    ] = "Off"
    pods: Annotated[int, Field(ge=0, description="Pods that it governs.")] = 0
    outdated_pods: Annotated[
        int,
        Field(ge=0, description="Of these, pods with an earlier policy, because their agents do not answer."),
    ] = 0
    conditions: Annotated[
        tuple[Condition, ...],
        Field(
            max_length=CONDITIONS_MAX,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
            description="Ready, UpToDate.",
        ),
    ] = ()


class P2PPolicy(Model):
    """When the engines of some pods pull pages from peers."""

    api_version: Literal["kvpeer.io/v1alpha1"] = API_VERSION
    kind: Literal["P2PPolicy"] = "P2PPolicy"
    metadata: Metadata
    spec: Annotated[P2PPolicySpec, Field(description="What the engines should do.")]
    status: Annotated[P2PPolicyStatus, Field(description="What the policy does.")] = P2PPolicyStatus()
