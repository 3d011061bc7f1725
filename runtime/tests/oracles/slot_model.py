"""What a native pool and a directory would know after the effects of a slot table; every illegal effect fails."""

from __future__ import annotations

import numpy as np
from kvpeer.core.slot_effects import (
    AssignExtent,
    Effect,
    MarkCommitted,
    MarkWithdrawn,
    MarkWriting,
    Published,
    TouchExtent,
    Withdrawn,
)
from kvpeer.core.slots import SlotTable
from kvpeer.model import KEY_BYTES

SLOTS_PER_EXTENT = 16384


def key_of(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def keys_of(*numbers: int) -> bytes:
    return b"".join(map(key_of, numbers))


def split(keys: bytes) -> list[bytes]:
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]


def partitions_of(keys: bytes) -> np.ndarray:
    return np.arange(len(keys) // KEY_BYTES, dtype=np.uint16)


class EffectModel:
    """Headers, extents and the directory's view, driven by effects alone."""

    def __init__(self, extent_bytes: int) -> None:
        self.extent_bytes = extent_bytes
        self.touching: list[int] = []
        self.touched: set[int] = set()
        self.slot_bytes: dict[int, int] = {}
        self.headers: dict[int, tuple[str, int]] = {}
        self.generations: dict[int, int] = {}
        self.keys: dict[int, bytes] = {}  # in the headers of committed slots
        self.directory: dict[bytes, tuple[int, int]] = {}
        self.partitions: dict[bytes, int] = {}  # of the pages in the directory

    def interval(self, slot: int) -> tuple[int, int]:
        extent, idx = divmod(slot, SLOTS_PER_EXTENT)
        start = extent * self.extent_bytes + idx * self.slot_bytes[extent]
        stop = start + self.slot_bytes[extent]
        assert stop <= (extent + 1) * self.extent_bytes
        return start, stop

    def perform(self, effects: list[Effect]) -> list[int]:
        """Performs the effects; returns the slots that are written anew."""
        written: list[int] = []
        for effect in effects:
            match effect:
                case TouchExtent(extent):
                    assert extent not in self.touched
                    self.touching.append(extent)
                case AssignExtent(extent, slot_bytes):
                    assert extent in self.touched
                    own = [s for s in self.headers if s // SLOTS_PER_EXTENT == extent]
                    assert all(self.headers[slot][0] == "withdrawn" for slot in own)
                    self.slot_bytes[extent] = slot_bytes
                case MarkWriting(slots, generations):
                    for slot, generation in zip(slots.tolist(), generations.tolist(), strict=True):
                        assert self.headers.get(slot, ("withdrawn", 0))[0] == "withdrawn"
                        assert generation > self.generations.get(slot, 0)
                        self.generations[slot] = generation
                        self.headers[slot] = ("writing", generation)
                        written.append(slot)
                case MarkCommitted(slots, generations, keys):
                    pages = zip(slots.tolist(), generations.tolist(), split(keys), strict=True)
                    for slot, generation, key in pages:
                        assert self.headers[slot] == ("writing", generation)
                        self.headers[slot] = ("committed", generation)
                        self.keys[slot] = key
                case MarkWithdrawn(slots, generations):
                    for slot, generation in zip(slots.tolist(), generations.tolist(), strict=True):
                        assert self.headers[slot] in {("writing", generation), ("committed", generation)}
                        self.headers[slot] = ("withdrawn", generation)
                case Published(keys, partitions, slots, generations, lengths, _):
                    assert (partitions.dtype, lengths.dtype) == (np.uint16, np.uint32)
                    pages = zip(split(keys), partitions.tolist(), lengths.tolist(), strict=True)
                    locations = zip(slots.tolist(), generations.tolist(), strict=True)
                    for (key, partition, length), (slot, generation) in zip(pages, locations, strict=True):
                        assert key not in self.directory
                        assert self.headers[slot] == ("committed", generation)
                        assert self.keys[slot] == key
                        start, stop = self.interval(slot)
                        assert 0 < length <= stop - start
                        self.directory[key] = (slot, generation)
                        self.partitions[key] = partition
                case Withdrawn(keys, partitions, slots, generations):
                    assert partitions.dtype == np.uint16
                    locations = zip(slots.tolist(), generations.tolist(), strict=True)
                    for key, partition, location in zip(split(keys), partitions.tolist(), locations, strict=True):
                        assert self.directory.pop(key) == location
                        assert self.partitions.pop(key) == partition
                case _:
                    raise AssertionError(f"no effect: {effect}")
        return written

    def open_extents(self, table: SlotTable) -> None:
        """Answers every TouchExtent so far."""
        while self.touching:
            extent = self.touching.pop()
            self.touched.add(extent)
            table.extent_opened(extent)
