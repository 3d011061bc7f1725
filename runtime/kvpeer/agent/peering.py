"""What the pool and its clients need of the rest of the agent, and what an agent without peers does instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpeer.agent.cohorts import Cohort
from kvpeer.core.chain import ChainSlice
from kvpeer.core.reasons import MissReason
from kvpeer.core.sources import Offer
from kvpeer.model import AgentId, Outcome

__all__ = ["NO_LOWER_TIER", "CommittedPages", "Locator", "LowerTier", "NoPeers", "PoolHooks", "Puller", "Whereabouts"]


@dataclass(frozen=True, slots=True, eq=False)
class CommittedPages:
    """Pages of one namespace that were just committed to the pool. Columns of n pages; `parts`: their part tables,
    PART_DTYPE [n, n_parts]."""

    namespace: bytes
    page_bytes: int
    keys: bytes
    partitions: NDArray[np.uint16]
    slots: NDArray[np.uint32]
    generations: NDArray[np.uint32]
    parts: NDArray[np.void]


class LowerTier(Protocol):
    """Where pages go besides the pool. Called on the event loop; must not block."""

    def committed(self, pages: CommittedPages) -> None:
        """These pages can be read from the pool, for a while."""

    def forget(self, namespace: bytes) -> None:
        """No page of the namespace may be had from now on."""

    async def forgotten(self, namespace: bytes, deadline: float) -> None:
        """Returns when none can be had after a restart either, or at the deadline (monotonic seconds)."""


class NoLowerTier:
    """The pool is all there is."""

    def committed(self, pages: CommittedPages) -> None:
        """Not kept."""

    def forget(self, namespace: bytes) -> None:
        """Nothing is kept."""

    async def forgotten(self, namespace: bytes, deadline: float) -> None:
        """Nothing was kept."""


NO_LOWER_TIER = NoLowerTier()


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


@dataclass(frozen=True, slots=True, eq=False)
class Whereabouts:
    """statuses u8 [n]: 2 if a peer has the page, else 0; `reason`: why the first of the rest is missing; `offers`: who
    has how many of the pages, counted from the first one."""

    statuses: NDArray[np.uint8]
    reason: str
    offers: Sequence[Offer]


class Locator(Protocol):
    """Finds pages at peers."""

    async def locate(self, chain: ChainSlice, indices: NDArray[np.int64], request: str, deadline: float) -> Whereabouts:
        """Where the pages of `indices` (places in `chain`, ascending, none in the own pool) are. Answers by `deadline`
        (monotonic seconds), whatever happens."""


class Puller(Protocol):
    """Brings pages of peers into the own pool."""

    async def pull(
        self,
        cohort: Cohort,
        chain: ChainSlice,
        indices: NDArray[np.int64],
        request: str,
        deadline: float,
        source: AgentId | None = None,
    ) -> NDArray[np.uint8]:
        """The outcome of each page of `indices`; a HIT is committed in the own pool. `source` is asked first, if it has
        the first of them. Answers by `deadline`. Is not cancelled when the asking client goes away: others may wait for
        the same pull."""


class NoPeers:
    """Locator, Puller and hooks of an agent without peers: everything that is not in the own pool is a miss."""

    async def locate(self, chain: ChainSlice, indices: NDArray[np.int64], request: str, deadline: float) -> Whereabouts:
        return Whereabouts(np.zeros(len(indices), dtype=np.uint8), MissReason.NO_MEMBERS.value, ())

    async def pull(
        self,
        cohort: Cohort,
        chain: ChainSlice,
        indices: NDArray[np.int64],
        request: str,
        deadline: float,
        source: AgentId | None = None,
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
