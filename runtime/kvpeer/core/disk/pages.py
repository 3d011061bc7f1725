"""Which pages are on the disk and where, which are being written, and which go when there is no room.

A pure machine with one owner. The page that was not used for the longest time goes first, and what the pool still has
is in use; if the page's slots have another size than is needed, the whole segment around it goes with it and changes
its size. Pages that went are collected in
`gone`, for the owner to tell the directory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from kvpeer.core.disk.segments import SLOTS_PER_SEGMENT, Segments
from kvpeer.model import InternalError

__all__ = ["PAGES_MAX", "DiskPage", "DiskPages", "PageFacts"]

CHANCES_MAX = 64
"""Pages that the pool still has are passed over when one has to go, but not more than so many in a row: a disk no
larger than the pool is full of them."""

PAGES_MAX = 1 << 20
"""Pages known at once, whatever the capacity: about 450 MB of memory. A TiB of 1 MiB pages; with smaller ones the
capacity is not used up."""

GENERATION_MASK = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class PageFacts:
    """What a page is, wherever it lies. `namespace`: the digest that it belongs to."""

    key: bytes
    partition: int
    namespace: bytes
    length: int
    n_parts: int


class DiskPage:
    """One use of one slot. `is_wanted`: False from the moment that it went, also while it is being written."""

    __slots__ = ("facts", "is_wanted", "sequence", "slot")

    def __init__(self, facts: PageFacts, slot: int, sequence: int) -> None:
        self.facts = facts
        self.slot = slot
        self.sequence = sequence
        self.is_wanted = True

    @property
    def generation(self) -> int:
        """Tells this use of the slot from others, in the directory; never 0."""
        return self.sequence & GENERATION_MASK or 1


class DiskPages:
    """See the module docstring. Not thread-safe.

    Attributes:
        is_in_use: whether the pool has this page; to be set by the owner.
        n_evicted: pages that went for others.
    """

    def __init__(self, n_segments: int, segment_bytes: int) -> None:
        self.segments = Segments(n_segments, segment_bytes)
        self.is_in_use: Callable[[bytes], bool] = lambda key: False
        self.n_evicted = 0
        self._stored: OrderedDict[bytes, DiskPage] = OrderedDict()  # by key, the least recently used first
        self._writing: dict[bytes, DiskPage] = {}
        self._in_segment: dict[int, set[DiskPage]] = {}  # stored and being written
        self._next_sequence = 1
        self._gone: list[DiskPage] = []

    def __len__(self) -> int:
        return len(self._stored)

    # ---- writing

    def begin(self, facts: PageFacts) -> DiskPage | None:
        """A place for a page that is to be written there; None if it is here, is being written, or finds no room. Ends
        with `stored` or `failed`."""
        if facts.key in self._stored or facts.key in self._writing:
            return None
        slot_bytes = self.segments.slot_bytes(facts.length)
        if slot_bytes > self.segments.segment_bytes:
            return None
        if len(self._stored) + len(self._writing) >= PAGES_MAX:
            self._evict_coldest()
        slot = self.segments.take(slot_bytes)
        if slot is None and self._make_room(slot_bytes):
            slot = self.segments.take(slot_bytes)
        if slot is None:
            return None
        page = DiskPage(facts, slot, self._next_sequence)
        self._next_sequence += 1
        self._writing[facts.key] = page
        self._occupy(page)
        return page

    def stored(self, page: DiskPage) -> bool:
        """The page can be read from now on. False if it went in the meantime, and cannot."""
        del self._writing[page.facts.key]
        if not page.is_wanted:
            self._vacate(page)
            return False
        self._stored[page.facts.key] = page
        return True

    def failed(self, page: DiskPage) -> None:
        """The page was not written."""
        del self._writing[page.facts.key]
        page.is_wanted = False
        self._vacate(page)

    def refuse_segment(self, segment: int) -> None:
        """There is no room for the file of a segment: what was being written there failed."""
        for page in list(self._in_segment.get(segment, ())):
            self.failed(page)
        self.segments.refuse(segment)

    # ---- reading

    def find(self, key: bytes) -> DiskPage | None:
        """The page, if it can be read. No use of it."""
        return self._stored.get(key)

    def use(self, key: bytes) -> None:
        """Notes a use of a page that can be read."""
        self._stored.move_to_end(key)

    def is_known(self, key: bytes) -> bool:
        """Whether the page can be read, or is being written."""
        return key in self._stored or key in self._writing

    # ---- leaving

    def drop(self, page: DiskPage) -> None:
        """The page turned out to be unreadable. Does nothing if it went before."""
        if self._stored.get(page.facts.key) is page:
            self._leave(page)

    def forget(self, namespace: bytes) -> None:
        """All pages of a namespace go, those being written too."""
        for page in [page for page in self._stored.values() if page.facts.namespace == namespace]:
            self._leave(page)
        for page in self._writing.values():
            if page.facts.namespace == namespace:
                page.is_wanted = False

    def take_gone(self) -> list[DiskPage]:
        """Pages that could be read and have gone since the last call."""
        gone, self._gone = self._gone, []
        return gone

    # ---- the index that was found on the disk

    def restore(self, slot_bytes_of: Mapping[int, int], pages: Iterable[DiskPage]) -> None:
        """Takes in what was found: the slot size of each segment, and the pages, which lie in their slots, in the order
        of their writing. No key and no slot comes twice. Before anything else is done."""
        for page in pages:
            self._stored[page.facts.key] = page
            self._in_segment.setdefault(page.slot // SLOTS_PER_SEGMENT, set()).add(page)
            self._next_sequence = max(self._next_sequence, page.sequence + 1)
        for segment, slot_bytes in slot_bytes_of.items():
            found = self._in_segment.get(segment, set())
            self.segments.restore(segment, slot_bytes, {page.slot for page in found})

    def all(self) -> list[DiskPage]:
        """Every page that can be read, the least recently used first."""
        return list(self._stored.values())

    # ---- inside

    def _make_room(self, slot_bytes: int) -> bool:
        """Lets go what was not used for the longest time. False if everything is being written."""
        self._give_chances()
        for page in self._stored.values():
            segment = page.slot // SLOTS_PER_SEGMENT
            if self.segments.slot_bytes_of[segment] == slot_bytes:
                self.n_evicted += 1
                self._leave(page)
                return True
            around = self._in_segment[segment]
            if all(other.facts.key in self._stored for other in around):
                self.n_evicted += len(around)
                for other in list(around):
                    self._leave(other)
                self.segments.release(segment)
                return True
        return False

    def _evict_coldest(self) -> None:
        self._give_chances()
        coldest = next(iter(self._stored.values()), None)
        if coldest is not None:
            self.n_evicted += 1
            self._leave(coldest)

    def _give_chances(self) -> None:
        """What would go next and is in use counts as used just now."""
        for key in list(islice(self._stored, CHANCES_MAX)):
            if not self.is_in_use(key):
                return
            self._stored.move_to_end(key)

    def _leave(self, page: DiskPage) -> None:
        del self._stored[page.facts.key]
        page.is_wanted = False
        self._vacate(page)
        self._gone.append(page)

    def _occupy(self, page: DiskPage) -> None:
        self._in_segment.setdefault(page.slot // SLOTS_PER_SEGMENT, set()).add(page)

    def _vacate(self, page: DiskPage) -> None:
        self._in_segment[page.slot // SLOTS_PER_SEGMENT].discard(page)
        self.segments.put_back(page.slot)

    def check(self) -> None:
        """Compares the indices with each other; for tests. O(pages).

        Raises:
            InternalError: they disagree.
        """
        pages = [*self._stored.values(), *self._writing.values()]
        slots = {page.slot for page in pages}
        if len(slots) != len(pages):
            raise InternalError("two pages lie in one slot")
        if sum(map(len, self._in_segment.values())) != len(pages):
            raise InternalError("a segment lists pages that are not there")
        for segment, slot_bytes in self.segments.slot_bytes_of.items():
            n_used = sum(page.slot // SLOTS_PER_SEGMENT == segment for page in pages)
            if n_used != self.segments.n_used(segment) or n_used > self.segments.segment_bytes // slot_bytes:
                raise InternalError(f"segment {segment} counts {self.segments.n_used(segment)} used slots of {n_used}")
