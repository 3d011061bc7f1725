"""Extents and size classes: which slots exist, which are free, and who gets the next extent.

The pool is cut into extents of a fixed size. An extent is *unopened* (no memory behind it), *opening*, *spare*
(opened, in no class), *assigned* to a size class, or *retiring* (its pages are on their way out and it changes class
when the last slot is free). Slot id = extent * SLOTS_PER_EXTENT + index, whatever the class; generations belong to
slot ids and survive a change of class.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable

from kvpeer.core.eviction.base import EvictionPolicy
from kvpeer.core.resident import EffectBatch
from kvpeer.model import InternalError

__all__ = [
    "GENERATION_MAX",
    "SIZE_CLASSES_MAX",
    "SLOTS_PER_EXTENT",
    "SLOT_ALIGNMENT_BYTES",
    "Extent",
    "Extents",
    "SizeClass",
]

SLOTS_PER_EXTENT = 16384
"""Slot ids reserved for an extent; equal to KVP_SLOTS_PER_EXTENT of the native pool."""

SLOT_ALIGNMENT_BYTES = 4096
"""Slot sizes are multiples of a memory page: copies start aligned, and few size classes cover many page sizes."""

SIZE_CLASSES_MAX = 16
"""Page sizes alive in one pool. One engine has one, a hybrid model a handful; more would cut the pool into idle
pieces."""

GENERATION_MAX = 0xFFFF_FFFF
"""Generations are 32 bits; after this one comes 1, because 0 means never used."""


class Extent:
    """One extent that has memory behind it."""

    __slots__ = (
        "generations",
        "n_busy",
        "n_settling",
        "n_slots",
        "n_used",
        "next_class",
        "number",
        "size_class",
        "used_at",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.size_class: SizeClass | None = None
        self.next_class: SizeClass | None = None  # set while retiring
        self.n_slots = 0
        self.n_busy = 0  # slots that are not free
        self.n_used = 0  # busy slots whose page is being written or committed
        self.n_settling = 0  # busy slots that come free by the mere passing of time
        self.used_at = 0.0  # last use of any of its pages
        self.generations = array("I")  # by index; as long as the largest n_slots so far

    @property
    def first_slot(self) -> int:
        return self.number * SLOTS_PER_EXTENT

    @property
    def slot_bytes(self) -> int:
        """Size of its slots; 0 for an extent in no class."""
        return 0 if self.size_class is None else self.size_class.slot_bytes

    def is_assigned_to_other(self, size_class: SizeClass) -> bool:
        """True if the extent is in use by a class other than this one, and not on its way to a third."""
        return self.size_class is not None and self.size_class is not size_class and self.next_class is None


class SizeClass:
    """The slots of one size."""

    __slots__ = ("extents", "free", "n_incoming", "policy", "slot_bytes")

    def __init__(self, slot_bytes: int, policy: EvictionPolicy) -> None:
        self.slot_bytes = slot_bytes
        self.policy = policy
        self.extents: dict[int, Extent] = {}
        self.free: deque[int] = deque()
        self.n_incoming = 0  # extents that retire in favour of this class

    @property
    def n_slots(self) -> int:
        return sum(extent.n_slots for extent in self.extents.values() if extent.next_class is None)

    @property
    def n_settling(self) -> int:
        """Slots that come free for this class by the mere passing of time."""
        return sum(extent.n_settling for extent in self.extents.values() if extent.next_class is None)


class Extents:
    """All extents of a pool. Changes are reported to the effect batch of the owner. Not safe for concurrent access."""

    def __init__(
        self, n_extents: int, extent_bytes: int, policy: Callable[[], EvictionPolicy], effects: EffectBatch
    ) -> None:
        self.extent_bytes = extent_bytes
        self.unopened: deque[int] = deque(range(n_extents))
        self.opening: set[int] = set()
        self.spare: deque[Extent] = deque()
        self.opened: dict[int, Extent] = {}
        self.classes: dict[int, SizeClass] = {}
        self.may_grow = True
        self._policy = policy
        self._effects = effects

    # ---- opening

    def open_ahead(self, n_extents: int) -> None:
        """Asks for extents to be opened until `n_extents` are spare or being opened."""
        while self.may_grow and self.unopened and len(self.spare) + len(self.opening) < n_extents:
            number = self.unopened.popleft()
            self.opening.add(number)
            self._effects.touch_extent(number)

    def opened_extent(self, number: int) -> None:
        """The extent has memory behind it now."""
        self.opening.remove(number)
        extent = self.opened[number] = Extent(number)
        self.spare.append(extent)

    def refused_extent(self, number: int) -> None:
        """The extent could not be opened: no further one is asked for until `may_grow` is set again."""
        self.opening.remove(number)
        self.unopened.appendleft(number)
        self.may_grow = False

    # ---- classes

    def size_class(self, page_bytes: int) -> SizeClass | None:
        """The class for pages of this size, made if need be; None if there are too many classes already."""
        slot_bytes = self.slot_bytes(page_bytes)
        found = self.classes.get(slot_bytes)
        if found is None and len(self.classes) >= SIZE_CLASSES_MAX:
            self._forget_empty_classes()
        if found is None and len(self.classes) < SIZE_CLASSES_MAX:
            found = self.classes[slot_bytes] = SizeClass(slot_bytes, self._policy())
        return found

    def slot_bytes(self, page_bytes: int) -> int:
        """The slot size for a page size: rounded up, and no smaller than slot ids can number."""
        rounded = -(-page_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
        return max(rounded, self.extent_bytes // SLOTS_PER_EXTENT)

    def assign_spare(self, size_class: SizeClass) -> bool:
        """Gives a spare extent to the class; False if there is none."""
        if not self.spare:
            return False
        self._assign(self.spare.popleft(), size_class)
        return True

    def _assign(self, extent: Extent, size_class: SizeClass) -> None:
        extent.size_class = size_class
        extent.n_slots = min(self.extent_bytes // size_class.slot_bytes, SLOTS_PER_EXTENT)
        extent.generations.extend([0] * (extent.n_slots - len(extent.generations)))
        size_class.extents[extent.number] = extent
        size_class.free.extend(range(extent.first_slot, extent.first_slot + extent.n_slots))
        self._effects.assign_extent(extent.number, size_class.slot_bytes)

    # ---- slots

    def extent_of(self, slot: int) -> Extent:
        return self.opened[slot // SLOTS_PER_EXTENT]

    def class_of(self, slot: int) -> SizeClass:
        size_class = self.extent_of(slot).size_class
        if size_class is None:
            raise InternalError(f"slot {slot} is in an extent of no class")
        return size_class

    def use(self, slot: int, now: float) -> None:
        """Notes a use of the slot. One look-up: long prompts use thousands of slots at a time."""
        extent = self.opened[slot // SLOTS_PER_EXTENT]
        extent.used_at = now
        if extent.size_class is None:
            raise InternalError(f"slot {slot} is in an extent of no class")
        extent.size_class.policy.use(slot)

    def offset(self, slot: int) -> int:
        """Byte offset of the slot in the pool's payload."""
        number, idx = divmod(slot, SLOTS_PER_EXTENT)
        return number * self.extent_bytes + idx * self.opened[number].slot_bytes

    def take(self, size_class: SizeClass) -> tuple[int, int] | None:
        """A free slot of the class with its new generation; None if there is none."""
        if not size_class.free:
            return None
        slot = size_class.free.popleft()
        extent = self.extent_of(slot)
        idx = slot - extent.first_slot
        generation = extent.generations[idx]
        generation = 1 if generation == GENERATION_MAX else generation + 1
        extent.generations[idx] = generation
        extent.n_busy += 1
        return slot, generation

    def put_back(self, slot: int) -> None:
        """The slot is free. With the last busy slot of a retiring extent the extent changes class."""
        extent = self.extent_of(slot)
        extent.n_busy -= 1
        if extent.next_class is not None:
            self._finish_retiring(extent)
        else:
            self.class_of(slot).free.append(slot)

    # ---- taking over

    def retire(self, extent: Extent, successor: SizeClass) -> None:
        """Takes the extent's free slots out of use; it goes to `successor` when its last busy slot is put back."""
        size_class = self.class_of(extent.first_slot)
        size_class.free = deque(slot for slot in size_class.free if slot // SLOTS_PER_EXTENT != extent.number)
        extent.next_class = successor
        successor.n_incoming += 1
        self._finish_retiring(extent)

    def _finish_retiring(self, extent: Extent) -> None:
        successor = extent.next_class
        if extent.n_busy or successor is None:
            return
        former = self.class_of(extent.first_slot)
        del former.extents[extent.number]
        extent.next_class = None
        successor.n_incoming -= 1
        self._assign(extent, successor)

    def _forget_empty_classes(self) -> None:
        for size_class in list(self.classes.values()):
            if not size_class.extents and not size_class.n_incoming:
                del self.classes[size_class.slot_bytes]

    def check(self) -> None:
        """Raises InternalError if the books do not balance."""
        n_extents = len(self.unopened) + len(self.opening) + len(self.opened)
        seen = {*self.unopened, *self.opening, *self.opened}
        if len(seen) != n_extents:
            raise InternalError("an extent is in two states at once")
        for size_class in self.classes.values():
            if len(set(size_class.free)) != len(size_class.free):
                raise InternalError(f"a slot of {size_class.slot_bytes} bytes is free twice")
            for extent in size_class.extents.values():
                n_free = sum(slot // SLOTS_PER_EXTENT == extent.number for slot in size_class.free)
                expected = 0 if extent.next_class else extent.n_slots - extent.n_busy
                if extent.size_class is not size_class or n_free != expected:
                    raise InternalError(f"extent {extent.number} has {n_free} free slots instead of {expected}")
