"""Accelerators on the PCI bus, whoever made them."""

from __future__ import annotations

from kvpeer.agent.sysfs.rdma import pci_path
from kvpeer.agent.sysfs.tree import Tree
from kvpeer.core.topology import NODE_UNKNOWN, Gpu, pci_order

__all__ = ["GPUS_MAX", "read_gpus"]

GPUS_MAX = 256

_DEVICES = "sys/bus/pci/devices"
_NVIDIA = "0x10de"
_AMD = "0x1002"

_ACCELERATORS = ("0x0302", "0x1200")
"""Classes "3D controller" and "processing accelerator": never the display chip of a server's board."""


def read_gpus(tree: Tree) -> tuple[Gpu, ...]:
    """All accelerators of the host, in the order of their addresses."""
    addresses = [address for address in tree.names(_DEVICES) if _is_accelerator(tree, f"{_DEVICES}/{address}")]
    return tuple(_gpu(tree, address) for address in sorted(addresses, key=pci_order)[:GPUS_MAX])


def _is_accelerator(tree: Tree, folder: str) -> bool:
    kind, vendor = tree.text(f"{folder}/class") or "", tree.text(f"{folder}/vendor") or ""
    is_display = kind.startswith("0x0300") and vendor == _NVIDIA
    is_other_display = kind.startswith("0x0380") and vendor == _AMD
    return kind.startswith(_ACCELERATORS) or is_display or is_other_display


def _gpu(tree: Tree, address: str) -> Gpu:
    folder = f"{_DEVICES}/{address}"
    node = tree.number(f"{folder}/numa_node")
    path = pci_path(tree.target(folder))
    return Gpu(address.lower(), path, NODE_UNKNOWN if node is None else node, _is_visible(tree, address, folder))


def _is_visible(tree: Tree, address: str, folder: str) -> bool:
    """NVIDIA's driver names the device file in /proc, all others by the render node."""
    minor = dict(tree.fields(f"proc/driver/nvidia/gpus/{address}/information")).get("Device Minor", "")
    files = [f"dev/nvidia{minor}"] if minor.isdecimal() else []
    files += [f"dev/dri/{name}" for name in tree.names(f"{folder}/drm") if name.startswith("renderD")]
    return any(tree.exists(file) for file in files)
