"""Which of a port's addresses to use, or why none will do."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvpeer.core.topology.machine import Gid, GidKind, LinkLayer, Port
from kvpeer.core.topology.problems import ProblemName

__all__ = ["GidChoice", "choose_gid"]


@dataclass(frozen=True, slots=True)
class GidChoice:
    """The address, None if there is none to be used; and what is wrong, None if nothing is."""

    gid: Gid | None
    problem: ProblemName | None = None


def choose_gid(port: Port, netdevs: Collection[str]) -> GidChoice:
    """The address that peers reach from anywhere: RoCE v2 with an IPv4 address before one with a global IPv6 address,
    interfaces of this network namespace before others, then the lowest index. On InfiniBand the first one, whatever it
    is: fe80::/64 is the usual prefix of a subnet there, and the subnet manager routes it.

    A link-local RoCE address is never used: it says nothing of where the peer is, and two ports of one host share its
    prefix. RoCE v1 is used only where there is nothing else.
    """
    if port.link_layer is LinkLayer.INFINIBAND:
        first = min(port.gids, key=lambda gid: gid.index, default=None)
        return GidChoice(first) if first else GidChoice(None, ProblemName.GID_MISSING)
    if not port.gids:
        return GidChoice(None, ProblemName.GID_MISSING)
    routable = [gid for gid in port.gids if not gid.address.is_link_local]
    if not routable:
        return GidChoice(None, ProblemName.GID_LINK_LOCAL_ONLY)
    best = min(routable, key=lambda gid: _rank(gid, netdevs))
    return GidChoice(best, None if best.kind is GidKind.ROCE_V2 else ProblemName.ROCE_V1_ONLY)


def _rank(gid: Gid, netdevs: Collection[str]) -> tuple[bool, bool, bool, int]:
    is_foreign = bool(gid.netdev) and gid.netdev not in netdevs
    return gid.kind is not GidKind.ROCE_V2, is_foreign, gid.address.ipv4_mapped is None, gid.index
