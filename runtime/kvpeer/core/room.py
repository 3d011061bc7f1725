"""Where the next page goes: a free slot, a fresh extent, an evicted page's slot, or another size class's extent.

Eviction works ahead of need, because an evicted slot is in quarantine for the lease time. Whatever cannot be had is
refused with a reason: a mix of page sizes either makes progress or says why not.
"""

from __future__ import annotations

from itertools import islice

from kvpeer.core.extents import Extents, SizeClass
from kvpeer.core.resident import Resident, ResidentState
from kvpeer.core.residents import Residents
from kvpeer.core.slot_effects import NoRoom

__all__ = ["Room"]

AHEAD_FRACTION = 8
"""In a full class one slot in so many is kept free or on its way to free: evicting on demand only would refuse every
reservation once. One in eight is what small pools can spare."""

AHEAD_SLOTS_MAX = 128
"""Upper bound of the above: two batches of the usual 64 pages."""

EXTENTS_AHEAD = 1
"""Extents that are opened before anybody needs them: opening takes as long as faulting the memory in."""


class Room:
    """Finds slots for new pages, evicting where it has to. Not safe for concurrent access."""

    def __init__(self, extents: Extents, residents: Residents, lease_ttl_s: float) -> None:
        self.n_evicted = 0
        self._extents = extents
        self._residents = residents
        self._lease_ttl_s = lease_ttl_s

    def take(self, page_bytes: int, n_wanted: int, now: float) -> tuple[int, int] | NoRoom:
        """A free slot and its new generation. Where there is none, makes room for `n_wanted` pages, now or soon."""
        if page_bytes > self._extents.extent_bytes:
            return NoRoom.PAGE_TOO_LARGE
        size_class = self._extents.size_class(page_bytes)
        if size_class is None:
            return NoRoom.SIZE_CLASSES_FULL
        if not size_class.free:
            self._make_room(size_class, n_wanted, now)
        if not size_class.free and self._refusal(size_class) is NoRoom.PINNED:
            self._take_over(size_class, now, now)
        return self._extents.take(size_class) or self._refusal(size_class)

    def keep_ahead(self, page_bytes: int, now: float) -> None:
        """Keeps a share of the slots for pages of this size free, or about to be."""
        size_class = self._extents.size_class(page_bytes)
        if size_class is not None:
            n_ahead = min(size_class.n_slots // AHEAD_FRACTION, AHEAD_SLOTS_MAX)
            if len(size_class.free) < n_ahead:
                self._make_room(size_class, n_ahead, now)

    def _refusal(self, size_class: SizeClass) -> NoRoom:
        if self._extents.opening:
            return NoRoom.OPENING
        return NoRoom.QUARANTINED if size_class.n_settling or size_class.n_incoming else NoRoom.PINNED

    def _make_room(self, size_class: SizeClass, n_wanted: int, now: float) -> None:
        while len(size_class.free) < n_wanted and self._extents.assign_spare(size_class):
            pass
        self._extents.open_ahead(EXTENTS_AHEAD)
        n_short = n_wanted - len(size_class.free) - size_class.n_settling
        if n_short <= 0 or self._extents.opening or size_class.n_incoming:
            return
        coldest = next(size_class.policy.candidates(), None)
        if coldest is not None and self._take_over(size_class, self._residents.by_slot[coldest].used_at, now):
            return
        self._evict(size_class, n_short, now)

    def _evict(self, size_class: SizeClass, n_pages: int, now: float) -> int:
        """Withdraws up to `n_pages` pages of the class, by its policy, none that is held. Returns how many."""
        pages = (self._residents.by_slot[slot] for slot in size_class.policy.candidates())
        victims = list(islice((page for page in pages if not page.is_held), max(n_pages, 0)))
        for page in victims:
            self._residents.leave(page, self._lease_ttl_s, now)
        self.n_evicted += len(victims)
        return len(victims)

    def _take_over(self, size_class: SizeClass, unused_since: float, now: float) -> bool:
        """Starts to move the coldest extent of another class to this one, if it was not used after that and nobody
        holds it."""
        extents = [extent for extent in self._extents.opened.values() if extent.is_assigned_to_other(size_class)]
        for extent in sorted(extents, key=lambda extent: extent.used_at):
            if extent.used_at > unused_since:
                return False
            pages = self._residents.in_extent(extent)
            if all(self._can_retire(page) for page in pages):
                for page in pages:
                    self.n_evicted += page.state is ResidentState.COMMITTED
                    self._residents.leave(page, self._lease_ttl_s, now)
                self._extents.retire(extent, size_class)
                return True
        return False

    def _can_retire(self, page: Resident) -> bool:
        if page.state is ResidentState.QUARANTINED:
            return not page.rests_long
        return page.state is ResidentState.COMMITTED and not page.is_held
