"""The agent's settings: what there is to set, with meanings, defaults and limits.

Groups of frozen values. A key of the file is `<group>.<key>`; every key is also an environment variable
KVPEER_<GROUP>_<KEY>. Sizes and durations are written with their unit ("64Mi", "2s"), so keys carry none; in code they
are plain numbers, and the names of attributes end in `_bytes` and `_s`. `kvpeer.agent.config.source` reads them;
docs/configuration.md is generated from this file.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from kvpeer.core import membership, slots
from kvpeer.core.topology import RANKS_MAX

__all__ = [
    "AgentConfig",
    "AgentSettings",
    "DirectorySettings",
    "DiskSettings",
    "LimitSettings",
    "MembershipSettings",
    "MetricsSettings",
    "PoolSettings",
    "SecuritySettings",
    "TopologySettings",
    "TransportSettings",
]

SIZE = {"unit": "size"}
DURATION = {"unit": "duration"}
SECRET = {"secret": True}

_MiB = 1 << 20
_GiB = 1 << 30

_MEMBERSHIP = membership.MembershipSettings()
_SLOTS = slots.SlotSettings(extent_bytes=0, n_extents=0)

HUGEPAGE_BYTES = {"none": 0, "2Mi": 2 * _MiB, "1Gi": _GiB}

EXTENTS_MAX = 1 << 18
"""Slot ids are 32 bits: the extent's number and 14 bits for the slot in it."""

SEGMENTS_MAX = 512
"""Each is an open file, and a process often has 1,024 of them."""

SOCKET_PATH_BYTES_MAX = 107
"""Room in sockaddr_un, without the closing zero."""


def _duration(low: float, high: float, description: str) -> Meta:
    return Meta(ge=low, le=high, description=description, extra=DURATION)


def _size(low: int, high: int, description: str) -> Meta:
    return Meta(ge=low, le=high, description=description, extra=SIZE)


def _number(low: int, high: int, description: str) -> Meta:
    return Meta(ge=low, le=high, description=description)


def _text(description: str, extra: dict[str, Any] | None = None) -> Meta:
    return Meta(max_length=4096, description=description, extra=extra)


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all groups."""


class AgentSettings(_Group, frozen=True, kw_only=True):
    """Who the agent is and where it listens."""

    name: Annotated[
        str, Meta(max_length=253, description="Name for people, in logs and status. Empty: the host's name.")
    ] = ""
    cluster: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$",
            description="Only agents of one cluster talk to each other. Part of every certificate.",
        ),
    ] = "default"
    runtime_dir: Annotated[
        str,
        _text(
            "Folder (mode 0700) of socket, lock, address files. Empty: $XDG_RUNTIME_DIR/kvpeer or /tmp/kvpeer-<uid>."
        ),
    ] = ""
    socket: Annotated[str, _text("Unix socket for engines. Empty: agent.sock in the runtime folder.")] = ""
    host: Annotated[
        str,
        _text(
            "Numeric address to listen on and to be known by; never a wildcard. Empty: with seeds, the address of "
            "this host on the route to them; without seeds 127.0.0.1, because nobody elsewhere can know of this agent."
        ),
    ] = ""
    control_port: Annotated[int, _number(0, 65535, "Port of the control channel. 0: any free one.")] = 0
    data_port: Annotated[int, _number(0, 65535, "Port of the tcp data server. 0: any free one.")] = 0
    advertise_host: Annotated[
        str,
        _text(
            "Numeric address that peers are told, where it is not agent.host: behind address translation or a proxy. "
            "Empty: agent.host."
        ),
    ] = ""
    advertise_control_port: Annotated[
        int, _number(0, 65535, "Port of the control channel that peers are told. 0: the one that is listened on.")
    ] = 0
    advertise_data_port: Annotated[
        int, _number(0, 65535, "Port of the data server that peers are told. 0: the one that is listened on.")
    ] = 0
    seeds: Annotated[
        tuple[str, ...],
        Meta(
            max_length=64,
            description="Agents to ask for members: `address:port`, `name:port` or `name` (all its addresses). "
            "Without a port, the own control_port is taken. Unreachable seeds never delay an engine.",
        ),
    ] = ()
    linger_s: Annotated[
        float, _duration(0, 86400, "An embedded agent goes on for this long after its last client left.")
    ] = field(default=600.0, name="linger")
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severity that is logged.")
    ] = "info"


class PoolSettings(_Group, frozen=True, kw_only=True):
    """The shared memory that holds pages."""

    size_bytes: Annotated[
        int,
        _size(_MiB, 1 << 44, "Memory for pages, rounded down to whole extents. Counts towards the container's limit."),
    ] = field(default=4 * _GiB, name="size")
    extent_bytes: Annotated[
        int, _size(_MiB, 16 * _GiB, "The pool is touched, and given to a slot size, in steps of this size.")
    ] = field(default=64 * _MiB, name="extent_size")
    hugepages: Annotated[
        Literal["none", "2Mi", "1Gi"],
        Meta(description="Pages of the kernel behind the pool. Others than none must be reserved."),
    ] = "none"
    eviction: Annotated[Literal["lru"], Meta(description="Which pages go first when the pool is full.")] = "lru"
    lease_ttl_s: Annotated[
        float, _duration(0, 10, "A withdrawn slot is not reused for this long, so that readers rarely find it gone.")
    ] = field(default=_SLOTS.lease_ttl_s, name="lease_ttl")
    reserve_deadline_s: Annotated[
        float, _duration(0.1, 600, "All parts of a reserved page must be written by then, or it is freed.")
    ] = field(default=_SLOTS.reserve_deadline_s, name="reserve_deadline")
    pin_ttl_s: Annotated[float, _duration(0.1, 3600, "A fetched page stays pinned for at most this long.")] = field(
        default=_SLOTS.pin_ttl_s, name="pin_ttl"
    )
    death_grace_s: Annotated[
        float,
        _duration(0, 60, "Slots of an engine that died are not reused for this long: a device copy may still run."),
    ] = field(default=_SLOTS.death_grace_s, name="death_grace")
    corrupt_hold_s: Annotated[
        float,
        _duration(
            0,
            86400,
            "A slot whose bytes were found wrong rests for this long; ten times longer each time it happens again.",
        ),
    ] = field(default=_SLOTS.corrupt_hold_s, name="corrupt_hold")


class DiskSettings(_Group, frozen=True, kw_only=True):
    """The disk below the pool: pages are written through to it, and come back from it after the pool evicted them."""

    path: Annotated[
        str,
        _text(
            "Folder for pages, of this agent alone; its parent must be there. Empty: no disk tier. It may be lost or "
            "emptied at any time."
        ),
    ] = ""
    size_bytes: Annotated[
        int, _size(_MiB, 1 << 46, "Room for pages, rounded down to whole segments. The index takes 200 bytes a page.")
    ] = field(default=64 * _GiB, name="size")
    segment_bytes: Annotated[
        int,
        _size(
            _MiB,
            16 * _GiB,
            "Files are reserved, and given to a page size, in steps of this size; at most 512 of them. Another size "
            "starts anew.",
        ),
    ] = field(default=256 * _MiB, name="segment_size")
    read_threads: Annotated[int, _number(1, 64, "Pages read from the disk at once.")] = 4
    slow_after_s: Annotated[
        float, _duration(0.1, 600, "A disk that takes this long for one operation is given up for a while.")
    ] = field(default=30.0, name="slow_after")


class DirectorySettings(_Group, frozen=True, kw_only=True):
    """This agent's share of the distributed directory. All agents of a cluster must agree on replicas and virtual
    nodes."""

    replicas: Annotated[int, _number(1, 3, "Owners of each record.")] = 2
    virtual_nodes: Annotated[int, _number(16, 1024, "Points of each agent on the hash ring.")] = 160
    partition_records_max: Annotated[
        int, _number(64, 1 << 20, "Records in one of the 4096 partitions; then producers share them, newest first.")
    ] = 16384
    anti_entropy_interval_s: Annotated[
        float, _duration(0.1, 3600, "Between two comparisons of digests between a producer and an owner.")
    ] = field(default=10.0, name="anti_entropy_interval")


class MembershipSettings(_Group, frozen=True, kw_only=True):
    """How fast an agent that ended is noticed. The defaults fit 64 agents: killed, 2 s; frozen, 5 s."""

    probe_interval_s: Annotated[float, _duration(0.01, 60, "Between two probes by this agent.")] = field(
        default=_MEMBERSHIP.probe_interval_s, name="probe_interval"
    )
    probe_timeout_s: Annotated[float, _duration(0.01, 60, "For the answer to a direct probe.")] = field(
        default=_MEMBERSHIP.probe_timeout_s, name="probe_timeout"
    )
    indirect_timeout_s: Annotated[float, _duration(0.01, 60, "For the answer through other members, after that.")] = (
        field(default=_MEMBERSHIP.indirect_timeout_s, name="indirect_timeout")
    )
    relays: Annotated[int, _number(1, 16, "Members that are asked to probe on our behalf.")] = _MEMBERSHIP.relays
    suspicion_s: Annotated[float, _duration(0.01, 600, "From suspect to dead, times log10 of the members.")] = field(
        default=_MEMBERSHIP.suspicion_s, name="suspicion"
    )
    verify_timeout_s: Annotated[float, _duration(0.01, 60, "For the probes that check a broken link.")] = field(
        default=_MEMBERSHIP.verify_timeout_s, name="verify_timeout"
    )
    verified_suspicion_s: Annotated[
        float, _duration(0.01, 600, "From suspect to dead when a link broke and no probe was answered.")
    ] = field(default=_MEMBERSHIP.verified_suspicion_s, name="verified_suspicion")
    gossip_fanout: Annotated[int, _number(1, 16, "Members that news is forwarded to at once.")] = (
        _MEMBERSHIP.gossip_fanout
    )
    retransmit_factor: Annotated[
        int, _number(1, 16, "Times log2 of the members: how often each member repeats a rumour.")
    ] = _MEMBERSHIP.retransmit_factor
    dead_probe_interval_s: Annotated[
        float, _duration(0.1, 600, "Between two probes of members that are believed dead.")
    ] = field(default=_MEMBERSHIP.dead_probe_interval_s, name="dead_probe_interval")
    forget_s: Annotated[float, _duration(10, 86400, "How long a dead member is still probed and shown.")] = field(
        default=_MEMBERSHIP.forget_s, name="forget"
    )
    sync_interval_s: Annotated[
        float, _duration(0.1, 3600, "Between two pushes of the whole view to a random member.")
    ] = field(default=_MEMBERSHIP.sync_interval_s, name="sync_interval")
    seed_interval_s: Annotated[float, _duration(0.1, 3600, "Between two contacts with a seed.")] = field(
        default=_MEMBERSHIP.seed_interval_s, name="seed_interval"
    )
    stall_s: Annotated[
        float, _duration(0.05, 60, "An agent that was not run for this long judges nobody by that time.")
    ] = field(default=_MEMBERSHIP.stall_s, name="stall")


class TransportSettings(_Group, frozen=True, kw_only=True):
    """How page bytes move between agents."""

    verify: Annotated[
        Literal["full", "generation"],
        Meta(
            description="Proof of a page's bytes. full: its checksum too. generation: slot headers alone; trusts every "
            "engine of the producer's pod."
        ),
    ] = "full"
    rdma: Annotated[
        Literal["auto", "require", "off"],
        Meta(
            description="auto: by RDMA from and to peers that have it, else by tcp. require: by RDMA alone; an agent "
            "without it does not start. topology.devices says by which device."
        ),
    ] = "auto"
    fetch_threads: Annotated[
        int, _number(1, 64, "Native threads that pull from peers; one peer never has all of them.")
    ] = 4
    connections_per_peer: Annotated[int, _number(1, 16, "Data connections to one peer.")] = 2
    server_connections_max: Annotated[int, _number(1, 65536, "Data connections that this agent serves.")] = 1024
    server_pages_max: Annotated[int, _number(1, 65536, "Pages in one request to the data server.")] = 4096
    idle_timeout_s: Annotated[
        float, _duration(1, 86400, "A data connection without a request for this long is closed.")
    ] = field(default=60.0, name="idle_timeout")
    io_timeout_s: Annotated[
        float, _duration(0.1, 600, "A reader that takes this long for one piece of data is dropped.")
    ] = field(default=5.0, name="io_timeout")
    handshake_timeout_s: Annotated[
        float, _duration(0.1, 60, "For a new data connection to present its capability.")
    ] = field(default=2.0, name="handshake_timeout")


class TopologySettings(_Group, frozen=True, kw_only=True):
    """Which NICs, memory and CPUs the agent uses. `kvpeer doctor` shows the plan; docs/topology.md explains it."""

    numa: Annotated[
        Literal["auto", "none"],
        Meta(
            description="auto: the pool's memory and the agent's threads go to the NUMA nodes of GPUs and NICs. none: "
            "wherever the kernel puts them."
        ),
    ] = "auto"
    devices: Annotated[
        tuple[str, ...],
        Meta(max_length=64, description="RDMA devices to use, such as mlx5_0. Empty: all that are fit."),
    ] = ()
    ranks: Annotated[
        int, _number(0, RANKS_MAX, "Ranks of the engine that share this pool. 0: one a GPU, at least one.")
    ] = 0
    gpus: Annotated[
        tuple[str, ...],
        Meta(
            max_length=RANKS_MAX,
            description="PCI addresses of the ranks' GPUs, in order, where the agent's container has no GPU of its own "
            "to see. Empty: those that it sees.",
        ),
    ] = ()


class SecuritySettings(_Group, frozen=True, kw_only=True):
    """How agents prove that they belong to the cluster."""

    mode: Annotated[
        Literal["shared_secret", "mutual_tls", "insecure"],
        Meta(
            description="shared_secret: certificates are derived from a secret. mutual_tls: certificates from files. "
            "insecure: no proof at all, for tests."
        ),
    ] = "shared_secret"
    secret: Annotated[
        str,
        _text("The cluster's secret: 32 to 256 hexadecimal digits, for example from `openssl rand -hex 32`.", SECRET),
    ] = ""
    secret_file: Annotated[
        str,
        _text("File with the secret. With neither, one is generated in the user's own folder (mode 0700)."),
    ] = ""
    cert_file: Annotated[
        str, _text("mutual_tls: this agent's certificate (PEM); its names must include the cluster.")
    ] = ""
    key_file: Annotated[str, _text("mutual_tls: its private key (PEM), readable by its owner only.")] = ""
    ca_file: Annotated[str, _text("mutual_tls: certificates (PEM) of the authorities that sign agents.")] = ""

    def __repr__(self) -> str:
        masked = msgspec.structs.replace(self, secret="***" if self.secret else "")
        pairs = ", ".join(f"{key}={value!r}" for key, value in msgspec.structs.asdict(masked).items())
        return f"SecuritySettings({pairs})"


class LimitSettings(_Group, frozen=True, kw_only=True):
    """Bounds on what others can make this agent hold."""

    clients_max: Annotated[int, _number(1, 4096, "Engine processes connected at once.")] = 64
    batch_pages_max: Annotated[int, _number(1, 65536, "Pages in one request of an engine.")] = 4096
    peer_links_max: Annotated[int, _number(1, 16384, "Links that other agents hold to this one.")] = 2048
    peer_requests_max: Annotated[int, _number(1, 4096, "Requests under way on one link, in each direction.")] = 256
    peer_notices_max: Annotated[
        int, _number(1, 65536, "Notices waiting for one link; further ones are dropped and counted.")
    ] = 1024


class MetricsSettings(_Group, frozen=True, kw_only=True):
    """The HTTP endpoint with /metrics and /healthz."""

    enabled: Annotated[bool, Meta(description="Whether the endpoint runs.")] = True
    host: Annotated[str, _text("Numeric address to listen on. Empty: agent.host.")] = ""
    port: Annotated[int, _number(0, 65535, "Port to listen on. 0: any free one; it is logged.")] = 0


class AgentConfig(_Group, frozen=True, kw_only=True):
    """All settings of one agent. Values that `load` returns are complete: no field is left empty to be
    guessed."""

    agent: AgentSettings = AgentSettings()
    pool: PoolSettings = PoolSettings()
    disk: DiskSettings = DiskSettings()
    directory: DirectorySettings = DirectorySettings()
    membership: MembershipSettings = MembershipSettings()
    transport: TransportSettings = TransportSettings()
    topology: TopologySettings = TopologySettings()
    security: SecuritySettings = SecuritySettings()
    limits: LimitSettings = LimitSettings()
    metrics: MetricsSettings = MetricsSettings()
