"""Tells producers which of their slots this agent used: reads of peers are invisible to the producer's eviction.

Batched: once a second, one notice a producer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpeer.agent.pool import PoolService
from kvpeer.model import AgentId, RemoteProtocolError
from kvpeer.wire.messages import AgentInfo, PeerMessage, Touch
from kvpeer.wire.packing import U4, count, pack, unpack

__all__ = ["Notifier", "Touches"]

INTERVAL_S = 1.0
"""Between two notices to a producer: short beside the life of a page in a pool."""

SLOTS_MAX = 65_536
"""Slots remembered for one producer between two notices; of more, the later ones are forgotten. They were read a moment
ago and are at the young end of the producer's list anyway, because it served them. No notice may have more."""

STEP_SLOTS = 1024
"""Slots of a notice that are noted before others get their turn on the event loop: about a millisecond."""


class Notifier(Protocol):
    """What this needs of the control channel."""

    def notify(self, agent_id: AgentId, message: PeerMessage) -> None:
        """Sends without an answer, if it can be sent."""


class Touches:
    """Both sides: what to tell producers, and what readers tell us. Belongs to one event loop."""

    def __init__(self, pool: PoolService, links: Notifier) -> None:
        self._pool = pool
        self._links = links
        self._used: dict[AgentId, list[tuple[NDArray[np.uint32], NDArray[np.uint32]]]] = {}
        self._n_used: dict[AgentId, int] = {}

    def handlers(self) -> Mapping[type, Callable[[AgentInfo, PeerMessage], Awaitable[PeerMessage | None]]]:
        """By message type: what readers send."""
        return {Touch: self._touched}

    def add(self, producer: AgentId, slots: NDArray[np.uint32], generations: NDArray[np.uint32]) -> None:
        """These slots of the producer were read."""
        n = self._n_used.get(producer, 0)
        if len(slots) and n + len(slots) <= SLOTS_MAX:
            self._used.setdefault(producer, []).append((slots, generations))
            self._n_used[producer] = n + len(slots)

    async def run(self) -> None:
        """Sends what was added, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            used, self._used, self._n_used = self._used, {}, {}
            for producer, batches in used.items():
                slots = np.concatenate([slots for slots, _ in batches])
                generations = np.concatenate([generations for _, generations in batches])
                self._links.notify(producer, Touch(pack(slots, U4), pack(generations, U4)))

    async def _touched(self, peer: AgentInfo, message: PeerMessage) -> None:
        assert isinstance(message, Touch)  # noqa: S101 - what it is registered for
        n = count(message.slots, 4, "slots")
        if n > SLOTS_MAX:
            raise RemoteProtocolError(f"slots: {n} in one Touch, but at most {SLOTS_MAX}")
        slots = unpack(message.slots, U4, n, "slots")
        generations = unpack(message.generations, U4, n, "generations")
        # Each once, and in the order of the notice: a page that all read is in it many times.
        _, firsts = np.unique(slots.astype(np.uint64) << np.uint64(32) | generations, return_index=True)
        firsts.sort()
        for start in range(0, len(firsts), STEP_SLOTS):
            step = firsts[start : start + STEP_SLOTS]
            self._pool.use(slots[step], generations[step])
            await asyncio.sleep(0)
