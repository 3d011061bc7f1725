"""The agent's part in the directory: its own shard, and the publishing of its pool to the owners.

Performs what the two pure machines decide: `core.publisher` (what to send to whom) and `core.directory` (what the shard
answers). Belongs to one event loop; nothing here blocks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpeer.agent.tasks import escalate
from kvpeer.core.directory import DirectoryShard
from kvpeer.core.owner_answers import checked_holders, checked_stream_answer, take_streamed
from kvpeer.core.owner_stream import StreamMessage
from kvpeer.core.publisher import Publisher, SendToOwner
from kvpeer.core.ring import Ring
from kvpeer.model import AgentId, KvPeerError, Tier
from kvpeer.waits import is_set_within
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

__all__ = ["DirectoryService", "PeerRequests"]

STREAM_DEADLINE_S = 2.0
"""For one message of the publish stream. Late ones are sent again: publishing is in no hurry, but a stuck owner must
not hold a stream for ever."""

SWEEP_PARTITIONS = 64
"""Steps of freeing between two turns of the loop: well below a millisecond."""

SWEEP_IDLE_S = 1.0
"""Between two looks for something to free."""

_log = logging.getLogger(__name__)


class PeerRequests(Protocol):
    """What the services need of the control channel."""

    async def request(self, agent_id: AgentId, message: PeerMessage, deadline_s: float) -> PeerMessage:
        """The peer's answer. Raises PeerUnavailableError when there is none within `deadline_s` seconds."""

    def notify(self, agent_id: AgentId, message: PeerMessage) -> None:
        """Sends without an answer, if it can be sent."""


class DirectoryService:
    """Shard and publisher of one agent. `clock` is monotonic seconds."""

    def __init__(
        self,
        own_id: AgentId,
        shard: DirectoryShard,
        publisher: Publisher,
        peers: PeerRequests,
        clock: Callable[[], float],
    ) -> None:
        self.shard = shard
        self.publisher = publisher
        self.own_id = own_id
        self._peers = peers
        self._clock = clock
        self._sending: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self.n_send_failures = 0
        self.n_repairs = 0
        """Partitions that this agent sent whole to another owner."""

    # ---- what the pool tells (PoolHooks)

    def published(
        self,
        keys: bytes,
        partitions: NDArray[np.uint16],
        slots: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        lengths: NDArray[np.uint32],
        tier: Tier = Tier.HOST,
    ) -> None:
        self._perform(self.publisher.published(keys, partitions, slots, generations, lengths, tier))

    def withdrawn(
        self, keys: bytes, partitions: NDArray[np.uint16], slots: NDArray[np.uint32], generations: NDArray[np.uint32]
    ) -> None:
        self._perform(self.publisher.withdrawn(keys, partitions, slots, generations))

    # ---- what membership tells

    def members_changed(self, ring: Ring, alive: Collection[AgentId]) -> None:
        """New owners, new producers; the records of those that ended are void at once."""
        self.shard.members_changed(ring, alive)
        self._perform(self.publisher.ring_changed(ring, self._clock()))

    # ---- what peers ask

    def handlers(self) -> Mapping[type, Callable[[AgentInfo, PeerMessage], Awaitable[PeerMessage | None]]]:
        """By message type: answers for authenticated peers."""
        return {
            Lookup: self._lookup,
            Apply: self._streamed,
            Repair: self._streamed,
            Synced: self._streamed,
            Digests: self._streamed,
            StaleReport: self._stale,
        }

    async def lookup(self, owner: AgentId, message: Lookup, deadline_s: float) -> Holders:
        """An owner's answer; the own shard's without the network.

        Raises:
            PeerUnavailableError: there is none within `deadline_s`.
            RemoteProtocolError: it is something else.
        """
        if owner == self.own_id:
            return self.shard.lookup(message)
        return checked_holders(await self._peers.request(owner, message, deadline_s))

    def report_stale(self, owner: AgentId, report: StaleReport) -> None:
        """Tells an owner that locations are stale."""
        if owner == self.own_id:
            self.shard.stale(report)
        else:
            self._peers.notify(owner, report)

    async def _lookup(self, peer: AgentInfo, message: PeerMessage) -> PeerMessage:
        assert isinstance(message, Lookup)  # noqa: S101 - what it is registered for
        return self.shard.lookup(message)

    async def _stale(self, peer: AgentInfo, message: PeerMessage) -> None:
        assert isinstance(message, StaleReport)  # noqa: S101 - what it is registered for
        self.shard.stale(message)

    async def _streamed(self, peer: AgentInfo, message: PeerMessage) -> PeerMessage:
        assert isinstance(message, StreamMessage)  # noqa: S101 - what it is registered for
        return take_streamed(self.shard, AgentId(peer.agent_id), message)

    # ---- life

    async def run(self) -> None:
        """Sends again what failed, compares digests, frees what ended; until cancelled."""
        while True:
            now = self._clock()
            self._perform(self.publisher.tick(now))
            has_more = self.shard.sweep(SWEEP_PARTITIONS, now)
            pause_s = 0.0 if has_more else min(SWEEP_IDLE_S, self.publisher.next_wakeup(now) - now)
            self._wake.clear()
            await is_set_within(self._wake, max(pause_s, 0.001))

    async def flush(self, deadline: float) -> None:
        """Returns when everything published or withdrawn so far was sent, or at the deadline."""
        while self._sending and self._clock() < deadline:
            await asyncio.wait(self._sending, timeout=deadline - self._clock())

    def close(self) -> None:
        """Stops sending."""
        for task in self._sending:
            task.cancel()

    # ---- inside

    def _perform(self, effects: list[SendToOwner]) -> None:
        """The own shard is answered here and now, in a loop: each answer may cause the next message."""
        pending = list(effects)
        while pending:
            effect = pending.pop(0)
            if effect.owner == self.own_id:
                pending += self._send_to_self(effect)
            else:
                task = asyncio.get_running_loop().create_task(self._send_root(effect))
                self._sending.add(task)
                task.add_done_callback(self._sending.discard)

    def _send_to_self(self, effect: SendToOwner) -> list[SendToOwner]:
        try:
            answer = take_streamed(self.shard, self.own_id, effect.message)
        except KvPeerError as error:
            return self._failed(effect, error)
        return self.publisher.acknowledged(effect.owner, effect.message, answer, self._clock())

    async def _send_root(self, effect: SendToOwner) -> None:
        """Stops the agent if the sending fails unexpectedly: the stream to this owner would stand still for ever."""
        try:
            await self._send(effect)
        except Exception as error:  # noqa: BLE001 - a root
            _log.exception("the stream to owner %s failed", effect.owner.hex())
            escalate(error, is_vital=True)

    async def _send(self, effect: SendToOwner) -> None:
        message: StreamMessage = effect.message
        self.n_repairs += isinstance(message, Repair)
        try:
            answer = checked_stream_answer(message, await self._peers.request(effect.owner, message, STREAM_DEADLINE_S))
            effects = self.publisher.acknowledged(effect.owner, message, answer, self._clock())
        except KvPeerError as error:
            effects = self._failed(effect, error)
        self._perform(effects)

    def _failed(self, effect: SendToOwner, error: KvPeerError) -> list[SendToOwner]:
        self.n_send_failures += 1
        _log.debug("a %s to owner %s failed: %s", type(effect.message).__name__, effect.owner.hex(), error)
        self.publisher.failed(effect.owner, effect.message, self._clock())
        self._wake.set()
        return []
