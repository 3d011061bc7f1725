"""How near a NIC is to a GPU: what the path of a page between them crosses."""

from __future__ import annotations

from enum import IntEnum

from kvpeer.core.topology.machine import NODE_UNKNOWN, Gpu, Machine, RdmaDevice

__all__ = ["Proximity", "proximity", "separation"]


class Proximity(IntEnum):
    """Nearest first."""

    BRIDGE = 0
    """Below one root port: data need not pass the CPU."""
    ROOT = 1
    """Below one root bus."""
    NODE = 2
    """On one NUMA node."""
    OTHER_NODE = 3
    UNKNOWN = 4
    """The kernel does not say where one of them is."""


def proximity(gpu: Gpu, device: RdmaDevice) -> Proximity:
    """What they have in common."""
    n_common = _n_common(gpu.pci_path, device.pci_path)
    if n_common >= 2:
        return Proximity.BRIDGE
    if n_common == 1:
        return Proximity.ROOT
    if NODE_UNKNOWN in (gpu.node, device.node):
        return Proximity.UNKNOWN
    return Proximity.NODE if gpu.node == device.node else Proximity.OTHER_NODE


def separation(machine: Machine, gpu: Gpu, device: RdmaDevice) -> tuple[int, int, int]:
    """A sort key, least for the nearest: what they have in common, hops between them, distance of their nodes."""
    n_hops = len(gpu.pci_path) + len(device.pci_path) - 2 * _n_common(gpu.pci_path, device.pci_path)
    return proximity(gpu, device), n_hops, machine.distance(gpu.node, device.node)


def _n_common(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    n = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        n += 1
    return n
