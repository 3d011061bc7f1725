"""Memory that stands for a pool: pages whose bytes follow from their numbers, and whether they still lie there."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from pathlib import Path

import numpy as np
from kvpeer.core.disk import DiskPage, Offer, PageFacts
from kvpeer.native import PART_DTYPE, crc64
from kvpeer.storage.folder import DiskFolder, PageWrite

PAGE_BYTES = 10_000
"""No multiple of a block, so that the padding is there, too."""

SLOT_BYTES = 12 << 10
N_SLOTS = 64
NAMESPACE = b"n" * 32
SEGMENT_BYTES = 256 << 10
N_SEGMENTS = 2


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def facts_of(number: int, namespace: bytes = NAMESPACE, n_parts: int = 2) -> PageFacts:
    return PageFacts(key_of(number), number % 4096, namespace, PAGE_BYTES, n_parts)


def content(number: int) -> bytes:
    return np.random.default_rng(number).bytes(PAGE_BYTES)


def parts_of(page: bytes, n_parts: int = 2) -> bytes:
    bounds = np.linspace(0, len(page), n_parts + 1).astype(int).tolist()
    rows = [(a, b - a, crc64(page[a:b])) for a, b in itertools.pairwise(bounds)]
    return np.array(rows, dtype=PART_DTYPE).tobytes()


class PoolMemory:
    """Slot s holds a page in generation `generations[s]`. See `PoolPages`."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, N_SLOTS * SLOT_BYTES)
        self.view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.pinned: set[bytes] = set()
        """Keys that the disk is told to be in use; nothing is, unless a test says so."""
        self.there: dict[bytes, tuple[int, int]] = {}
        self._n_put = 0

    def put(self, number: int, namespace: bytes = NAMESPACE) -> Offer:
        """Puts a page into the next slot; what was there is gone."""
        slot, generation = self._n_put % N_SLOTS, self._n_put // N_SLOTS + 1
        self._n_put += 1
        self.there = {key: place for key, place in self.there.items() if place[0] != slot}
        self.there[key_of(number)] = (slot, generation)
        page = content(number)
        self.view[slot * SLOT_BYTES : slot * SLOT_BYTES + PAGE_BYTES] = page
        address = self.address + slot * SLOT_BYTES
        return Offer(facts_of(number, namespace), slot, generation, address, parts_of(page))

    def has(self, key: bytes) -> bool:
        return key in self.pinned

    def holds(self, key: bytes, slot: int, generation: int) -> bool:
        return self.there.get(key) == (slot, generation)

    def bytes_of(self, slot: int) -> bytes:
        return bytes(self.view[slot * SLOT_BYTES : slot * SLOT_BYTES + PAGE_BYTES])


def open_folder(path: Path) -> DiskFolder:
    return DiskFolder(path, N_SEGMENTS, SEGMENT_BYTES)


def write(folder: DiskFolder, offers: list[Offer], dropped: tuple[int, ...] = ()) -> list[DiskPage]:
    """Writes pages and commits them, as the store does."""
    pages = [folder.pages.begin(offer.facts) for offer in offers]
    segments = folder.pages.segments
    writes = [PageWrite(page, offer, *segments.place(page.slot)) for page, offer in zip(pages, offers, strict=True)]
    assert folder.write(writes) == set()
    folder.commit({write.segment: segments.slot_bytes_of[write.segment] for write in writes}, pages, dropped)
    for page in pages:
        folder.pages.stored(page)
    return pages
