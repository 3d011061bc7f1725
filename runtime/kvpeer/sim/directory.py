"""The directory of one simulated agent: shard and publisher, driven as `agent/directory.py` drives them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvpeer.core.directory import DirectoryShard
from kvpeer.core.owner_answers import checked_holders, checked_stream_answer, take_streamed
from kvpeer.core.owner_stream import StreamMessage
from kvpeer.core.publisher import REGISTRY_PARTITION_RECORDS_MAX, Publisher, SendToOwner
from kvpeer.core.ring import Ring
from kvpeer.core.slot_effects import Published, Withdrawn
from kvpeer.model import AgentId, KvPeerError
from kvpeer.native import DirectoryTable
from kvpeer.sim.kernel import Process
from kvpeer.sim.links import Handlers, Links
from kvpeer.wire.messages import (
    AgentInfo,
    Apply,
    Digests,
    Holders,
    Lookup,
    PeerMessage,
    Repair,
    StaleReport,
    Synced,
)

__all__ = ["ANTI_ENTROPY_S", "Directory"]

ANTI_ENTROPY_S = 5.0
"""Between two comparisons; half the agent's default, so that each run sees some after its faults."""

STREAM_DEADLINE_S = 2.0
SWEEP_PARTITIONS = 512
SWEEP_IDLE_S = 1.0
TABLE_RECORDS_MAX = 16384


class Directory:
    """`garble`: changes an answer to a lookup before it is sent, as a lying owner does."""

    def __init__(
        self, own_id: AgentId, process: Process, links: Links, garble: Callable[[Holders], Holders] | None = None
    ) -> None:
        self.own_id = own_id
        self.shard = DirectoryShard(own_id, DirectoryTable(TABLE_RECORDS_MAX, makes_room=True))
        self.publisher = Publisher(
            own_id, DirectoryTable(REGISTRY_PARTITION_RECORDS_MAX, makes_room=False), ANTI_ENTROPY_S
        )
        self._process = process
        self._links = links
        self._garble = garble
        self._tick_at = float("inf")

    def handlers(self) -> Handlers:
        return {
            Lookup: self._lookup,
            Apply: self._streamed,
            Repair: self._streamed,
            Synced: self._streamed,
            Digests: self._streamed,
            StaleReport: self._stale,
        }

    def start(self) -> None:
        self._tick()

    # ---- what the pool and membership tell

    def published(self, effect: Published) -> None:
        self._perform(
            self.publisher.published(effect.keys, effect.partitions, effect.slots, effect.generations, effect.lengths)
        )

    def withdrawn(self, effect: Withdrawn) -> None:
        self._perform(self.publisher.withdrawn(effect.keys, effect.partitions, effect.slots, effect.generations))

    def members_changed(self, ring: Ring, alive: Collection[AgentId]) -> None:
        self.shard.members_changed(ring, alive)
        self._perform(self.publisher.ring_changed(ring, self._process.clock()))

    # ---- what peers ask

    async def lookup(self, owner: AgentId, message: Lookup, deadline_s: float) -> Holders:
        return checked_holders(await self._links.request(owner, message, deadline_s))

    def report_stale(self, owner: AgentId, report: StaleReport) -> None:
        if owner == self.own_id:
            self.shard.stale(report)
        else:
            self._links.notify(owner, report)

    def _lookup(self, _: AgentInfo, message: PeerMessage) -> PeerMessage:
        assert isinstance(message, Lookup)  # noqa: S101 - what it is registered for
        answer = self.shard.lookup(message)
        return self._garble(answer) if self._garble is not None else answer

    def _stale(self, _: AgentInfo, message: PeerMessage) -> None:
        assert isinstance(message, StaleReport)  # noqa: S101 - what it is registered for
        self.shard.stale(message)

    def _streamed(self, peer: AgentInfo, message: PeerMessage) -> PeerMessage:
        assert isinstance(message, StreamMessage)  # noqa: S101 - what it is registered for
        return take_streamed(self.shard, AgentId(peer.agent_id), message)

    # ---- inside

    def _perform(self, effects: list[SendToOwner]) -> None:
        pending = list(effects)
        while pending:
            effect = pending.pop(0)
            if effect.owner == self.own_id:
                answer = take_streamed(self.shard, self.own_id, effect.message)
                now = self._process.clock()
                pending += self.publisher.acknowledged(effect.owner, effect.message, answer, now)
            else:
                self._process.spawn(self._send(effect))

    async def _send(self, effect: SendToOwner) -> None:
        message: StreamMessage = effect.message
        try:
            answer = checked_stream_answer(message, await self._links.request(effect.owner, message, STREAM_DEADLINE_S))
            effects = self.publisher.acknowledged(effect.owner, message, answer, self._process.clock())
        except KvPeerError:
            self.publisher.failed(effect.owner, message, self._process.clock())
            self._tick_by(self.publisher.next_wakeup(self._process.clock()))
            return
        self._perform(effects)

    def _tick(self) -> None:
        now = self._process.clock()
        self._perform(self.publisher.tick(now))
        has_more = self.shard.sweep(SWEEP_PARTITIONS, now)
        pause_s = 0.0 if has_more else min(SWEEP_IDLE_S, self.publisher.next_wakeup(now) - now)
        self._tick_by(now + max(pause_s, 0.001))

    def _tick_by(self, time: float) -> None:
        if time >= self._tick_at:
            return
        self._tick_at = time

        def tick() -> None:
            if time == self._tick_at:
                self._tick_at = float("inf")
                self._tick()

        self._process.call_at(time, tick)
