"""A machine as the planner sees it: NUMA nodes, RDMA devices, GPUs, and what this container may use of them.

Plain values. Nothing here reads anything: `kvpeer.agent.sysfs` fills them in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv6Address

__all__ = [
    "NODE_UNKNOWN",
    "Gid",
    "GidKind",
    "Gpu",
    "LinkLayer",
    "Machine",
    "Node",
    "Port",
    "PortState",
    "RdmaDevice",
    "natural",
    "number_list",
    "pci_order",
]

NODE_UNKNOWN = -1
"""What the kernel says of a device that it cannot place (virtual machines often tell it nothing)."""


class LinkLayer(str, Enum):
    """What a port speaks."""

    INFINIBAND = "InfiniBand"
    ETHERNET = "Ethernet"
    OTHER = "other"
    """Neither: EFA, or a driver that we do not know."""


class PortState(str, Enum):
    """What the kernel says of a port, as far as it matters here."""

    ACTIVE = "active"
    INITIALIZING = "initializing"
    """The link is there; on InfiniBand the subnet manager has not configured the port."""
    DOWN = "down"


class GidKind(str, Enum):
    """How packets with this source address look on the wire."""

    INFINIBAND = "InfiniBand"
    ROCE_V2 = "RoCE v2"
    """On UDP."""
    ROCE_V1 = "RoCE v1"
    """Straight on Ethernet: ends at the next router."""


@dataclass(frozen=True, slots=True)
class Gid:
    """An entry of a port's table of addresses. `netdev`: the network interface behind it, empty if none is known."""

    index: int
    address: IPv6Address
    kind: GidKind
    netdev: str = ""

    def __str__(self) -> str:
        mapped = self.address.ipv4_mapped
        return f"::ffff:{mapped}" if mapped else str(self.address)


@dataclass(frozen=True, slots=True)
class Port:
    """A port of a device. `mtu_bytes`: that of its network interface, 0 where there is none in sight."""

    number: int
    state: PortState
    link_layer: LinkLayer
    rate_gbps: float
    gids: tuple[Gid, ...] = ()
    mtu_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """A NIC with verbs. `pci_path`: from the root bus to the device itself, empty for one in software.

    `verbs_file`: its name under /dev/infiniband. `is_visible`: that file is there, so that this container was given the
    device (sysfs shows every container all of them). `is_openable`: the kernel lets this process open it.
    """

    name: str
    driver: str
    pci_path: tuple[str, ...]
    node: int
    verbs_file: str
    is_visible: bool
    is_openable: bool
    is_virtual_function: bool
    ports: tuple[Port, ...]


@dataclass(frozen=True, slots=True)
class Gpu:
    """An accelerator by its PCI address. `is_visible`: its device file is in this container."""

    address: str
    pci_path: tuple[str, ...]
    node: int
    is_visible: bool


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node. `distances`: by node number. Memory of GPUs may be nodes too (GB200): those have no CPUs."""

    number: int
    cpus: frozenset[int]
    memory_bytes: int
    distances: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Machine:
    """All of it. `cpus_allowed`, `nodes_allowed`: the container's cpuset. `netdevs`: the network interfaces of this
    network namespace. `unread`: files that should be there and could not be read or understood."""

    nodes: tuple[Node, ...]
    devices: tuple[RdmaDevice, ...]
    gpus: tuple[Gpu, ...]
    cpus_allowed: frozenset[int]
    nodes_allowed: frozenset[int]
    netdevs: frozenset[str] = frozenset()
    unread: tuple[str, ...] = ()

    @property
    def host_nodes(self) -> tuple[Node, ...]:
        """The nodes that are memory of CPUs, in order."""
        return tuple(node for node in self.nodes if node.cpus and node.memory_bytes)

    def distance(self, a: int, b: int) -> int:
        """The kernel's distance of two nodes; 10 within one, and for what it does not say a value above any."""
        if a == b:
            return 10
        by_number = {node.number: idx for idx, node in enumerate(self.nodes)}
        if a not in by_number or b not in by_number:
            return 255
        distances = self.nodes[by_number[a]].distances
        return distances[by_number[b]] if by_number[b] < len(distances) else 255


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """A sort key under which mlx5_10 comes after mlx5_2."""
    return tuple((int(word), "") if word.isdecimal() else (-1, word) for word in re.findall(r"\d+|\D+", name))


def pci_order(address: str) -> tuple[int, str]:
    """A sort key for PCI addresses, which are hexadecimal: the order of the bus."""
    return len(address), address


def number_list(numbers: Iterable[int]) -> str:
    """As the kernel writes lists of CPUs and nodes: 0-3,8."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
