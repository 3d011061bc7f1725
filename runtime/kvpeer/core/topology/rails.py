"""Which ports carry pages: those that are up, reachable from this container, addressable, and of one fabric."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvpeer.core.topology.gids import choose_gid
from kvpeer.core.topology.machine import (
    NODE_UNKNOWN,
    Gid,
    GidKind,
    LinkLayer,
    Machine,
    Port,
    PortState,
    RdmaDevice,
    natural,
)
from kvpeer.core.topology.problems import ProblemName

__all__ = ["Rail", "usable_rails"]

RATE_SHARE_MIN = 0.5
"""Least part of the fastest port's rate: ranks share NICs evenly, so a slower one would set the pace of all. NICs for
storage or management have a quarter or less; the ports of one fabric are alike."""

ROCE_MTU_BYTES_MIN = 4200
"""What carries RDMA packets of 4096 bytes with their headers."""

EFA_DRIVER = "efa"

Found = list[tuple[ProblemName, str]]


@dataclass(frozen=True, slots=True)
class Rail:
    """A port that carries pages, and the address that it has there."""

    device: RdmaDevice = field(repr=False)
    port: Port = field(repr=False)
    gid: Gid

    @property
    def name(self) -> str:
        """How it is named in output and in problems: mlx5_0 port 1."""
        return _name(self.device, self.port)


def usable_rails(machine: Machine, device_names: tuple[str, ...], found: Found) -> tuple[Rail, ...]:
    """The rails in order of their names; what is wrong is appended to `found`. `device_names`: those to use, empty for
    all."""
    found += [
        (ProblemName.DEVICE_UNKNOWN, name)
        for name in device_names
        if name not in {device.name for device in machine.devices}
    ]
    wanted = sorted(
        (device for device in machine.devices if not device_names or device.name in device_names),
        key=lambda device: natural(device.name),
    )
    if not machine.devices:
        found.append((ProblemName.NO_RDMA_DEVICE, "machine"))
    elif wanted and not any(device.is_visible for device in wanted):
        found.append((ProblemName.NO_DEVICE_IN_CONTAINER, "container"))
    rails = tuple(rail for device in wanted if _is_given(device, found) for rail in _rails(device, machine, found))
    return _fast(_one_fabric(rails, found), found)


def _is_given(device: RdmaDevice, found: Found) -> bool:
    if not device.is_visible:
        found.append((ProblemName.DEVICE_NOT_IN_CONTAINER, device.name))
    elif not device.is_openable:
        found.append((ProblemName.DEVICE_REFUSED, device.name))
    elif device.driver == EFA_DRIVER:
        found.append((ProblemName.EFA_NEEDS_NIXL, device.name))
    else:
        return True
    return False


def _rails(device: RdmaDevice, machine: Machine, found: Found) -> Iterator[Rail]:
    for port in device.ports:
        name = _name(device, port)
        if port.state is not PortState.ACTIVE:
            found.append((_why_inactive(device, port), name))
            continue
        choice = choose_gid(port, machine.netdevs)
        if choice.problem is not None:
            found.append((choice.problem, name))
        if choice.gid is None:
            continue
        if port.link_layer is LinkLayer.ETHERNET and 0 < port.mtu_bytes < ROCE_MTU_BYTES_MIN:
            found.append((ProblemName.MTU_SMALL, name))
        if device.node == NODE_UNKNOWN and len(machine.host_nodes) > 1:
            found.append((ProblemName.NIC_WITHOUT_NODE, name))
        yield Rail(device, port, choice.gid)


def _why_inactive(device: RdmaDevice, port: Port) -> ProblemName:
    if port.state is PortState.INITIALIZING and port.link_layer is LinkLayer.INFINIBAND:
        return ProblemName.NO_SUBNET_MANAGER
    has_other = any(other.state is PortState.ACTIVE for other in device.ports)
    return ProblemName.OTHER_PORT_DOWN if has_other else ProblemName.PORT_DOWN


def _one_fabric(rails: tuple[Rail, ...], found: Found) -> tuple[Rail, ...]:
    """The rails of the kind with more bandwidth in sum: both ends of a connection have the same. Of two alike, the one
    that is declared first; RoCE v1 only where there is nothing else."""
    rates = {kind: sum(rail.port.rate_gbps for rail in rails if rail.gid.kind is kind) for kind in GidKind}
    present = [kind for kind in GidKind if any(rail.gid.kind is kind for rail in rails)]
    best = max(present, key=lambda kind: (kind is not GidKind.ROCE_V1, rates[kind]), default=None)
    found += [(ProblemName.OTHER_FABRIC_LEFT_OUT, rail.name) for rail in rails if rail.gid.kind is not best]
    return tuple(rail for rail in rails if rail.gid.kind is best)


def _fast(rails: tuple[Rail, ...], found: Found) -> tuple[Rail, ...]:
    least = RATE_SHARE_MIN * max((rail.port.rate_gbps for rail in rails), default=0.0)
    found += [(ProblemName.SLOW_NIC_LEFT_OUT, rail.name) for rail in rails if rail.port.rate_gbps < least]
    return tuple(rail for rail in rails if rail.port.rate_gbps >= least)


def _name(device: RdmaDevice, port: Port) -> str:
    return f"{device.name} port {port.number}"
