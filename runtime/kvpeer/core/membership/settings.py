"""Times and limits of membership."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from kvpeer.model import ConfigError

__all__ = [
    "INDIRECT_PINGS_MAX",
    "MEMBERS_MAX",
    "REFUTATION_MAX",
    "SEED_INTERVAL_S_MIN",
    "TOMBSTONES_MAX",
    "UPDATES_PER_GOSSIP_MAX",
    "UPDATES_PER_PING_MAX",
    "MembershipSettings",
]

MEMBERS_MAX = 1024
"""Agents in one cluster. Every agent has a link to most others and rumours reach all: beyond this a cluster should be
cut by namespace. Members that would exceed it are not added, and counted."""

TOMBSTONES_MAX = 1024
"""Ended ids that are remembered so that no old rumour brings one back: a whole cluster of the largest size can
restart. The oldest is dropped first."""

UPDATES_PER_PING_MAX = 16
"""Rumours on a ping or an ack, about 100 bytes each: a probe stays within two network packets."""

UPDATES_PER_GOSSIP_MAX = 64
"""Rumours in one Gossip (about 6 KiB), and how many are read of any message. Larger views travel in several."""

INDIRECT_PINGS_MAX = 1024
"""Pings under way on behalf of others: a member has one probe of each other running, and asks few relays."""

SEED_INTERVAL_S_MIN = 0.5
"""After the first contact with a seed."""

REFUTATION_MAX = 1 << 48
"""A refutation counter grows by one per false suspicion. Larger values are garbage, and are not believed."""


@dataclass(frozen=True, slots=True)
class MembershipSettings:
    """The defaults keep the promise for 64 agents: a killed one is known to all in 2 s, a frozen one in 5 s.

    A frozen agent costs: time to its first probe (on average somebody probes it every `probe_interval_s`;
    2 s cover all but exp(-10) of cases) + `probe_timeout_s` + `indirect_timeout_s` + suspicion + gossip.

    Raises:
        ConfigError: a value is not positive.
    """

    probe_interval_s: float = 0.2
    """Between two probes by this agent. 5 pings and 5 acks a second cost about 0.1 % of a core."""
    probe_timeout_s: float = 0.3
    """For the ack of a direct ping: fifteen times a slow network's delay, because a loaded host answers late."""
    indirect_timeout_s: float = 0.4
    """For the ack through relays, after the direct ping was late."""
    relays: int = 3
    """Members asked to ping on our behalf (k of the SWIM paper)."""
    suspicion_s: float = 1.2
    """From suspect to dead, times log10 of the members (never less than once): the more members, the longer a
    refutation travels."""
    verify_timeout_s: float = 0.3
    """For the pings, direct and through relays at once, that check evidence of a death."""
    verified_suspicion_s: float = 0.8
    """From suspect to dead when there was evidence and no ping was answered."""
    gossip_fanout: int = 4
    """Members that news is forwarded to at once. Every member does so: three rounds reach 64."""
    retransmit_factor: int = 3
    """A rumour is sent this many times log2 of the members by each member, then dropped (lambda of the SWIM paper)."""
    dead_probe_interval_s: float = 1.0
    """Between two pings of members believed dead: how a healed partition finds itself."""
    forget_s: float = 300.0
    """How long a dead member is pinged and shown. Must be far above the time in which all learn of a death."""
    sync_interval_s: float = 10.0
    """Between two pushes of the whole view to a random member: repairs what lost rumours left behind."""
    seed_interval_s: float = 15.0
    """Between two contacts with a seed, however many members are known: joins clusters that never met. The first
    few follow each other faster (from SEED_INTERVAL_S_MIN): agents that start together choose different seeds."""
    stall_s: float = 0.3
    """When this agent itself was not run for this long, it judges nobody by that time."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0 or not math.isfinite(value):
                raise ConfigError(f"membership.{field.name} must be a positive number, not {value}")

    def suspicion_of(self, n_members: int) -> float:
        """Seconds from suspect to dead among this many members."""
        return self.suspicion_s * max(1.0, math.log10(n_members))

    def retransmits_of(self, n_members: int) -> int:
        """How often each member sends one rumour among this many members."""
        return self.retransmit_factor * math.ceil(math.log2(n_members + 1))
