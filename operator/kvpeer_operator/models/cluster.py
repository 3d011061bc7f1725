"""PeerCacheCluster: agents that share pages, one beside each engine of a namespace that opted in."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from kvpeer_operator.models.base import (
    API_VERSION,
    RULES,
    Condition,
    Labels,
    Metadata,
    Model,
    Size,
    rule,
    size_bounds,
)

__all__ = [
    "CLUSTER_NAME_CHARS_MAX",
    "AgentSettings",
    "DirectorySettings",
    "ImageSettings",
    "MemberCounts",
    "PeerCacheCluster",
    "PeerCacheClusterSpec",
    "PeerCacheClusterStatus",
    "PoolSettings",
    "PortSettings",
    "SecuritySettings",
    "TransportSettings",
]

CLUSTER_NAME_CHARS_MAX = 40
"""Objects of a cluster are named `<cluster>-kvpeer-<what>`; a Service's name has room for 63."""

CONDITIONS_MAX = 16
PULL_SECRETS_MAX = 8

_IMAGE = r"^[A-Za-z0-9][-A-Za-z0-9._/:@]*$"
_Image = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=_IMAGE)]
_ObjectName = Annotated[str, StringConstraints(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
_Port = Annotated[int, Field(ge=1024, le=65535)]


class ImageSettings(Model):
    """Container images."""

    agent: Annotated[_Image, Field(description="Image that runs `kvpeer agent`.")]
    payload: Annotated[
        _Image,
        Field(
            description="Image with the Python package for engines in /payload. An init container copies it into the "
            "engine's pod."
        ),
    ]
    pull_policy: Annotated[
        Literal["Always", "IfNotPresent", "Never"], Field(description="When the kubelet pulls these two images.")
    ] = "IfNotPresent"
    pull_secrets: Annotated[
        tuple[_ObjectName, ...],
        Field(
            max_length=PULL_SECRETS_MAX,
            json_schema_extra={"x-kubernetes-list-type": "set"},
            description="Secrets of this namespace to pull them with; added to those of the pod.",
        ),
    ] = ()


class AgentSettings(Model):
    """The agent's container beside each engine. It has the pod's quality of service: no requests in a BestEffort pod,
    requests equal to limits in a Guaranteed one."""

    cpu: Annotated[
        str,
        StringConstraints(pattern=r"^([1-9][0-9]?|[1-9][0-9]{1,4}m)$", max_length=6),
        Field(description="CPU request, in cores or millicores. Give whole cores where the kubelet pins CPUs."),
    ] = "1"
    memory_overhead: Annotated[
        Size,
        Field(
            json_schema_extra=size_bounds("512Mi", "64Gi"),
            description="Memory beside the pool: the agent itself, its share of the directory, and the 320Mi that it "
            "keeps free. The container's limit is this plus pool.size.",
        ),
    ] = "1Gi"
    log_level: Annotated[
        Literal["Debug", "Info", "Warning", "Error"], Field(description="Least severity that the agent logs.")
    ] = "Info"


class PoolSettings(Model):
    """The shared memory of each agent that holds pages."""

    size: Annotated[
        Size, Field(json_schema_extra=size_bounds("64Mi", "16Ti"), description="Memory for pages, for each engine pod.")
    ] = "4Gi"
    hugepages: Annotated[
        Literal["None", "2Mi", "1Gi"],
        Field(description="Kernel pages behind the pool. Others than None are requested from the node."),
    ] = "None"


class DirectorySettings(Model):
    """The distributed directory. All agents must agree, so it is fixed when the cluster is made."""

    replicas: Annotated[int, Field(ge=1, le=3, description="Owners of each record.")] = 2
    virtual_nodes: Annotated[int, Field(ge=16, le=1024, description="Points of each agent on the hash ring.")] = 160
    partition_records_max: Annotated[
        int, Field(ge=64, le=1 << 20, description="Records in one of the 4096 partitions; then producers share them.")
    ] = 16384


class TransportSettings(Model):
    """How page bytes move between agents."""

    verify: Annotated[
        Literal["Full", "Generation"],
        Field(
            description="Proof of a page's bytes. Full: its checksum too. Generation: slot headers alone, which trusts "
            "every engine of the producer's pod and the network between."
        ),
    ] = "Full"


class PortSettings(Model):
    """Where each agent listens, at its pod's address."""

    control: Annotated[_Port, Field(description="Control channel between agents (mutual TLS).")] = 7946
    data: Annotated[_Port, Field(description="Page bytes between agents.")] = 7947
    metrics: Annotated[_Port, Field(description="HTTP: /metrics and /healthz.")] = 7948


class SecuritySettings(Model):
    """How agents prove to each other that they belong to the cluster."""

    mode: Annotated[
        Literal["SharedSecret", "Insecure"],
        Field(
            description="SharedSecret: certificates are derived from the cluster's secret. Insecure: no proof at all; "
            "whoever reaches an agent can read and publish pages. For tests."
        ),
    ] = "SharedSecret"
    secret_name: Annotated[
        str,
        StringConstraints(max_length=253, pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"),
        Field(
            description="Your own Secret of this namespace with the key `secret` (from `openssl rand -hex 32`). Empty: "
            "the operator makes one. It is mounted in agents only; whoever has it can be any agent.",
        ),
    ] = ""


class PeerCacheClusterSpec(Model):
    """What the cluster should be."""

    engine_selector: Annotated[
        Labels, Field(description="Pods that may join, beside the label kvpeer.io/cluster that every one needs.")
    ] = Labels()
    images: Annotated[ImageSettings, Field(description="Container images.")]
    agent: Annotated[AgentSettings, Field(description="The agent's container beside each engine.")] = AgentSettings()
    pool: Annotated[PoolSettings, Field(description="The shared memory of each agent that holds pages.")] = (
        PoolSettings()
    )
    directory: Annotated[
        DirectorySettings,
        Field(
            json_schema_extra={
                RULES: [
                    rule(
                        "self == oldSelf",
                        "cannot be changed, because all agents must agree: make a new PeerCacheCluster and move the "
                        "pods' label to it",
                    )
                ]
            },
            description="The distributed directory. Fixed when the cluster is made.",
        ),
    ] = DirectorySettings()
    transport: Annotated[TransportSettings, Field(description="How page bytes move between agents.")] = (
        TransportSettings()
    )
    ports: Annotated[
        PortSettings,
        Field(
            json_schema_extra={
                RULES: [
                    rule(
                        "self.control != self.data && self.control != self.metrics && self.data != self.metrics",
                        "control, data and metrics must be three different ports",
                    )
                ]
            },
            description="Where each agent listens, at its pod's address.",
        ),
    ] = PortSettings()
    security: Annotated[
        SecuritySettings,
        Field(
            json_schema_extra={
                RULES: [
                    rule(
                        "self.mode == 'SharedSecret' || self.secretName == ''",
                        "secretName has no meaning with mode Insecure: remove it or set mode SharedSecret",
                    ),
                ]
            },
            description="How agents prove that they belong to the cluster.",
        ),
    ] = SecuritySettings()


class MemberCounts(Model):
    """Pods of the cluster."""

    expected: Annotated[int, Field(ge=0, description="Pods with an agent.")] = 0
    ready: Annotated[int, Field(ge=0, description="Of these, pods whose agent's container runs.")] = 0
    outdated: Annotated[int, Field(ge=0, description="Of these, pods that run with earlier settings.")] = 0
    skipped: Annotated[int, Field(ge=0, description="Pods that opted in and run without an agent.")] = 0


class PeerCacheClusterStatus(Model):
    """What the cluster is."""

    observed_generation: Annotated[int, Field(ge=0, description="Generation of the spec that this is about.")] = 0
    members: Annotated[MemberCounts, Field(description="Pods of the cluster.")] = MemberCounts()
    tried_images: Annotated[
        str, Field(max_length=64, description="Digest of the images that a pod of this namespace has run.")
    ] = ""
    conditions: Annotated[
        tuple[Condition, ...],
        Field(
            max_length=CONDITIONS_MAX,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
            description="Ready, ImagesReady, SecretReady, UpToDate.",
        ),
    ] = ()


class PeerCacheCluster(Model):
    """Engines that share KV-cache pages: which pods, with which agents, pools and security."""

    api_version: Literal["kvpeer.io/v1alpha1"] = API_VERSION
    kind: Literal["PeerCacheCluster"] = "PeerCacheCluster"
    metadata: Metadata
    spec: Annotated[PeerCacheClusterSpec, Field(description="What the cluster should be.")]
    status: Annotated[PeerCacheClusterStatus, Field(description="What the cluster is.")] = PeerCacheClusterStatus()
