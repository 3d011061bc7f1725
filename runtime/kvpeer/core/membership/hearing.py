"""What members send, and which event of the machine it is."""

from __future__ import annotations

from kvpeer.core.membership.effects import Effect
from kvpeer.core.membership.machine import Membership
from kvpeer.model import AgentId
from kvpeer.wire.messages import Gossip, Ping, PingAck, PingRequest

__all__ = ["MemberMessage", "heard"]

MemberMessage = Ping | PingAck | PingRequest | Gossip


def heard(machine: Membership, sender: AgentId, message: MemberMessage, now: float) -> list[Effect]:
    """What follows from a message of this sender."""
    if isinstance(message, Ping):
        return machine.ping(sender, message, now)
    if isinstance(message, PingAck):
        return machine.ack(sender, message, now)
    if isinstance(message, PingRequest):
        return machine.ping_request(sender, message, now)
    return machine.gossip(sender, message, now)
