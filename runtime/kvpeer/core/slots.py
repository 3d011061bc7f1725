"""The slot table: which page lies in which slot of the pool, who writes it, who reads it, and what has to go.

A pure machine with one owner: `now` comes in, answers and effects go out, nothing is awaited. Beneath it: `extents`
(which slots exist and which are free), `residents` (the states of a page), `room` (eviction). Not safe for concurrent
access.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice, takewhile

import numpy as np
from numpy.typing import NDArray

from kvpeer.core.eviction import EvictionPolicy, LeastRecentlyUsed
from kvpeer.core.extents import Extents
from kvpeer.core.resident import ALL_PARTS, EffectBatch, Resident, ResidentState
from kvpeer.core.residents import Residents
from kvpeer.core.room import EXTENTS_AHEAD, Room
from kvpeer.core.slot_effects import (
    Commitment,
    Effect,
    Found,
    NoRoom,
    PageShape,
    Reservation,
    ReserveStatus,
    SlotStats,
)
from kvpeer.model import KEY_BYTES, CapacityError, InternalError

__all__ = ["ALL_PARTS", "PINS_PER_HOLDER_MAX", "SlotSettings", "SlotTable"]


PINS_PER_HOLDER_MAX = 128
"""Pins of one client at a time. It has at most 32 requests under way, of two pins each while they are answered, and
as many copies; beyond, it does not release what it pins, and would keep the pool from everybody."""

CORRUPT_HOLD_GROWTH = 10.0
CORRUPT_HOLD_GROWTHS_MAX = 3
"""Each time the bytes of the same slot are found wrong it rests ten times longer: by default from a minute to 17 hours.
A wild write of an engine hits any slot: if that kept slots out of use until the restart, one such engine would use the
pool up. Bad memory damages the same slot again and again, and is to stay out of use."""


@dataclass(frozen=True, slots=True)
class SlotSettings:
    """lease_ttl_s: a withdrawn slot is not reused for this long. reserve_deadline_s: all parts must be in by then.
    pin_ttl_s: pins end by themselves. death_grace_s: after a writer's socket closed, for copies still in flight.
    corrupt_hold_s: quarantine of a slot whose bytes were found wrong; longer when that happens to it again."""

    extent_bytes: int
    n_extents: int
    lease_ttl_s: float = 0.05
    reserve_deadline_s: float = 10.0
    pin_ttl_s: float = 30.0
    death_grace_s: float = 1.0
    corrupt_hold_s: float = 60.0


@dataclass(slots=True)
class _Pin:
    holder: int
    expires_at: float
    pages: list[Resident]


class SlotTable:
    """All slots of one pool. Writers and pin holders are numbers that the owner gives to its clients."""

    def __init__(self, settings: SlotSettings, policy: Callable[[], EvictionPolicy] = LeastRecentlyUsed) -> None:
        self.settings = settings
        self._effects = EffectBatch()
        self._extents = Extents(settings.n_extents, settings.extent_bytes, policy, self._effects)
        self._residents = Residents(self._extents, self._effects, settings.lease_ttl_s)
        self._room = Room(self._extents, self._residents, settings.lease_ttl_s)
        self._pins: dict[int, _Pin] = {}  # in the order of their expiry
        self._n_pins_of: Counter[int] = Counter()  # by holder
        self._last_pin = 0
        self._n_corrupt: Counter[int] = Counter()  # by slot

    # ---- extents

    def start(self) -> list[Effect]:
        """Asks for the first extents to be opened."""
        self._extents.open_ahead(EXTENTS_AHEAD)
        return self._effects.drain()

    def extent_opened(self, extent: int) -> None:
        """Answer to TouchExtent: the extent can be used."""
        self._extents.opened_extent(extent)

    def extent_refused(self, extent: int) -> None:
        """Answer to TouchExtent: there is no memory for it. The pool stays as large as it is until `allow_growth`."""
        self._extents.refused_extent(extent)

    def allow_growth(self) -> list[Effect]:
        """There may be memory again."""
        self._extents.may_grow = True
        self._extents.open_ahead(EXTENTS_AHEAD)
        return self._effects.drain()

    # ---- writing

    def reserve(
        self, writer: int, keys: bytes, partitions: NDArray[np.uint16], shape: PageShape, part: int, now: float
    ) -> tuple[Reservation, list[Effect]]:
        """Gives `writer` slots to write its part of these pages into, in the order of the keys, as far as there is
        room.

        A page that another rank is writing is joined in its slot; one that is here already counts as used: who offers
        it uses it in the engine. Evicts to make room, now and ahead. `part` may be ALL_PARTS.
        """
        self._expire(now)
        n = len(keys) // KEY_BYTES
        statuses = np.full(n, ReserveStatus.NO_ROOM, dtype=np.uint8)
        columns = np.zeros((3, n), dtype=np.uint64)  # slots, generations, offsets
        refusal: NoRoom | None = None
        expires_at = now + self.settings.reserve_deadline_s
        n_taken = 0
        for idx, key in enumerate(_split(keys)):
            page = self._residents.by_key.get(key)
            if page is None:
                taken = refusal or self._room.take(shape.page_bytes, n - idx, now)
                if isinstance(taken, NoRoom):
                    refusal = taken
                    continue
                n_taken += 1
                page = self._residents.begin(key, int(partitions[idx]), shape, taken, now, expires_at)
            statuses[idx] = status = self._residents.join(page, writer, part)
            if status is ReserveStatus.PRESENT:
                self._residents.use(page, now)
            elif status is ReserveStatus.WRITE:
                columns[:, idx] = page.slot, page.generation, self._extents.offset(page.slot)
        if n_taken:
            self._room.keep_ahead(shape.page_bytes, now)
        slots, generations = columns[0].astype(np.uint32), columns[1].astype(np.uint32)
        return Reservation(statuses, slots, generations, columns[2].copy(), refusal), self._effects.drain()

    def commit(
        self, writer: int, slots: NDArray[np.uint32], generations: NDArray[np.uint32], part: int, now: float
    ) -> tuple[Commitment, list[Effect]]:
        """Takes in the writer's part of these slots. What is not accepted was no reservation of this writer, or
        expired."""
        self._expire(now)
        accepted, complete = np.zeros((2, len(slots)), dtype=np.bool_)
        for idx, page in enumerate(self._residents.in_slots(slots, generations)):
            if page is not None and self._residents.commit(page, writer, part, now):
                accepted[idx] = True
                complete[idx] = page.state is ResidentState.COMMITTED
        return Commitment(accepted, complete), self._effects.drain()

    def abandon(
        self, writer: int, slots: NDArray[np.uint32], generations: NDArray[np.uint32], now: float
    ) -> list[Effect]:
        """The writer writes into these slots no more and will not commit them: the pages cannot be completed and
        leave."""
        for page in self._residents.in_slots(slots, generations):
            if page is not None:
                self._residents.drop_writer(page, writer, 0.0, now)
        self._expire(now)
        return self._effects.drain()

    # ---- reading

    def find(self, keys: bytes, now: float) -> Found:
        """Which of these pages can be had here. Counts as a use, so that they are still there when they are fetched."""
        return self._found([self._residents.committed(key) for key in _split(keys)], now)

    def pin(self, holder: int, keys: bytes, now: float) -> Found:
        """As find, and keeps the pages where they are until `release`, the holder's end, or `pin_ttl_s` later.

        Raises:
            CapacityError: the holder has PINS_PER_HOLDER_MAX pins.
        """
        if self._n_pins_of[holder] >= PINS_PER_HOLDER_MAX:
            raise CapacityError(f"{PINS_PER_HOLDER_MAX} fetches are not released: release them after their copies")
        pages = [self._residents.committed(key) for key in _split(keys)]
        held = [page for page in pages if page is not None]
        pin = 0
        if held:
            for page in held:
                page.pins += 1
            pin = self._last_pin = self._last_pin + 1
            self._pins[pin] = _Pin(holder, now + self.settings.pin_ttl_s, held)
            self._n_pins_of[holder] += 1
        return self._found(pages, now, pin)

    def release(self, holder: int, pin: int, now: float, corrupt: Collection[int] = ()) -> list[Effect]:
        """Ends a pin; one that is not there any more, or somebody else's, is left alone.

        `corrupt`: slots of the pin whose bytes were found wrong; their pages leave, and the slots rest for
        `corrupt_hold_s`.
        """
        found = self._pins.get(pin)
        if found is not None and found.holder == holder:
            for page in found.pages:
                if page.slot in corrupt:
                    self._quarantine(page, now)
            self._unpin(pin, now)
        return self._effects.drain()

    def holds(self, key: bytes, slot: int, generation: int) -> bool:
        """Whether this page can be read in this use of this slot. No use of it."""
        page = self._residents.committed(key)
        return page is not None and (page.slot, page.generation) == (slot, generation)

    def has(self, key: bytes) -> bool:
        """Whether this page can be read. No use of it."""
        return self._residents.committed(key) is not None

    def use(self, slots: NDArray[np.uint32], generations: NDArray[np.uint32], now: float) -> None:
        """Remote readers used these slots."""
        for page in self._residents.in_slots(slots, generations):
            if page is not None and page.state is ResidentState.COMMITTED:
                self._residents.use(page, now)

    # ---- leaving

    def quarantine(self, slots: NDArray[np.uint32], generations: NDArray[np.uint32], now: float) -> list[Effect]:
        """These pages were found corrupt: they leave, and their slots rest for `corrupt_hold_s` or longer."""
        for page in self._residents.in_slots(slots, generations):
            if page is not None:
                self._quarantine(page, now)
        return self._effects.drain()

    def withdraw_cohort(self, cohort: int, now: float) -> list[Effect]:
        """All pages of a cohort leave, those being written too."""
        for page in [page for page in self._residents.by_key.values() if page.shape.cohort == cohort]:
            self._residents.leave(page, self.settings.lease_ttl_s, now)
        return self._effects.drain()

    def gone(self, client: int, now: float) -> list[Effect]:
        """The client's socket closed: its pins end; pages it was writing leave, their slots rest for
        `death_grace_s`."""
        for pin in [number for number, pin in self._pins.items() if pin.holder == client]:
            self._unpin(pin, now)
        for page in self._residents.with_writers():
            self._residents.drop_writer(page, client, self.settings.death_grace_s, now)
        return self._effects.drain()

    def tick(self, now: float) -> list[Effect]:
        """Lets time pass: reservations and pins expire, quarantines end. Call it by `next_wakeup`."""
        self._expire(now)
        return self._effects.drain()

    def next_wakeup(self) -> float | None:
        """When the next thing expires; None while nothing can."""
        times = [pin.expires_at for pin in islice(self._pins.values(), 1)]
        settles_at = self._residents.next_wakeup()
        return min(times if settles_at is None else [*times, settles_at], default=None)

    def _quarantine(self, page: Resident, now: float) -> None:
        if page.state is ResidentState.COMMITTED:
            n_before = min(self._n_corrupt[page.slot], CORRUPT_HOLD_GROWTHS_MAX)
            self._n_corrupt[page.slot] += 1
            self._residents.leave(page, self.settings.corrupt_hold_s * CORRUPT_HOLD_GROWTH**n_before, now)

    def _expire(self, now: float) -> None:
        self._residents.expire(now)
        for pin, _ in list(takewhile(lambda item: item[1].expires_at <= now, self._pins.items())):
            self._unpin(pin, now)

    def _unpin(self, pin: int, now: float) -> None:
        ended = self._pins.pop(pin)
        self._n_pins_of[ended.holder] -= 1
        if not self._n_pins_of[ended.holder]:
            del self._n_pins_of[ended.holder]
        for page in ended.pages:
            page.pins -= 1
            self._residents.settle(page, now)

    def _found(self, pages: list[Resident | None], now: float, pin: int = 0) -> Found:
        # Lists, and one array of each: to set three numbers of an array costs as much as all the rest here.
        slots, generations, offsets = [0] * len(pages), [0] * len(pages), [0] * len(pages)
        for idx, page in enumerate(pages):
            if page is not None:
                self._residents.use(page, now)
                slots[idx], generations[idx], offsets[idx] = page.slot, page.generation, self._extents.offset(page.slot)
        columns = np.array(slots, dtype=np.uint32), np.array(generations, dtype=np.uint32)
        resident = columns[1] != 0  # a generation in use is never 0
        return Found(resident, *columns, np.array(offsets, dtype=np.uint64), pin)

    # ---- accounts

    def slot_bytes(self, page_bytes: int) -> int:
        """What a page of this size takes."""
        return self._extents.slot_bytes(page_bytes)

    def n_pages_by_cohort(self) -> Counter[int]:
        """Committed pages of each cohort. O(pages)."""
        pages = self._residents.by_key.values()
        return Counter(page.shape.cohort for page in pages if page.state is ResidentState.COMMITTED)

    def stats(self) -> SlotStats:
        """Where the bytes are, and what happened so far. O(size classes + extents)."""
        extents = self._extents
        assigned = [(extent, extent.slot_bytes) for extent in extents.opened.values() if extent.size_class is not None]
        room_bytes = sum(extent.n_slots * slot_bytes for extent, slot_bytes in assigned)
        used_bytes = sum(extent.n_used * slot_bytes for extent, slot_bytes in assigned)
        free_bytes = sum(len(size_class.free) * size_class.slot_bytes for size_class in extents.classes.values())
        n_writing = len(self._residents.writing)
        return SlotStats(
            used_bytes=used_bytes,
            free_bytes=free_bytes,
            quarantined_bytes=room_bytes - used_bytes - free_bytes,
            assigned_bytes=room_bytes,
            spare_bytes=len(extents.spare) * extents.extent_bytes,
            unopened_bytes=(len(extents.unopened) + len(extents.opening)) * extents.extent_bytes,
            n_committed=len(self._residents.by_key) - n_writing,
            n_writing=n_writing,
            n_pins=len(self._pins),
            n_evicted=self._room.n_evicted,
            n_expired=self._residents.n_expired,
            n_corrupt=self._n_corrupt.total(),
        )

    def check(self) -> None:
        """Compares every index and counter with every other; for tests. O(slots).

        Raises:
            InternalError: they disagree; the message names the slot or extent.
        """
        self._extents.check()
        self._residents.check()
        pins = Counter(page.slot for pin in self._pins.values() for page in pin.pages)
        for slot, page in self._residents.by_slot.items():
            if page.pins != pins[slot]:
                raise InternalError(f"slot {slot} counts {page.pins} pins instead of {pins[slot]}")


def _split(keys: bytes) -> list[bytes]:
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]
