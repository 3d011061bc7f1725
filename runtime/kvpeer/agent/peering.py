"""What the pool and its clients need of the rest of the agent, and what an agent without peers does instead."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpeer.agent.cohorts import Cohort
from kvpeer.core.chain import ChainSlice
from kvpeer.core.reasons import MissReason
from kvpeer.model import Outcome

__all__ = ["Locator", "NoPeers", "PoolHooks", "Puller"]


class PoolHooks(Protocol):
    """Who wants to know which pages can be read here. Called on the event loop, once per batch; must not block."""

    def published(
        self,
        keys: bytes,
        partitions: NDArray[np.uint16],
        slots: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        lengths: NDArray[np.uint32],
    ) -> None: ...

    def withdrawn(
        self,
        keys: bytes,
        partitions: NDArray[np.uint16],
        slots: NDArray[np.uint32],
        generations: NDArray[np.uint32],
    ) -> None: ...


class Locator(Protocol):
    """Finds pages at peers."""

    async def locate(
        self, chain: ChainSlice, indices: NDArray[np.int64], request: str, deadline: float
    ) -> tuple[NDArray[np.uint8], str]:
        """For each page of `indices` (places in `chain`, ascending, none in the own pool): 2 if a peer has it, else
        0; and why the rest is missing. Answers by `deadline` (monotonic seconds), whatever happens."""


class Puller(Protocol):
    """Brings pages of peers into the own pool."""

    async def pull(
        self, cohort: Cohort, chain: ChainSlice, indices: NDArray[np.int64], request: str, deadline: float
    ) -> NDArray[np.uint8]:
        """The outcome of each page of `indices`; a HIT is committed in the own pool. Answers by `deadline`. Is not
        cancelled when the asking client goes away: others may wait for the same pull."""


class NoPeers:
    """Locator, Puller and hooks of an agent without peers: everything that is not in the own pool is a miss."""

    async def locate(
        self, chain: ChainSlice, indices: NDArray[np.int64], request: str, deadline: float
    ) -> tuple[NDArray[np.uint8], str]:
        return np.zeros(len(indices), dtype=np.uint8), MissReason.NO_MEMBERS.value

    async def pull(
        self, cohort: Cohort, chain: ChainSlice, indices: NDArray[np.int64], request: str, deadline: float
    ) -> NDArray[np.uint8]:
        return np.full(len(indices), Outcome.MISS, dtype=np.uint8)

    def published(
        self,
        keys: bytes,
        partitions: NDArray[np.uint16],
        slots: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        lengths: NDArray[np.uint32],
    ) -> None:
        """Nobody to tell."""

    def withdrawn(
        self, keys: bytes, partitions: NDArray[np.uint16], slots: NDArray[np.uint32], generations: NDArray[np.uint32]
    ) -> None:
        """Nobody to tell."""
