"""The values that the slot table returns: answers to its callers, and effects for its owner to perform.

Columns are numpy arrays with one entry a page, so that a batch costs one native call. Effects come in the order in
which they must be performed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "AssignExtent",
    "Commitment",
    "Effect",
    "Found",
    "MarkCommitted",
    "MarkWithdrawn",
    "MarkWriting",
    "NoRoom",
    "PageShape",
    "Published",
    "Reservation",
    "ReserveStatus",
    "SlotStats",
    "TouchExtent",
    "Withdrawn",
]


class ReserveStatus(IntEnum):
    """What became of one key of a reservation. The first three are the values of the wire."""

    WRITE = 0
    PRESENT = 1
    NO_ROOM = 2
    BUSY = 3
    """Somebody else is writing this part of the page just now; to a client that is as good as present."""


class NoRoom(IntEnum):
    """Why a reservation got less than it asked for."""

    PAGE_TOO_LARGE = 1
    """A page does not fit into an extent: raise the extent size."""
    SIZE_CLASSES_FULL = 2
    """There are as many page sizes in the pool as it can hold."""
    OPENING = 3
    """An extent is being opened: ask again."""
    QUARANTINED = 4
    """Pages were evicted; their slots are reusable within the lease time: ask again."""
    PINNED = 5
    """All that could make room is pinned or being written."""


@dataclass(frozen=True, slots=True)
class PageShape:
    """What the pages of one namespace have in common. `cohort` is the caller's number for the namespace."""

    page_bytes: int
    n_parts: int
    cohort: int


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Answer to reserve: slots, generations and offsets count where the status is WRITE. `no_room` is set if any is
    NO_ROOM."""

    statuses: NDArray[np.uint8]
    slots: NDArray[np.uint32]
    generations: NDArray[np.uint32]
    offsets: NDArray[np.uint64]
    no_room: NoRoom | None


@dataclass(frozen=True, slots=True, eq=False)
class Commitment:
    """Answer to commit. accepted: the part counts. complete: it was the last one, the page is published."""

    accepted: NDArray[np.bool_]
    complete: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Committed pages among the keys asked for; the other columns count where `resident` is set. `pin` is 0 for a
    mere look."""

    resident: NDArray[np.bool_]
    slots: NDArray[np.uint32]
    generations: NDArray[np.uint32]
    offsets: NDArray[np.uint64]
    pin: int


@dataclass(frozen=True, slots=True)
class SlotStats:
    """Bytes by state (slot sizes, not page sizes), and counts. used + free + quarantined = assigned.

    assigned: extents that belong to a size class. spare: opened, in no class yet. unopened: not backed by memory yet.
    """

    used_bytes: int
    free_bytes: int
    quarantined_bytes: int
    assigned_bytes: int
    spare_bytes: int
    unopened_bytes: int
    n_committed: int
    n_writing: int
    n_pins: int
    n_evicted: int
    n_expired: int
    n_corrupt: int


@dataclass(frozen=True, slots=True)
class TouchExtent:
    """Fault the extent in, off the event loop; then answer with extent_opened or extent_refused."""

    extent: int


@dataclass(frozen=True, slots=True)
class AssignExtent:
    """The extent belongs to this size class from now on."""

    extent: int
    slot_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class MarkWriting:
    slots: NDArray[np.uint32]
    generations: NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class MarkWithdrawn:
    slots: NDArray[np.uint32]
    generations: NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class MarkCommitted:
    """All pages of one batch have the same number of parts."""

    slots: NDArray[np.uint32]
    generations: NDArray[np.uint32]
    keys: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    """These pages can be read now: tell the directory. All pages of one batch belong to one cohort."""

    keys: bytes
    partitions: NDArray[np.uint16]
    slots: NDArray[np.uint32]
    generations: NDArray[np.uint32]
    lengths: NDArray[np.uint32]
    cohort: int


@dataclass(frozen=True, slots=True, eq=False)
class Withdrawn:
    """These pages were published and are gone: tell the directory."""

    keys: bytes
    partitions: NDArray[np.uint16]
    slots: NDArray[np.uint32]
    generations: NDArray[np.uint32]


Effect = TouchExtent | AssignExtent | MarkWriting | MarkWithdrawn | MarkCommitted | Published | Withdrawn
