"""The settings of the agent's parts, as those parts want them: plain values, without the configuration's groups."""

from __future__ import annotations

from pathlib import Path

from kvpeer.agent.config.settings import (
    DiskSettings,
    LimitSettings,
    MembershipSettings,
    PoolSettings,
    TransportSettings,
)
from kvpeer.agent.links.settings import LinkSettings
from kvpeer.core import membership
from kvpeer.core.slots import SlotSettings
from kvpeer.native import ServerLimits
from kvpeer.storage import DiskSettings as StoreSettings

__all__ = ["link_settings", "membership_settings", "server_limits", "slot_settings", "store_settings"]


def server_limits(transport: TransportSettings) -> ServerLimits:
    """What the data server lets readers make it hold."""
    return ServerLimits(
        connections_max=transport.server_connections_max,
        pages_max=transport.server_pages_max,
        idle_timeout_ms=round(transport.idle_timeout_s * 1000),
        io_timeout_ms=round(transport.io_timeout_s * 1000),
        handshake_timeout_ms=round(transport.handshake_timeout_s * 1000),
    )


def link_settings(limits: LimitSettings) -> LinkSettings:
    """What peers can make the control channel hold."""
    return LinkSettings(
        requests_max=limits.peer_requests_max,
        notices_max=limits.peer_notices_max,
        inbound_max=limits.peer_links_max,
    )


def slot_settings(pool: PoolSettings, n_extents: int) -> SlotSettings:
    """The times of the slot table, for a pool of so many extents."""
    return SlotSettings(
        extent_bytes=pool.extent_bytes,
        n_extents=n_extents,
        lease_ttl_s=pool.lease_ttl_s,
        reserve_deadline_s=pool.reserve_deadline_s,
        pin_ttl_s=pool.pin_ttl_s,
        death_grace_s=pool.death_grace_s,
        corrupt_hold_s=pool.corrupt_hold_s,
    )


def membership_settings(values: MembershipSettings) -> membership.MembershipSettings:
    """The times of the membership."""
    names = membership.MembershipSettings.__dataclass_fields__
    return membership.MembershipSettings(**{name: getattr(values, name) for name in names})


def store_settings(disk: DiskSettings) -> StoreSettings:
    """The folder of the disk tier and its limits."""
    return StoreSettings(Path(disk.path), disk.size_bytes, disk.segment_bytes, disk.read_threads, disk.slow_after_s)
