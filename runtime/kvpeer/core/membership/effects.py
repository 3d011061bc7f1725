"""What the membership machine wants done."""

from __future__ import annotations

from dataclasses import dataclass

from kvpeer.model import AgentId
from kvpeer.wire.messages import AgentInfo, Gossip, Ping, PingAck, PingRequest

__all__ = ["Effect", "JoinSeed", "MembersChanged", "Send"]


@dataclass(frozen=True, slots=True)
class Send:
    """Send this one-way message; nothing is expected back. Losing it is allowed. When the agent cannot be reached at
    all, say so with `evidence_of_death`."""

    agent_id: AgentId
    message: Ping | PingAck | PingRequest | Gossip


@dataclass(frozen=True, slots=True)
class MembersChanged:
    """The view changed. `alive`: all members believed alive, this agent (until it leaves), suspects and draining ones
    included, sorted by agent id. `ended`: ids that stopped being alive since the last MembersChanged.
    `draining`: the members of `alive` that are about to leave and should get no new work."""

    alive: tuple[AgentInfo, ...]
    ended: tuple[AgentId, ...]
    draining: tuple[AgentId, ...] = ()


@dataclass(frozen=True, slots=True)
class JoinSeed:
    """Contact one of the configured seeds, a different one each time; report what it says with `hello` and `joined`."""


Effect = Send | MembersChanged | JoinSeed
