"""Locator and puller of an agent with a disk: the own disk is asked before any peer."""

from __future__ import annotations

import asyncio

import numpy as np
from numpy.typing import NDArray

from kvpeer.agent.cohorts import Cohort
from kvpeer.agent.peering import Locator, Puller, Whereabouts
from kvpeer.agent.promotions import Promotions
from kvpeer.core.chain import ChainSlice, take_keys
from kvpeer.core.sources import offers_within
from kvpeer.model import KEY_BYTES, AgentId, Outcome
from kvpeer.storage import DiskStore

__all__ = ["DiskFirst"]

LOCATED_OWN = 1


class DiskFirst:
    """See `peering.Locator` and `peering.Puller`."""

    def __init__(self, store: DiskStore, promotions: Promotions, locator: Locator, puller: Puller) -> None:
        self._store = store
        self._promotions = promotions
        self._locator = locator
        self._puller = puller

    async def locate(self, chain: ChainSlice, indices: NDArray[np.int64], request: str, deadline: float) -> Whereabouts:
        """See `Locator.locate`; 1 for pages on the own disk."""
        on_disk = np.array([self._store.find(key) is not None for key in _keys(chain, indices)], dtype=np.bool_)
        statuses = on_disk.astype(np.uint8) * LOCATED_OWN
        if on_disk.all():
            return Whereabouts(statuses, "", ())
        missing = np.flatnonzero(~on_disk)
        at_peers = await self._locator.locate(chain, indices[missing], request, deadline)
        statuses[missing] = at_peers.statuses
        return Whereabouts(statuses, at_peers.reason, offers_within(at_peers.offers, missing, len(indices)))

    async def pull(
        self,
        cohort: Cohort,
        chain: ChainSlice,
        indices: NDArray[np.int64],
        request: str,
        deadline: float,
        source: AgentId | None = None,
    ) -> NDArray[np.uint8]:
        """See `Puller.pull`. What turns out to be unreadable here is asked of peers after all."""
        keys = _keys(chain, indices)
        on_disk = np.array([self._store.find(key) is not None for key in keys], dtype=np.bool_)
        outcomes = np.full(len(keys), Outcome.MISS, dtype=np.uint8)

        async def promote() -> None:
            mine = [keys[place] for place in np.flatnonzero(on_disk).tolist()]
            outcomes[on_disk] = await self._promotions.promote(
                mine, deadline, is_own=True, namespace=cohort.namespace
            )  # fmt: skip

        async def pull(wanted: NDArray[np.bool_]) -> None:
            if wanted.any():
                outcomes[wanted] = await self._puller.pull(cohort, chain, indices[wanted], request, deadline, source)

        await asyncio.gather(promote(), pull(~on_disk))
        await pull(on_disk & np.isin(outcomes, (Outcome.MISS, Outcome.STALE, Outcome.CORRUPT)))
        return outcomes


def _keys(chain: ChainSlice, indices: NDArray[np.int64]) -> list[bytes]:
    packed = take_keys(chain.keys, indices)
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
