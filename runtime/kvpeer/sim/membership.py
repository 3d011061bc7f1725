"""The membership of one simulated agent, driven as `agent/membership.py` drives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvpeer.core.membership import Effect, JoinSeed, MemberMessage, MembersChanged, Membership, Send, heard
from kvpeer.model import AgentId, KvPeerError
from kvpeer.sim.kernel import Process, Task
from kvpeer.sim.links import Handlers, Links
from kvpeer.wire.messages import AgentInfo, Gossip, PeerMessage, Ping, PingAck, PingRequest

__all__ = ["MembershipService", "Seed"]

WAKEUP_S_MIN = 0.005

Seed = tuple[str, int]


class MembershipService:
    """`on_change` hears every change of the view."""

    def __init__(
        self,
        machine: Membership,
        process: Process,
        links: Links,
        seeds: Sequence[Seed],
        on_change: Callable[[MembersChanged], None],
    ) -> None:
        self.machine = machine
        self._process = process
        self._links = links
        self._seeds = seeds
        self._on_change = on_change
        self._joining: Task[None] | None = None
        self._n_joins = 0
        self._tick_at = float("inf")

    def handlers(self) -> Handlers:
        return {Ping: self._heard, PingAck: self._heard, PingRequest: self._heard, Gossip: self._heard}

    def start(self) -> None:
        self._tick()

    def link_up(self, info: AgentInfo) -> None:
        self._perform(self.machine.hello(info, self._process.clock()))

    def link_broke(self, agent_id: AgentId) -> None:
        self._perform(self.machine.evidence_of_death(agent_id, self._process.clock()))

    def leave(self) -> None:
        self._perform(self.machine.leave(self._process.clock()))

    def drain(self) -> None:
        self._perform(self.machine.drain(self._process.clock()))

    # ---- inside

    def _heard(self, peer: AgentInfo, message: PeerMessage) -> None:
        assert isinstance(message, MemberMessage)  # noqa: S101 - what it is registered for
        self._perform(heard(self.machine, AgentId(peer.agent_id), message, self._process.clock()))

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                info = self.machine.info_of(effect.agent_id)
                if info is not None:
                    self._links.know([info])
                self._links.notify(effect.agent_id, effect.message)
            elif isinstance(effect, MembersChanged):
                self._on_change(effect)
            elif isinstance(effect, JoinSeed) and (self._joining is None or self._joining.is_done):
                self._joining = self._process.spawn(self._join_one())
        self._arm()

    async def _join_one(self) -> None:
        host, port = self._seeds[self._n_joins % len(self._seeds)]
        self._n_joins += 1
        try:
            welcome = await self._links.join(host, port)
        except KvPeerError:
            return
        self._perform(self.machine.joined(welcome.members, self._process.clock()))

    def _tick(self) -> None:
        self._perform(self.machine.tick(self._process.clock()))

    def _arm(self) -> None:
        now = self._process.clock()
        due = max(self.machine.next_wakeup(now), now + WAKEUP_S_MIN)
        if due >= self._tick_at or due == float("inf"):
            return
        self._tick_at = due

        def tick() -> None:
            if due == self._tick_at:
                self._tick_at = float("inf")
                self._tick()

        self._process.call_at(due, tick)
