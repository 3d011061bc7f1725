"""Pages of the own pool: copied out of shared memory, verified in the copy."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Event

import numpy as np
import numpy.typing as npt

from kvpeer.core.extents import SLOTS_PER_EXTENT
from kvpeer.model import Outcome, PeerUnavailableError, Verify
from kvpeer.native import PoolMap, monotonic_ns
from kvpeer.transport.base import FetchBatch, FetchResult

__all__ = ["ShmTransport"]

CHUNK_PAGES_MAX = 4096
"""Small pages between two looks at the deadline: about as long a copy as CHUNK_BYTES_MAX of large ones."""


@dataclass(frozen=True, slots=True, eq=False)
class _ContiguousPages:
    """The layout of pages that lie in one piece each: "block" b is the page at base + b."""

    base: npt.NDArray[np.uint64]
    stride: npt.NDArray[np.uint64]
    length: npt.NDArray[np.uint32]


class ShmTransport:
    """The pool behind `pool_map`, whose slots are slot_bytes each. Thread-safe.

    Reads one part of each page: `part`, whose length is the batch's; a page of one part is part 0. The map stays the
    caller's, who keeps it open as long as this is used.
    """

    name = "shm"

    def __init__(self, pool_map: PoolMap, *, extent_bytes: int, slot_bytes: int, part: int = 0, verify: Verify) -> None:
        self._map = pool_map
        self._n_extents = len(pool_map.payload_view()) // extent_bytes
        self._extent_bytes = extent_bytes
        self._slot_bytes = slot_bytes
        self._part = part
        self._verify = verify
        self._is_closed = False

    def fetch(self, batch: FetchBatch, deadline_ns: int, abort: Event | None = None) -> FetchResult:
        """See `Transport.fetch`. The deadline is looked at between chunks: a copy cannot be interrupted."""
        result = FetchResult.unavailable(len(batch))
        start = 0
        while start < len(batch) and not self._is_closed and not (abort is not None and abort.is_set()):
            if monotonic_ns() >= deadline_ns:
                result.end(start, Outcome.TIMEOUT, PeerUnavailableError("the deadline passed"))
                break
            stop = batch.chunk_stop(start, CHUNK_PAGES_MAX)
            result.outcomes[start:stop] = self._copy(batch.part(start, stop))
            start = stop
        return result

    def close(self) -> None:
        """See `Transport.close`."""
        self._is_closed = True

    def _copy(self, chunk: FetchBatch) -> npt.NDArray[np.uint8]:
        """Copies a chunk; pages of one length at a time, since a layout has one."""
        outcomes = np.full(len(chunk), Outcome.STALE, dtype=np.uint8)
        extents, indices = np.divmod(chunk.slots, np.uint32(SLOTS_PER_EXTENT))
        is_slot = (extents < self._n_extents) & (indices < self._extent_bytes // self._slot_bytes)
        offsets = extents.astype(np.uint64) * np.uint64(self._extent_bytes)
        offsets += indices.astype(np.uint64) * np.uint64(self._slot_bytes)
        keys = np.frombuffer(chunk.keys, dtype=np.uint8).reshape(len(chunk), -1)
        for length in np.unique(chunk.lengths[is_slot]):
            chosen = np.flatnonzero(is_slot & (chunk.lengths == length))
            base = chunk.destinations[chosen].min()
            layout = _ContiguousPages(
                np.array([base], dtype=np.uint64), np.ones(1, dtype=np.uint64), np.array([length], dtype=np.uint32)
            )
            outcomes[chosen] = self._map.scatter(
                chunk.slots[chosen],
                chunk.generations[chosen],
                offsets[chosen],
                keys[chosen],
                self._part,
                layout,
                (chunk.destinations[chosen] - base).astype(np.int64),
                self._verify,
            )
        return outcomes
