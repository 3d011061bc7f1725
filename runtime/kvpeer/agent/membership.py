"""The agent's part in membership: performs what the SWIM machine decides, and joins through seeds.

Belongs to one event loop. Membership is a hint that steers: nothing here waits for it, and an unreachable seed delays
nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Protocol

from kvpeer.agent.links import LinkEnd
from kvpeer.core.membership import JoinSeed, MemberMessage, MembersChanged, Membership, Send, heard
from kvpeer.core.membership.effects import Effect
from kvpeer.model import AgentId, KvPeerError
from kvpeer.waits import is_set_within
from kvpeer.wire.messages import AgentInfo, Gossip, PeerMessage, PeerWelcome, Ping, PingAck, PingRequest

__all__ = ["MembershipLinks", "MembershipService", "Seed"]

JOIN_DEADLINE_S = 3.0
"""For one seed to be reached and to answer."""

WAKEUP_S_MIN = 0.005
"""Wake-ups closer together than this are handled at once."""

Seed = tuple[str, int]

_log = logging.getLogger(__name__)


class MembershipLinks(Protocol):
    """What membership needs of the control channel."""

    def meet(self, info: AgentInfo) -> None:
        """This agent may be written to, at this address; nothing is kept of it beyond that if it is no member."""

    def notify(self, agent_id: AgentId, message: PeerMessage) -> None:
        """Sends without an answer, if it can be sent."""

    async def join(self, host: str, port: int, deadline_s: float) -> PeerWelcome:
        """Connects to whoever listens there."""


class MembershipService:
    """`seeds` yields addresses to join through, fresh each time (files and names change). `on_change` hears every
    change of the view."""

    def __init__(
        self,
        machine: Membership,
        links: MembershipLinks,
        seeds: Callable[[], Awaitable[Collection[Seed]]],
        on_change: Callable[[MembersChanged], None],
        clock: Callable[[], float],
    ) -> None:
        self.machine = machine
        self._links = links
        self._seeds = seeds
        self._on_change = on_change
        self._clock = clock
        self._wake = asyncio.Event()
        self._joining: asyncio.Task[None] | None = None
        self._n_joins = 0
        self.n_join_failures = 0

    def handlers(self) -> Mapping[type, Callable[[AgentInfo, PeerMessage], Awaitable[PeerMessage | None]]]:
        """By message type: what members send."""
        return {Ping: self._heard, PingAck: self._heard, PingRequest: self._heard, Gossip: self._heard}

    def alive_infos(self) -> list[AgentInfo]:
        """All members believed alive, this agent included: what a newcomer is told."""
        return list(self.machine.alive())

    # ---- events

    def link_up(self, info: AgentInfo) -> None:
        """An authenticated peer said who it is."""
        self._perform(self.machine.hello(info, self._clock()))

    def members(self) -> Collection[AgentInfo]:
        """See LinkEvents."""
        return self.alive_infos()

    def link_down(self, agent_id: AgentId, end: LinkEnd) -> None:
        """See LinkEvents."""
        if end is LinkEnd.RESET:
            self.link_broke(agent_id)

    def unreachable(self, agent_id: AgentId, reason: str) -> None:
        """See LinkEvents."""
        self.link_broke(agent_id)

    def link_broke(self, agent_id: AgentId) -> None:
        """A link was reset or could not be made."""
        self._perform(self.machine.evidence_of_death(agent_id, self._clock()))

    async def _heard(self, peer: AgentInfo, message: PeerMessage) -> None:
        assert isinstance(message, MemberMessage)  # noqa: S101 - what it is registered for
        self._perform(heard(self.machine, AgentId(peer.agent_id), message, self._clock()))

    # ---- life

    async def run(self) -> None:
        """Keeps the machine's time, until cancelled."""
        while True:
            self._perform(self.machine.tick(self._clock()))
            self._wake.clear()
            pause_s = max(self.machine.next_wakeup(self._clock()) - self._clock(), WAKEUP_S_MIN)
            await is_set_within(self._wake, min(pause_s, 3600.0))

    def leave(self) -> None:
        """Tells everybody that this agent goes."""
        self._perform(self.machine.leave(self._clock()))

    def close(self) -> None:
        """Ends a join that is under way."""
        if self._joining is not None:
            self._joining.cancel()

    # ---- inside

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect)
            elif isinstance(effect, MembersChanged):
                self._on_change(effect)
            elif isinstance(effect, JoinSeed) and (self._joining is None or self._joining.done()):
                self._joining = asyncio.get_running_loop().create_task(self._join_one())
        self._wake.set()

    def _send(self, effect: Send) -> None:
        """Members that ended are pinged too, though the rest of the agent has forgotten them."""
        info = self.machine.info_of(effect.agent_id)
        if info is not None:
            self._links.meet(info)
        self._links.notify(effect.agent_id, effect.message)

    async def _join_one(self) -> None:
        """Contacts the next seed. Who it is comes in through `link_up`; whom it knows, here."""
        try:
            seeds = sorted(await self._seeds())
        except (KvPeerError, OSError) as error:
            _log.warning("seeds cannot be read: %s", error)
            return
        if not seeds:
            return
        host, port = seeds[self._n_joins % len(seeds)]
        self._n_joins += 1
        try:
            welcome = await self._links.join(host, port, JOIN_DEADLINE_S)
        except KvPeerError as error:
            self.n_join_failures += 1
            # Once at the level that operators read; a seed that stays away is no news.
            level = logging.WARNING if self.n_join_failures == 1 else logging.DEBUG
            _log.log(level, "seed %s:%d cannot be joined: %s", host, port, error)
            return
        self._perform(self.machine.joined(welcome.members, self._clock()))
