"""How news travels: piggybacked on pings and acks, forwarded at once to a few members, and in pushes of the view."""

from __future__ import annotations

from kvpeer.core.membership.effects import Send
from kvpeer.core.membership.rumours import Rumours
from kvpeer.core.membership.settings import UPDATES_PER_GOSSIP_MAX, UPDATES_PER_PING_MAX, MembershipSettings
from kvpeer.core.membership.table import MemberState, MemberTable
from kvpeer.core.rng import Rng
from kvpeer.model import AgentId
from kvpeer.wire.messages import Gossip, MemberUpdate

__all__ = ["Dissemination"]


class Dissemination:
    """The rumours of one agent. Reads the table, never changes it. Not thread-safe."""

    def __init__(self, table: MemberTable, settings: MembershipSettings, rng: Rng) -> None:
        self._table = table
        self._settings = settings
        self._rng = rng
        self._rumours = Rumours()
        self._news: list[MemberUpdate] = []

    def spread(self, update: MemberUpdate) -> None:
        """Queues an update, and has it forwarded by the next `take_news`."""
        self._rumours.add(update, n_sent=self._settings.gossip_fanout)
        self._news.append(update)

    def repeat(self, update: MemberUpdate) -> None:
        """Queues an update that somebody has missed, without forwarding it at once."""
        self._rumours.add(update)

    def take_news(self) -> list[Send]:
        """Forwards what was spread since the last call, in batches, each to a few random members."""
        sends: list[Send] = []
        for message in _in_batches(self._news):
            targets = self._table.sample(self._rng, self._settings.gossip_fanout)
            sends += [Send(agent_id, message) for agent_id in targets]
        self._news.clear()
        return sends

    def piggyback(self, receiver: AgentId) -> list[MemberUpdate]:
        """Rumours for a ping or ack; what is held against the receiver itself comes first."""
        updates = self._rumours.take(UPDATES_PER_PING_MAX - 1, self._settings.retransmits_of(len(self._table) + 1))
        member, ended = self._table.member(receiver), self._table.ended(receiver)
        if member is not None and member.is_suspect:
            updates.insert(0, member.update)
        elif ended is not None:
            updates.insert(0, ended.update)
        return updates

    def view_for(self, receiver: AgentId, own: MemberUpdate, now: float) -> list[Send]:
        """All that is known. Deaths are told as suspicions: the living refute them, the dead cannot."""
        updates = [own, *(member.update for member in self._table.members())]
        for dead in self._table.revivable(now, self._settings.forget_s):
            updates.append(MemberUpdate(dead.info, MemberState.SUSPECT, dead.refutation))
        return [Send(receiver, message) for message in _in_batches(updates)]


def _in_batches(updates: list[MemberUpdate]) -> list[Gossip]:
    starts = range(0, len(updates), UPDATES_PER_GOSSIP_MAX)
    return [Gossip(updates[start : start + UPDATES_PER_GOSSIP_MAX]) for start in starts]
