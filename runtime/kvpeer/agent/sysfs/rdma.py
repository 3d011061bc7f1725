"""RDMA devices, their ports and addresses, as the kernel shows them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import AddressValueError, IPv6Address

from kvpeer.agent.sysfs.tree import Tree
from kvpeer.core.topology import NODE_UNKNOWN, Gid, GidKind, LinkLayer, Port, PortState, RdmaDevice

__all__ = ["DEVICES_MAX", "read_rdma"]

DEVICES_MAX = 512
"""A host with 8 NICs of 32 virtual functions each has 264."""

PORTS_MAX = 8

_CLASS = "sys/class/infiniband"
_VERBS = "sys/class/infiniband_verbs"
_FILES = "dev/infiniband"

_RATE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) Gb/sec.*")
_STATES = {"ACTIVE": PortState.ACTIVE, "INIT": PortState.INITIALIZING, "ARMED": PortState.INITIALIZING}
_LAYERS = {"InfiniBand": LinkLayer.INFINIBAND, "Ethernet": LinkLayer.ETHERNET}


def read_rdma(tree: Tree) -> tuple[RdmaDevice, ...]:
    """All devices that sysfs shows, in natural order of their names; it shows those of other containers, too."""
    verbs_files = {
        tree.name(f"{_VERBS}/{name}/ibdev"): name for name in tree.names(_VERBS) if name.startswith("uverbs")
    }
    return tuple(_device(tree, name, verbs_files.get(name, "")) for name in tree.names(_CLASS)[:DEVICES_MAX])


def _device(tree: Tree, name: str, verbs_file: str) -> RdmaDevice:
    folder = f"{_CLASS}/{name}"
    is_visible = bool(verbs_file) and tree.exists(f"{_FILES}/{verbs_file}")
    node = tree.number(f"{folder}/device/numa_node")
    ports = [number for number in tree.names(f"{folder}/ports") if number.isdecimal()][:PORTS_MAX]
    return RdmaDevice(
        name=name,
        driver=(tree.target(f"{folder}/device/driver") or ("",))[-1],
        pci_path=pci_path(tree.target(f"{folder}/device")),
        node=NODE_UNKNOWN if node is None else node,
        verbs_file=verbs_file,
        is_visible=is_visible,
        is_openable=is_visible and tree.can_open(f"{_FILES}/{verbs_file}"),
        is_virtual_function=tree.exists(f"{folder}/device/physfn"),
        ports=tuple(_port(tree, f"{folder}/ports/{number}", int(number)) for number in ports),
    )


def pci_path(parts: tuple[str, ...]) -> tuple[str, ...]:
    """From the root bus to the device: what comes after sys/devices, for a device on PCI; else empty."""
    below = parts[2:] if parts[:2] == ("sys", "devices") else ()
    roots = [idx for idx, part in enumerate(below) if part.startswith("pci")]
    return below[roots[0] :] if roots else ()


def _port(tree: Tree, folder: str, number: int) -> Port:
    layer = _LAYERS.get(tree.text(f"{folder}/link_layer") or "", LinkLayer.OTHER)
    state = (tree.text(f"{folder}/state") or "").rpartition(" ")[2]
    gids = tuple(_gids(tree, folder, layer))
    mtus = [tree.number(f"sys/class/net/{gid.netdev}/mtu") or 0 for gid in gids if gid.netdev]
    return Port(
        number=number,
        state=_STATES.get(state, PortState.DOWN),
        link_layer=layer,
        rate_gbps=_rate(tree, f"{folder}/rate"),
        gids=gids,
        mtu_bytes=max(mtus, default=0),
    )


def _rate(tree: Tree, path: str) -> float:
    text = tree.text(path)
    if text is None:
        return 0.0
    match = _RATE.fullmatch(text)
    if match is None:
        tree.fault(path)
        return 0.0
    return float(match[1])


def _gids(tree: Tree, folder: str, layer: LinkLayer) -> Iterator[Gid]:
    for index in tree.names(f"{folder}/gids"):
        text = tree.text(f"{folder}/gids/{index}")
        if not index.isdecimal() or text is None:
            continue
        try:
            address = IPv6Address(text)
        except AddressValueError:
            tree.fault(f"{folder}/gids/{index}")
            continue
        if address.is_unspecified:
            continue
        is_v2 = tree.text(f"{folder}/gid_attrs/types/{index}") == "RoCE v2"
        kind = GidKind.ROCE_V2 if is_v2 else GidKind.ROCE_V1
        if layer is LinkLayer.INFINIBAND:
            kind = GidKind.INFINIBAND
        yield Gid(int(index), address, kind, tree.name(f"{folder}/gid_attrs/ndevs/{index}"))
