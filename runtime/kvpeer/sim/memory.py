"""The memory of one simulated pool: payload bytes, slot headers, and the reading of both while they change.

A model of what `runtime/native` does with shared memory, simple enough to be seen to be right: a page is read as
header, payload in pieces, header again, with other things happening in between. `verified` is the reader's rule of
docs/formats.md. The real code has tests of its own that force reuse in the middle of reads.
"""

from __future__ import annotations

import hashlib
import zlib
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpeer.core.extents import SLOTS_PER_EXTENT
from kvpeer.model import AgentId, InternalError, Outcome

__all__ = ["Header", "Part", "PoolMemory", "SlotState", "checksum", "page_bytes_of", "verified"]


class SlotState(IntEnum):
    """As in the header of docs/formats.md."""

    FREE = 0
    WRITING = 1
    COMMITTED = 2
    WITHDRAWN = 3


class Part(NamedTuple):
    offset: int
    length: int
    checksum: int


class Header(NamedTuple):
    """What a slot says of itself; whole or not at all, as the header's own checksum ensures."""

    run_id: AgentId
    state: SlotState
    generation: int
    key: bytes = b""
    parts: tuple[Part, ...] = ()

    @property
    def length(self) -> int:
        return sum(part.length for part in self.parts)


class PoolMemory:
    """Payload and headers. The agent writes headers, whoever has a reservation writes payload: nothing checks it."""

    def __init__(self, run_id: AgentId, n_extents: int, extent_bytes: int) -> None:
        self.payload = bytearray(n_extents * extent_bytes)
        self.headers: dict[int, Header] = {}
        self._run_id = run_id
        self._extent_bytes = extent_bytes
        self._slot_bytes: dict[int, int] = {}

    def assign_extent(self, extent: int, slot_bytes: int) -> None:
        """The extent is cut into slots of this size from now on."""
        for slot in [slot for slot in self.headers if slot // SLOTS_PER_EXTENT == extent]:
            if self.headers[slot].state in (SlotState.WRITING, SlotState.COMMITTED):
                raise InternalError(f"extent {extent} changes hands while slot {slot} is in use")
        self._slot_bytes[extent] = slot_bytes

    def address(self, slot: int) -> int:
        """Where the slot's payload begins."""
        extent, idx = divmod(slot, SLOTS_PER_EXTENT)
        return extent * self._extent_bytes + idx * self._slot_bytes[extent]

    def mark(self, slots: NDArray[np.uint32], generations: NDArray[np.uint32], state: SlotState) -> None:
        """The headers say so; a page that was there keeps its key and parts only when it is withdrawn."""
        for slot, generation in zip(slots.tolist(), generations.tolist(), strict=True):
            if state is SlotState.WITHDRAWN and slot in self.headers:
                self.headers[slot] = self.headers[slot]._replace(state=state, generation=generation)
            else:
                self.headers[slot] = Header(self._run_id, state, generation)

    def commit(self, slot: int, generation: int, key: bytes, parts: tuple[Part, ...]) -> None:
        """The header names the page and its checksums."""
        self.headers[slot] = Header(self._run_id, SlotState.COMMITTED, generation, key, parts)

    def header(self, slot: int) -> Header | None:
        """None for a slot that was never used."""
        return self.headers.get(slot)


def verified(
    before: Header | None, payload: bytes | bytearray, after: Header | None, want: Header, part: int | None = None
) -> Outcome:
    """What a reader got who wanted the page of `want` (run, generation and key count) and read this.

    `part`: which part of the page `payload` is; None for the whole page.
    """
    if before is None or after is None or not _is_same(before, want) or before != after:
        return Outcome.STALE
    parts = before.parts if part is None else before.parts[part : part + 1]
    start = 0 if part is None else parts[0].offset
    for piece in parts:
        offset = piece.offset - start
        if checksum(payload[offset : offset + piece.length]) != piece.checksum:
            return Outcome.CORRUPT
    return Outcome.HIT


def _is_same(header: Header, want: Header) -> bool:
    """Whether the header is that of the wanted page, readable."""
    is_location = (header.run_id, header.generation, header.key) == (want.run_id, want.generation, want.key)
    return is_location and header.state is SlotState.COMMITTED


def checksum(payload: bytes | bytearray) -> int:
    """Stands for CRC-64."""
    return zlib.crc32(payload)


def page_bytes_of(key: bytes, n_bytes: int) -> bytes:
    """What the page of this key holds, wherever it is: so that every hit can be checked."""
    seed = hashlib.blake2b(key, digest_size=64).digest()
    return (seed * (n_bytes // 64 + 1))[:n_bytes]
