"""The pages in the slots, and every change of their state.

    free -> WRITING -> COMMITTED -> LEAVING -> QUARANTINED -> free
                  \\-----------------^

- WRITING: reserved. The ranks of a pod join the reservation of a key and each writes its own part; the page is
  published with the last part. What is not complete by the deadline leaves.
- COMMITTED: can be found, pinned, evicted.
- LEAVING: in no index, but a writer or a pin is left. A reservation that expired waits for its writers' word (commit
  or abandon) or their end: a late copy never hits a reused slot.
- QUARANTINED: held by nobody, waits for its time: the lease time for a page that was published (a remote reader may
  be in the middle of it), longer for a corrupt one, a grace after a writer's death.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from itertools import islice, takewhile

import numpy as np
from numpy.typing import NDArray

from kvpeer.core.extents import Extent, Extents
from kvpeer.core.resident import EffectBatch, Resident, ResidentState
from kvpeer.core.slot_effects import PageShape, ReserveStatus
from kvpeer.model import InternalError

__all__ = ["Residents"]


class Residents:
    """Indices of the pages and the transitions between their states. Not safe for concurrent access.

    `lease_ttl_s` decides which quarantines are short enough to be waited for instead of evicting more.
    """

    def __init__(self, extents: Extents, effects: EffectBatch, lease_ttl_s: float) -> None:
        self.by_key: dict[bytes, Resident] = {}  # WRITING and COMMITTED
        self.by_slot: dict[int, Resident] = {}  # LEAVING and QUARANTINED too
        self.writing: dict[int, Resident] = {}  # by slot, in the order of their deadlines
        self.stranded: dict[int, Resident] = {}  # by slot: LEAVING, and a writer has not spoken yet
        self.quarantined: list[tuple[float, int]] = []  # heap of (reusable_at, slot)
        self.n_expired = 0
        self._extents = extents
        self._effects = effects
        self._lease_ttl_s = lease_ttl_s

    # ---- transitions

    def begin(
        self, key: bytes, partition: int, shape: PageShape, taken: tuple[int, int], now: float, expires_at: float
    ) -> Resident:
        """A page that is being written in a slot just taken, with its generation. It has no writer yet."""
        slot, generation = taken
        page = Resident(key, partition, shape, slot, generation, now, expires_at)
        self.by_key[key] = self.by_slot[slot] = self.writing[slot] = page
        self._extents.extent_of(slot).n_used += 1
        self._effects.write(page)
        return page

    def join(self, page: Resident, writer: int, part: int) -> ReserveStatus:
        """Lets `writer` write its part of a page that is being written, if nobody else does or did."""
        if page.state is ResidentState.COMMITTED:
            return ReserveStatus.PRESENT
        parts = page.parts_of(part)
        if page.reserved_parts & parts or writer in page.writers:
            return ReserveStatus.BUSY
        page.reserved_parts |= parts
        page.writers[writer] = parts
        return ReserveStatus.WRITE

    def commit(self, page: Resident, writer: int, part: int, now: float) -> bool:
        """Ends the writer's hold. True if its part counts: it was reserved by this writer and did not expire."""
        parts = page.parts_of(part)
        if page.writers.get(writer) != parts:
            return False
        del page.writers[writer]
        if page.state is ResidentState.LEAVING:
            self.settle(page, now)
            return False
        page.committed_parts |= parts
        if page.is_complete:
            self._publish(page, now)
        return True

    def drop_writer(self, page: Resident, writer: int, hold_s: float, now: float) -> None:
        """The writer will not write any more: the page cannot be completed and leaves, its slot rests for `hold_s`."""
        if page.writers.pop(writer, None) is not None:
            self.leave(page, hold_s, now)
            self._rest(page, hold_s, now)
            self.settle(page, now)

    def leave(self, page: Resident, hold_s: float, now: float) -> None:
        """Takes the page out of the indices; its slot is not reused for `hold_s`. Does nothing if it left before."""
        if self.by_key.get(page.key) is not page:
            return
        if page.state is ResidentState.COMMITTED:
            self._extents.class_of(page.slot).policy.remove(page.slot)
        else:
            del self.writing[page.slot]
        del self.by_key[page.key]
        self._extents.extent_of(page.slot).n_used -= 1
        page.state = ResidentState.LEAVING
        self._rest(page, hold_s, now)
        self._effects.withdraw(page)
        if page.writers:
            self.stranded[page.slot] = page
        self.settle(page, now)

    def settle(self, page: Resident, now: float) -> None:
        """To be called whenever a page may have lost its last hold: one that is leaving goes on its way."""
        if page.state is not ResidentState.LEAVING:
            return
        if not page.writers:
            self.stranded.pop(page.slot, None)
        if page.is_held:
            return
        page.state = ResidentState.QUARANTINED
        if page.reusable_at <= now:
            self._free(page)
            return
        if not page.rests_long:
            self._extents.extent_of(page.slot).n_settling += 1
        heapq.heappush(self.quarantined, (page.reusable_at, page.slot))

    def use(self, page: Resident, now: float) -> None:
        """Notes a use of a committed page."""
        page.used_at = now
        self._extents.use(page.slot, now)

    def expire(self, now: float) -> None:
        """Lets time pass: quarantines end, reservations expire."""
        while self.quarantined and self.quarantined[0][0] <= now:
            page = self.by_slot[heapq.heappop(self.quarantined)[1]]
            if not page.rests_long:
                self._extents.extent_of(page.slot).n_settling -= 1
            self._free(page)
        for page in list(takewhile(lambda page: page.expires_at <= now, self.writing.values())):
            self.n_expired += 1
            self.leave(page, 0.0, now)

    def _publish(self, page: Resident, now: float) -> None:
        del self.writing[page.slot]
        page.state = ResidentState.COMMITTED
        page.was_published = True
        self._extents.class_of(page.slot).policy.add(page.slot)
        self.use(page, now)
        self._effects.commit(page)

    def _rest(self, page: Resident, hold_s: float, now: float) -> None:
        if page.state is not ResidentState.QUARANTINED:
            page.reusable_at = max(page.reusable_at, now + hold_s)
            page.rests_long |= hold_s > self._lease_ttl_s

    def _free(self, page: Resident) -> None:
        del self.by_slot[page.slot]
        self._extents.put_back(page.slot)

    # ---- questions

    def next_wakeup(self) -> float | None:
        """When the next reservation or quarantine ends."""
        times = [page.expires_at for page in islice(self.writing.values(), 1)]
        times += [entry[0] for entry in self.quarantined[:1]]
        return min(times, default=None)

    def committed(self, key: bytes) -> Resident | None:
        page = self.by_key.get(key)
        return page if page is not None and page.state is ResidentState.COMMITTED else None

    def in_slots(self, slots: NDArray[np.uint32], generations: NDArray[np.uint32]) -> Iterator[Resident | None]:
        """The page of each (slot, generation); None where the slot holds another use by now, or none."""
        for slot, generation in zip(slots.tolist(), generations.tolist(), strict=True):
            page = self.by_slot.get(slot)
            yield page if page is not None and page.generation == generation else None

    def in_extent(self, extent: Extent) -> list[Resident]:
        slots = range(extent.first_slot, extent.first_slot + extent.n_slots)
        return [page for page in map(self.by_slot.get, slots) if page is not None]

    def with_writers(self) -> list[Resident]:
        """Every page that may have a writer."""
        return [*self.writing.values(), *self.stranded.values()]

    def check(self) -> None:
        """Raises InternalError if the indices disagree with the pages or with the extents."""
        busy, used, settling = Counter[int](), Counter[int](), Counter[int]()
        for slot, page in self.by_slot.items():
            number = self._extents.extent_of(slot).number
            busy[number] += 1
            is_indexed = self.by_key.get(page.key) is page
            used[number] += is_indexed
            settling[number] += page.state is ResidentState.QUARANTINED and not page.rests_long
            if page.slot != slot or is_indexed != (page.state in (ResidentState.WRITING, ResidentState.COMMITTED)):
                raise InternalError(f"slot {slot} is {page.state.name} and indexed: {is_indexed}")
            if (page.state is ResidentState.WRITING) != (self.writing.get(slot) is page):
                raise InternalError(f"slot {slot} is {page.state.name}, which the list of writes denies")
            if (page.state is ResidentState.LEAVING) != (page.is_held and not is_indexed):
                raise InternalError(f"slot {slot} is {page.state.name} and held: {page.is_held}")
        for number, extent in self._extents.opened.items():
            counted = busy[number], used[number], settling[number]
            if (extent.n_busy, extent.n_used, extent.n_settling) != counted:
                raise InternalError(f"extent {number} counts its slots wrong")
        if len(self.by_key) != sum(used.values()):
            raise InternalError("a key names a page that is in no slot")
