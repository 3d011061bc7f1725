"""What the tests of pools and maps share: a pool with slots, strided engine memory, and pages between the two."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from kvpeer.native import PART_DTYPE, Pool, PoolMap

RUN_ID = bytes(range(16))
EXTENT_BYTES = 1 << 20
SLOT_BYTES = 64 << 10
SLOTS_PER_EXTENT = 16384


def u4(*values):
    return np.array(values, np.uint32)


def u8(*values):
    return np.array(values, np.uint64)


def i8(*values):
    return np.array(values, np.int64)


def key_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()[:16]


def new_pool(n_extents: int = 2) -> Pool:
    """A pool whose extents are touched and cut into slots."""
    pool = Pool(n_extents * EXTENT_BYTES, EXTENT_BYTES, RUN_ID)
    for extent in range(n_extents):
        pool.touch_extent(extent)
        pool.assign_extent(extent, SLOT_BYTES)
    return pool


def map_of(pool: Pool, run_id: bytes = RUN_ID) -> PoolMap:
    return PoolMap(*pool.fds, pool.extent_bytes, run_id)


def offset_of(slot: int) -> int:
    extent, idx = divmod(slot, SLOTS_PER_EXTENT)
    return extent * EXTENT_BYTES + idx * SLOT_BYTES


@dataclass
class EngineMemory:
    """n_blocks blocks; segment s has lengths[s] bytes a block and gaps[s] bytes between blocks."""

    lengths: list[int]
    gaps: list[int]
    n_blocks: int
    seed: int = 0

    def __post_init__(self):
        random = np.random.default_rng(self.seed)
        strides = [length + gap for length, gap in zip(self.lengths, self.gaps, strict=True)]
        self.segments = [random.integers(0, 256, stride * self.n_blocks, np.uint8) for stride in strides]
        self.base = u8(*(segment.ctypes.data for segment in self.segments))
        self.stride = u8(*strides)
        self.length = u4(*self.lengths)

    @property
    def part_bytes(self) -> int:
        return sum(self.lengths)

    def block(self, number: int) -> bytes:
        columns = zip(self.segments, self.stride.tolist(), self.lengths, strict=True)
        return b"".join(
            segment[number * stride : number * stride + length].tobytes() for segment, stride, length in columns
        )

    def gaps_of(self, number: int) -> bytes:
        """The bytes behind a block that no copy may touch."""
        columns = zip(self.segments, self.stride.tolist(), self.lengths, strict=True)
        return b"".join(
            segment[number * stride + length : (number + 1) * stride].tobytes() for segment, stride, length in columns
        )


def whole_page(checksums, part_bytes: int):
    """Part tables of pages that have one part each."""
    parts = np.zeros((len(checksums), 1), PART_DTYPE)
    parts["length"] = part_bytes
    parts["checksum"] = np.asarray(checksums).reshape(-1, 1)
    return parts


def publish(pool: Pool, view: PoolMap, slots, generations, engine: EngineMemory, blocks) -> bytes:
    """Publishes blocks as pages of one part; returns their packed keys."""
    keys = b"".join(key_of(slot) for slot in slots.tolist())
    offsets = u8(*(offset_of(slot) for slot in slots.tolist()))
    pool.mark_writing(slots, generations)
    checksums = view.gather(offsets, 0, engine, blocks)
    pool.mark_committed(slots, generations, keys, whole_page(checksums, engine.part_bytes))
    return keys
