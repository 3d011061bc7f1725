"""Engine memory and a pool full of pages, larger than any cache, and a way to walk through both.

Every sample touches the next part of the memory, so that what it reads and writes was pushed out of the caches by the
samples before it: pages are as cold as they are in an engine, and product and reference find the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpeer.bench.reference import Addresses
from kvpeer.client import EngineLayout
from kvpeer.core.extents import SLOTS_PER_EXTENT
from kvpeer.model import AGENT_ID_BYTES, KEY_BYTES
from kvpeer.native import PART_DTYPE, Pool, PoolMap

__all__ = ["BATCH_PAGES", "MEMORY_BYTES", "PIECE_BYTES", "EngineMemory", "FullPool", "full_pool"]

MEMORY_BYTES = 256 << 20
"""Of each side of a copy: several times the last-level cache of most sockets (tens of MiB)."""

BATCH_PAGES = 32
"""Pages of one batch: one anchor group, and the batch for which the budgets of publish and fetch are meant."""

PIECE_BYTES = 32 << 10
"""K or V of one layer and one block: 16 tokens of 8 heads of 128 values of 2 bytes."""

EXTENT_BYTES = 64 << 20
"""As agents have it by default."""

RUN_ID = b"kvpeer benchmark"
assert len(RUN_ID) == AGENT_ID_BYTES  # noqa: S101 - a constant


class EngineMemory:
    """Blocks as an engine has them: K and V of each layer in an array of its own. `n_blocks` blocks of page_bytes."""

    def __init__(self, page_bytes: int, n_blocks: int) -> None:
        n_pieces = page_bytes // PIECE_BYTES
        self.n_blocks = n_blocks
        self._bytes = np.empty((n_pieces, n_blocks, PIECE_BYTES), np.uint8)
        words = self._bytes.reshape(-1).view(np.uint64)
        np.multiply(np.arange(len(words), dtype=np.uint64), np.uint64(0x9E3779B97F4A7C15), out=words)
        bases = self._bytes.ctypes.data + np.arange(n_pieces, dtype=np.uint64) * np.uint64(n_blocks * PIECE_BYTES)
        self.layout = EngineLayout(
            base=bases.astype(np.uint64),
            stride=np.full(n_pieces, PIECE_BYTES, np.uint64),
            length=np.full(n_pieces, PIECE_BYTES, np.uint32),
        )

    def pieces(self, blocks: npt.NDArray[np.int64]) -> Addresses:
        """Returns the addresses of these blocks' pieces, u8 [n, n_pieces]."""
        offsets = blocks.astype(np.uint64)[:, None] * self.layout.stride[None, :]
        return np.ascontiguousarray(self.layout.base[None, :] + offsets)


@dataclass(frozen=True, slots=True, eq=False)
class FullPool:
    """A pool in which every page is committed, mapped as a client maps it. Columns of n pages: slots and generations
    u4, offsets u8, keys u1 [n, 16]."""

    page_bytes: int
    pool: Pool
    map: PoolMap
    slots: npt.NDArray[np.uint32]
    generations: npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.uint64]
    keys: npt.NDArray[np.uint8]

    def pieces(self, pages: npt.NDArray[np.int64]) -> Addresses:
        """Returns the addresses of these pages' pieces in the client's mapping, u8 [n, n_pieces]."""
        starts = self.offsets[pages] + np.uint64(self.map.payload_view().ctypes.data)
        pieces = np.arange(0, self.page_bytes, PIECE_BYTES, dtype=np.uint64)
        return np.ascontiguousarray(starts[:, None] + pieces[None, :])

    def addresses(self, pages: npt.NDArray[np.int64]) -> Addresses:
        """Returns where these pages lie in the pool's own mapping, u8 [n]."""
        addresses: Addresses = self.offsets[pages] + np.uint64(self.pool.payload_address)
        return addresses


@contextmanager
def full_pool(page_bytes: int, layout: EngineLayout, n_bytes: int = MEMORY_BYTES) -> Iterator[FullPool]:
    """A pool of n_bytes whose page i holds the engine's block i. page_bytes is a whole number of memory pages."""
    n_extents, per_extent = n_bytes // EXTENT_BYTES, EXTENT_BYTES // page_bytes
    extent = np.arange(n_extents).repeat(per_extent)
    idx = np.tile(np.arange(per_extent), n_extents)
    slots = (extent * SLOTS_PER_EXTENT + idx).astype(np.uint32)
    offsets = (extent * EXTENT_BYTES + idx * page_bytes).astype(np.uint64)
    generations = np.ones(len(slots), np.uint32)
    keys = np.random.default_rng(0).integers(0, 256, (len(slots), KEY_BYTES), np.uint8)
    with Pool(n_bytes, EXTENT_BYTES, RUN_ID) as pool:
        for number in range(n_extents):
            pool.touch_extent(number)
            pool.assign_extent(number, page_bytes)
        pool.mark_writing(slots, generations)
        with PoolMap(*pool.fds, EXTENT_BYTES, RUN_ID) as mapped:
            parts = np.zeros((len(slots), 1), PART_DTYPE)
            parts["length"] = page_bytes
            parts["checksum"][:, 0] = mapped.gather(offsets, 0, layout, np.arange(len(slots), dtype=np.int64))
            pool.mark_committed(slots, generations, keys, parts)
            yield FullPool(page_bytes, pool, mapped, slots, generations, offsets, keys)
