"""The room on the disk: files of one size, each cut into slots of one size class, and which slots are free.

Slot id = segment * SLOTS_PER_SEGMENT + index, as in the pool. A segment is *unused* (no file, or nothing in it),
*assigned* to a slot size, or *refused* (the file system had no room for it).
"""

from __future__ import annotations

import heapq

from kvpeer.model import InternalError

__all__ = ["BLOCK_BYTES", "SLOTS_PER_SEGMENT", "Segments"]

SLOTS_PER_SEGMENT = 16384
"""Slot ids reserved for a segment."""

BLOCK_BYTES = 4096
"""Offsets and lengths on the disk are multiples of this, as direct I/O wants it; the header of a page takes one."""


class Segments:
    """Free slots are given out by ascending number, so that pages written together lie together. Not thread-safe."""

    def __init__(self, n_segments: int, segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self.slot_bytes_of: dict[int, int] = {}  # of assigned segments
        self.refused: set[int] = set()
        self._unused = list(range(n_segments))  # heaps, the lowest number first
        self._free: dict[int, list[int]] = {}  # by slot size
        self._n_used: dict[int, int] = {}  # slots in use, by segment

    def slot_bytes(self, page_bytes: int) -> int:
        """The slot size for a page size: a block for the header, whole blocks for the page, and no smaller than slot
        ids can number."""
        blocks = 1 + -(-page_bytes // BLOCK_BYTES)
        least = -(-self.segment_bytes // SLOTS_PER_SEGMENT // BLOCK_BYTES)
        return max(blocks, least) * BLOCK_BYTES

    def place(self, slot: int) -> tuple[int, int]:
        """(segment, offset in its file) of a slot of an assigned segment."""
        segment, idx = divmod(slot, SLOTS_PER_SEGMENT)
        return segment, idx * self.slot_bytes_of[segment]

    @property
    def assigned_bytes(self) -> int:
        return len(self.slot_bytes_of) * self.segment_bytes

    # ---- slots

    def take(self, slot_bytes: int) -> int | None:
        """A free slot of this size, from a segment that is assigned now if need be; None if something must go first."""
        free = self._free.setdefault(slot_bytes, [])
        if not free and self._unused:
            self.assign(heapq.heappop(self._unused), slot_bytes)
        if not free:
            return None
        slot = heapq.heappop(free)
        self._n_used[slot // SLOTS_PER_SEGMENT] += 1
        return slot

    def put_back(self, slot: int) -> None:
        """Nothing in the slot is wanted any more."""
        segment = slot // SLOTS_PER_SEGMENT
        self._n_used[segment] -= 1
        heapq.heappush(self._free[self.slot_bytes_of[segment]], slot)

    def n_used(self, segment: int) -> int:
        return self._n_used[segment]

    # ---- segments

    def assign(self, segment: int, slot_bytes: int) -> None:
        """Gives an unused segment, taken from the list of those, to a slot size; all its slots are free."""
        self.slot_bytes_of[segment] = slot_bytes
        self._n_used[segment] = 0
        first = segment * SLOTS_PER_SEGMENT
        free = self._free.setdefault(slot_bytes, [])
        free.extend(range(first, first + self.segment_bytes // slot_bytes))
        heapq.heapify(free)

    def release(self, segment: int) -> None:
        """The segment is unused again; none of its slots may be in use."""
        self._unassign(segment)
        heapq.heappush(self._unused, segment)

    def refuse(self, segment: int) -> None:
        """There is no room for its file: it is left out until `allow_growth`."""
        self._unassign(segment)
        self.refused.add(segment)

    def allow_growth(self) -> None:
        """There may be room again."""
        for segment in self.refused:
            heapq.heappush(self._unused, segment)
        self.refused.clear()

    def restore(self, segment: int, slot_bytes: int, used: set[int]) -> None:
        """The segment was found on the disk, assigned to this size, with these slots in use."""
        self._unused.remove(segment)
        heapq.heapify(self._unused)
        self.assign(segment, slot_bytes)
        self._free[slot_bytes] = [slot for slot in self._free[slot_bytes] if slot not in used]
        heapq.heapify(self._free[slot_bytes])
        self._n_used[segment] = len(used)

    def _unassign(self, segment: int) -> None:
        if self._n_used.pop(segment):
            raise InternalError(f"segment {segment} is given up while slots of it are in use")
        free = self._free[self.slot_bytes_of.pop(segment)]
        free[:] = [slot for slot in free if slot // SLOTS_PER_SEGMENT != segment]
        heapq.heapify(free)
