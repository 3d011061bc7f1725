"""The disk below the agent's pool: what is told to the directory when pages go down, come up, or leave.

A page has one entry in the directory, of the best tier that has it. The pool's comes first; when the pool evicts a page
that is on the disk, its entry becomes one of tier disk; it is withdrawn only when the disk has evicted it as well.
Belongs to one event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpeer.agent.config import DiskSettings
from kvpeer.agent.config.parts import store_settings
from kvpeer.agent.directory import DirectoryService
from kvpeer.agent.peering import CommittedPages
from kvpeer.core.disk import Condition, DiskPage, Offer, PageFacts
from kvpeer.metrics import Metrics
from kvpeer.model import KEY_BYTES, Tier
from kvpeer.storage import DiskStore, PoolPages

__all__ = ["DiskTier"]

OUTCOMES = ("written", "queue_full", "disk_off", "moved", "no_room")


class Pool(PoolPages, Protocol):
    """What the tier needs of the pool above it."""

    def address(self, slot: int) -> int: ...


class DiskTier:
    """The pool's hooks and its lower tier. `attach` comes before anything else."""

    def __init__(self, config: DiskSettings, directory: DirectoryService, clock: Callable[[], float]) -> None:
        self._config = config
        self._directory = directory
        self._clock = clock

    def attach(self, pool: Pool) -> DiskStore:
        """Puts the tier below this pool; its store has to be run."""
        self._pool = pool
        self.store = DiskStore(store_settings(self._config), pool, self, self._clock)
        return self.store

    # ---- what the pool tells (PoolHooks, LowerTier)

    def published(
        self,
        keys: bytes,
        partitions: NDArray[np.uint16],
        slots: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        lengths: NDArray[np.uint32],
    ) -> None:
        """See PoolHooks."""
        self._directory.published(keys, partitions, slots, generations, lengths)

    def withdrawn(
        self, keys: bytes, partitions: NDArray[np.uint16], slots: NDArray[np.uint32], generations: NDArray[np.uint32]
    ) -> None:
        """See PoolHooks. What is on the disk is not withdrawn, but goes down to it."""
        split = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        below = [self.store.find(key) for key in split]
        self._demoted([page for page in below if page is not None])
        gone = np.array([page is None for page in below], dtype=np.bool_)
        if gone.any():
            gone_keys = b"".join(key for key, page in zip(split, below, strict=True) if page is None)
            self._directory.withdrawn(gone_keys, partitions[gone], slots[gone], generations[gone])

    def committed(self, pages: CommittedPages) -> None:
        """See LowerTier."""
        self.store.offer(
            Offer(
                PageFacts(
                    pages.keys[idx * KEY_BYTES : (idx + 1) * KEY_BYTES], int(pages.partitions[idx]), pages.namespace,
                    pages.page_bytes, pages.parts.shape[1],
                ),
                slot, int(pages.generations[idx]), self._pool.address(slot), pages.parts[idx].tobytes(),
            )
            for idx, slot in enumerate(pages.slots.tolist())
        )  # fmt: skip

    def forget(self, namespace: bytes) -> None:
        """See LowerTier."""
        self.store.forget(namespace)

    async def forgotten(self, namespace: bytes, deadline: float) -> None:
        """See LowerTier."""
        await self.store.forgotten(namespace, deadline)

    # ---- what the disk tells (DiskEvents)

    def stored(self, pages: list[DiskPage]) -> None:
        """See DiskEvents. What the pool has is published already, by the better tier."""
        self._publish([page for page in pages if not self._pool.has(page.facts.key)])

    def gone(self, pages: list[DiskPage]) -> None:
        """See DiskEvents."""
        lost = [page for page in pages if not self._pool.has(page.facts.key)]
        if lost:
            self._directory.withdrawn(*_columns(lost))

    # ---- accounts

    def observe(self, metrics: Metrics) -> None:
        """Brings the tier's metrics up to date."""
        store = self.store
        for condition in Condition:
            metrics.gauge("kvpeer_disk_condition").labels(condition=condition.value).set(condition is store.condition)
        metrics.gauge("kvpeer_disk_capacity_bytes").set(self._config.size_bytes)
        metrics.gauge("kvpeer_disk_used_bytes").set(store.used_bytes)
        metrics.gauge("kvpeer_disk_pages").set(store.n_pages)
        metrics.gauge("kvpeer_disk_queued_pages").set(store.n_queued)
        for outcome in OUTCOMES:
            metrics.advance("kvpeer_disk_offered_pages_total", store.outcomes[outcome], outcome=outcome)
        metrics.advance("kvpeer_disk_evicted_pages_total", store.n_evicted)
        metrics.advance("kvpeer_disk_corrupt_pages_total", store.n_corrupt)
        metrics.advance("kvpeer_disk_written_bytes_total", store.n_bytes_written)
        metrics.advance("kvpeer_disk_read_bytes_total", store.n_bytes_read)

    # ---- inside

    def _demoted(self, pages: Sequence[DiskPage]) -> None:
        for page in pages:
            self.store.use(page.facts.key)  # it was used until it left the pool
        self._publish(pages)

    def _publish(self, pages: Sequence[DiskPage]) -> None:
        if pages:
            lengths = np.array([page.facts.length for page in pages], dtype=np.uint32)
            self._directory.published(*_columns(pages), lengths, Tier.DISK)


def _columns(
    pages: Sequence[DiskPage],
) -> tuple[bytes, NDArray[np.uint16], NDArray[np.uint32], NDArray[np.uint32]]:
    """Keys, partitions, slots and generations, as the directory names them."""
    return (
        b"".join(page.facts.key for page in pages),
        np.array([page.facts.partition for page in pages], dtype=np.uint16),
        np.array([page.slot for page in pages], dtype=np.uint32),
        np.array([page.generation for page in pages], dtype=np.uint32),
    )
