"""What this agent believes about every other agent, and which rumour overrides which."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum

from kvpeer.core.membership.settings import MEMBERS_MAX, TOMBSTONES_MAX
from kvpeer.core.rng import Rng
from kvpeer.model import AgentId
from kvpeer.wire.messages import AgentInfo, MemberUpdate

__all__ = ["Change", "Ended", "Member", "MemberState", "MemberTable", "supersedes"]


class MemberState(IntEnum):
    """`state` of a MemberUpdate."""

    ALIVE = 1
    SUSPECT = 2
    DEAD = 3
    LEFT = 4
    DRAINING = 5


_GRAVITY: dict[int, int] = {
    MemberState.ALIVE: 0,
    MemberState.DRAINING: 1,
    MemberState.SUSPECT: 2,
    MemberState.DEAD: 3,
    MemberState.LEFT: 4,
}
"""Between two rumours with the same refutation counter the graver one holds."""


def supersedes(new: MemberUpdate, old: MemberUpdate) -> bool:
    """Whether `new` overrides `old`: a higher refutation counter, or a graver state at the same one.

    A total order on (counter, state), so members that heard the same rumours in any order believe the same. Unlike in
    the SWIM paper, a higher counter overrides even a death: only the member itself raises its counter, so it is alive.
    Source: Das, Gupta, Motivala: SWIM (DSN 2002), section 4.2, for the rest.
    """
    return (new.refutation, _GRAVITY[new.state]) > (old.refutation, _GRAVITY[old.state])


class Change(Enum):
    """What one update did to the table."""

    NONE = "none"
    """Nothing new: old news, no room, or a suspicion of somebody unknown."""
    JOINED = "joined"
    """A member that was not known."""
    REVIVED = "revived"
    """A member believed to have ended has refuted it."""
    SUSPECTED = "suspected"
    ENDED = "ended"
    RENEWED = "renewed"
    """Anything else: refuted, drains, died in another way."""


@dataclass(slots=True)
class Member:
    """A member believed alive. `dead_at`, `ask_again_at`: timers of a suspicion, None without one; the second one is
    also None once it has rung. `is_draining` stays true through suspicions."""

    update: MemberUpdate
    is_draining: bool
    dead_at: float | None = None
    ask_again_at: float | None = None

    @property
    def is_suspect(self) -> bool:
        return self.dead_at is not None

    def suspect_until(self, dead_at: float, now: float) -> None:
        """Sets the timers of a suspicion: it is asked once more when half of the time is over."""
        self.dead_at = dead_at
        self.ask_again_at = now + (dead_at - now) / 2


@dataclass(frozen=True, slots=True)
class Ended:
    """A member that is dead or has left, since `since`."""

    update: MemberUpdate
    since: float


class MemberTable:
    """Members believed alive, and tombstones of those that ended. Both bounded. Holds others only, never this agent.

    A tombstone outlives the time in which the member is pinged: as long as it is there, only a higher refutation
    counter brings the id back. Not thread-safe.
    """

    def __init__(self) -> None:
        self._present: dict[AgentId, Member] = {}
        self._ended: dict[AgentId, Ended] = {}
        self._suspects: dict[AgentId, Member] = {}
        self._ids: list[AgentId] | None = None
        self.n_refused = 0
        """Members not added because the table was full."""

    def __len__(self) -> int:
        return len(self._present)

    def __contains__(self, agent_id: object) -> bool:
        return agent_id in self._present

    def member(self, agent_id: AgentId) -> Member | None:
        return self._present.get(agent_id)

    def ended(self, agent_id: AgentId) -> Ended | None:
        return self._ended.get(agent_id)

    def ids(self) -> list[AgentId]:
        """The ids of all members believed alive; do not change the list."""
        if self._ids is None:
            self._ids = list(self._present)
        return self._ids

    def members(self) -> Iterator[Member]:
        return iter(self._present.values())

    def suspects(self) -> list[tuple[AgentId, Member]]:
        return list(self._suspects.items())

    def remembered(self, now: float, forget_s: float) -> list[MemberUpdate]:
        """Members that ended less than `forget_s` ago, oldest first."""
        return [ended.update for ended in self._ended.values() if now - ended.since < forget_s]

    def revivable(self, now: float, forget_s: float) -> list[MemberUpdate]:
        """The remembered ones that may come back: they did not leave, and nobody else listens at their address."""
        taken = {(m.update.info.host, m.update.info.control_port) for m in self._present.values()}
        return [
            update
            for update in self.remembered(now, forget_s)
            if update.state == MemberState.DEAD and (update.info.host, update.info.control_port) not in taken
        ]

    def sample(self, rng: Rng, n: int, besides: AgentId | None = None) -> list[AgentId]:
        """At most n random members believed alive."""
        ids = self.ids()
        chosen = rng.sample(ids, min(n + 1, len(ids)))
        return [agent_id for agent_id in chosen if agent_id != besides][:n]

    def at_address(self, info: AgentInfo) -> list[AgentId]:
        """Other members believed alive that listen where `info` says it does."""
        return [
            agent_id
            for agent_id, member in self._present.items()
            if agent_id != info.agent_id
            and (member.update.info.host, member.update.info.control_port) == (info.host, info.control_port)
        ]

    def apply(self, update: MemberUpdate, now: float, suspicion_s: float) -> Change:
        """Believes an update if it is news. A new suspicion gets `suspicion_s` to be refuted.

        The address of a known member is kept: an id is one run of an agent, and listens in one place.
        """
        agent_id = AgentId(update.info.agent_id)
        member, ended = self._present.get(agent_id), self._ended.get(agent_id)
        known = member or ended
        if known is None:
            return self._first_heard(agent_id, update, now)
        if not supersedes(update, known.update):
            if ended is not None and update.state in (MemberState.ALIVE, MemberState.DRAINING):
                self._ended[agent_id] = Ended(ended.update, now)  # somebody disagrees: worth asking it for a while
            return Change.NONE
        update = MemberUpdate(known.update.info, update.state, update.refutation)
        if update.state in (MemberState.DEAD, MemberState.LEFT):
            self._bury(agent_id, update, now)
            return Change.ENDED if member else Change.RENEWED
        if member is None:
            if not self._admit(agent_id, update):
                return Change.NONE
            del self._ended[agent_id]
        return self._renew(agent_id, update, now, suspicion_s, is_revival=member is None)

    def readdress(self, info: AgentInfo) -> None:
        """Takes the address from the member's own authenticated hello."""
        member = self._present.get(AgentId(info.agent_id))
        if member is not None:
            member.update = MemberUpdate(info, member.update.state, member.update.refutation)

    def postpone(self, by_s: float) -> None:
        """Moves all timers of suspicions."""
        for member in self._suspects.values():
            if member.dead_at is not None:
                member.dead_at += by_s
            if member.ask_again_at is not None:
                member.ask_again_at += by_s

    def _first_heard(self, agent_id: AgentId, update: MemberUpdate, now: float) -> Change:
        if update.state in (MemberState.DEAD, MemberState.LEFT):
            self._bury(agent_id, update, now)
            return Change.NONE
        if update.state == MemberState.SUSPECT or not self._admit(agent_id, update):
            return Change.NONE
        return Change.JOINED

    def _admit(self, agent_id: AgentId, update: MemberUpdate) -> bool:
        if len(self._present) >= MEMBERS_MAX - 1:
            self.n_refused += 1
            return False
        self._present[agent_id] = Member(update, is_draining=update.state == MemberState.DRAINING)
        self._ids = None
        return True

    def _renew(
        self, agent_id: AgentId, update: MemberUpdate, now: float, suspicion_s: float, *, is_revival: bool
    ) -> Change:
        member = self._present[agent_id]
        member.update = update
        member.is_draining |= update.state == MemberState.DRAINING
        if update.state == MemberState.SUSPECT:
            if not member.is_suspect:
                self._suspects[agent_id] = member
            member.suspect_until(now + suspicion_s, now)
        else:
            member.dead_at = member.ask_again_at = None
            self._suspects.pop(agent_id, None)
        if is_revival:
            return Change.REVIVED
        return Change.SUSPECTED if member.is_suspect else Change.RENEWED

    def _bury(self, agent_id: AgentId, update: MemberUpdate, now: float) -> None:
        if self._present.pop(agent_id, None) is not None:
            self._suspects.pop(agent_id, None)
            self._ids = None
        self._ended.pop(agent_id, None)
        if len(self._ended) >= TOMBSTONES_MAX:
            del self._ended[next(iter(self._ended))]
        self._ended[agent_id] = Ended(update, now)
