"""Who is in the cluster, by SWIM: probes, suspicion, refutation and rumours, as a pure machine.

Membership is a hint that steers, never a fact that safety rests on. See `machine.Membership`.
"""

from kvpeer.core.membership.effects import Effect, JoinSeed, MembersChanged, Send
from kvpeer.core.membership.hearing import MemberMessage, heard
from kvpeer.core.membership.machine import Membership
from kvpeer.core.membership.settings import MEMBERS_MAX, MembershipSettings
from kvpeer.core.membership.table import MemberState

__all__ = [
    "MEMBERS_MAX",
    "Effect",
    "JoinSeed",
    "MemberMessage",
    "MemberState",
    "MembersChanged",
    "Membership",
    "MembershipSettings",
    "Send",
    "heard",
]
