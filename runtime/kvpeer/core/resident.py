"""A page that occupies a slot, and the batches of effects that pages give rise to."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from kvpeer.core.slot_effects import (
    AssignExtent,
    Effect,
    MarkCommitted,
    MarkWithdrawn,
    MarkWriting,
    PageShape,
    Published,
    TouchExtent,
    Withdrawn,
)
from kvpeer.model import PARTS_MAX

__all__ = ["ALL_PARTS", "EffectBatch", "Resident", "ResidentState"]

ALL_PARTS = -1
"""As a part number: the writer brings every part of the page (a page pulled from a peer)."""


_EVERY_PART = (1 << PARTS_MAX) - 1


class ResidentState(Enum):
    WRITING = 1
    """Reserved; some part is not in yet. Other ranks of the pod may join."""
    COMMITTED = 2
    """Published; may be read, pinned and evicted."""
    LEAVING = 3
    """In no index any more, but somebody still writes or reads the slot."""
    QUARANTINED = 4
    """Held by nobody; the slot is free at `reusable_at`."""


class Resident:
    """One use of one slot, from its reservation until the slot is free again. Only the slot table changes it."""

    __slots__ = (
        "committed_parts",
        "expires_at",
        "generation",
        "key",
        "partition",
        "pins",
        "reserved_parts",
        "rests_long",
        "reusable_at",
        "shape",
        "slot",
        "state",
        "used_at",
        "was_published",
        "writers",
    )

    def __init__(
        self, key: bytes, partition: int, shape: PageShape, slot: int, generation: int, now: float, expires_at: float
    ) -> None:
        self.key = key
        self.partition = partition
        self.shape = shape
        self.slot = slot
        self.generation = generation
        self.state = ResidentState.WRITING
        self.writers: dict[int, int] = {}  # who still writes -> bit set of its parts
        self.reserved_parts = 0
        self.committed_parts = 0
        self.pins = 0
        self.used_at = now
        self.expires_at = expires_at  # of the reservation
        self.reusable_at = 0.0
        self.rests_long = False  # its quarantine is longer than a lease: not worth waiting for
        self.was_published = False

    def parts_of(self, part: int) -> int:
        """The bit set that stands for a part number."""
        return _EVERY_PART if part == ALL_PARTS else 1 << part

    @property
    def is_complete(self) -> bool:
        every_part = (1 << self.shape.n_parts) - 1
        return self.committed_parts & every_part == every_part

    @property
    def is_held(self) -> bool:
        """True while somebody reads or writes the slot: it must not be given to anybody else."""
        return bool(self.pins or self.writers)


class EffectBatch:
    """Collects the effects of one call, so that they leave as one batch a kind.

    The order of the kinds is safe: withdrawals first, then extents change hands, then slots are written anew.
    """

    def __init__(self) -> None:
        self._withdrawn: list[Resident] = []
        self._extents: list[Effect] = []
        self._writing: list[Resident] = []
        self._committed: list[Resident] = []

    def withdraw(self, page: Resident) -> None:
        self._withdrawn.append(page)

    def touch_extent(self, extent: int) -> None:
        self._extents.append(TouchExtent(extent))

    def assign_extent(self, extent: int, slot_bytes: int) -> None:
        self._extents.append(AssignExtent(extent, slot_bytes))

    def write(self, page: Resident) -> None:
        self._writing.append(page)

    def commit(self, page: Resident) -> None:
        self._committed.append(page)

    def drain(self) -> list[Effect]:
        """The collected effects, in the order in which they must be performed; the batch is empty afterwards."""
        effects: list[Effect] = []
        if self._withdrawn:
            effects.append(MarkWithdrawn(*_slots(self._withdrawn)))
            published = [page for page in self._withdrawn if page.was_published]
            if published:
                effects.append(Withdrawn(_keys(published), _partitions(published), *_slots(published)))
        effects.extend(self._extents)
        if self._writing:
            effects.append(MarkWriting(*_slots(self._writing)))
        if self._committed:
            pages = self._committed
            lengths = np.array([page.shape.page_bytes for page in pages], dtype=np.uint32)
            effects.append(MarkCommitted(*_slots(pages), _keys(pages)))
            cohort = pages[0].shape.cohort  # whoever commits belongs to one
            effects.append(Published(_keys(pages), _partitions(pages), *_slots(pages), lengths, cohort))
        for collected in (self._withdrawn, self._extents, self._writing, self._committed):
            collected.clear()
        return effects


def _slots(pages: Iterable[Resident]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    pairs = [(page.slot, page.generation) for page in pages]
    columns = np.array(pairs, dtype=np.uint32).reshape(-1, 2)
    return np.ascontiguousarray(columns[:, 0]), np.ascontiguousarray(columns[:, 1])


def _keys(pages: Iterable[Resident]) -> bytes:
    return b"".join(page.key for page in pages)


def _partitions(pages: Iterable[Resident]) -> NDArray[np.uint16]:
    return np.array([page.partition for page in pages], dtype=np.uint16)
