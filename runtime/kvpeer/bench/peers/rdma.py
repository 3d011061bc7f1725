"""The RDMA device that all systems are measured on, with the address of it that kvpeer's own plan would take."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kvpeer.agent.sysfs import Tree
from kvpeer.agent.sysfs.rdma import read_rdma
from kvpeer.core.topology.gids import choose_gid
from kvpeer.core.topology.machine import PortState, RdmaDevice

__all__ = ["RdmaAddress", "missing_rdma", "rdma_address"]


class RdmaAddress(NamedTuple):
    """host: the IP address behind it, which systems without a control channel of ours are reached by."""

    device: str
    gid_index: int
    host: str


def rdma_address() -> RdmaAddress | None:
    """Returns the address on the first device that can be used; None where there is none."""
    return next((found for device in _devices() if (found := _address(device)) is not None), None)


def missing_rdma() -> str | None:
    """Returns why nothing can run by RDMA; None where there is a device."""
    devices = _devices()
    if any(_address(device) for device in devices):
        return None
    return f"no RDMA device that can be used, of {len(devices)}: see `kvpeer doctor`" if devices else "no RDMA device"


def _devices() -> tuple[RdmaDevice, ...]:
    return read_rdma(Tree(Path("/")))


def _address(device: RdmaDevice) -> RdmaAddress | None:
    if not device.is_openable:
        return None
    for port in device.ports:
        gid = choose_gid(port, ()).gid
        if port.number == 1 and port.state is PortState.ACTIVE and gid is not None:
            return RdmaAddress(device.name, gid.index, str(gid.address.ipv4_mapped or gid.address))
    return None
