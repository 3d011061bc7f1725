"""The record of a page on the disk: one block in front of its bytes that says, and proves, what they are.

docs/formats.md has the byte table. A record that does not verify is nobody's fault: a kill or a power cut in the middle
of a write leaves one, and so does a slot that was used again before its row was replaced.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from kvpeer.core.chain import NAMESPACE_BYTES
from kvpeer.core.disk import PageFacts
from kvpeer.core.disk.segments import BLOCK_BYTES
from kvpeer.model import KEY_BYTES, PARTS_MAX
from kvpeer.native import PART_DTYPE, crc64
from kvpeer.native.checksum import ByteBuffer

__all__ = ["RECORD_BYTES", "bytes_are_right", "pack_record", "parts_of_record"]

RECORD_BYTES = BLOCK_BYTES

_MAGIC = b"KVPD"
_VERSION = 1
_CRC64_NVME = 1
_HEAD = struct.Struct(f"<4sHHIB3x{KEY_BYTES}s{NAMESPACE_BYTES}sQ")
_CHECKSUM = struct.Struct("<Q")
_CHECKED_BYTES = RECORD_BYTES - _CHECKSUM.size
_PART_BYTES = PART_DTYPE.itemsize


def pack_record(facts: PageFacts, sequence: int, parts: bytes, block: memoryview) -> None:
    """Writes the record into a block of RECORD_BYTES."""
    head = _HEAD.pack(
        _MAGIC, _VERSION, facts.n_parts, facts.length, _CRC64_NVME, facts.key, facts.namespace, sequence
    )  # fmt: skip
    used = _HEAD.size + len(parts)
    block[: _HEAD.size] = head
    block[_HEAD.size : used] = parts
    block[used:_CHECKED_BYTES] = bytes(_CHECKED_BYTES - used)
    block[_CHECKED_BYTES:RECORD_BYTES] = _CHECKSUM.pack(crc64(block[:_CHECKED_BYTES]))


def parts_of_record(block: memoryview, facts: PageFacts, sequence: int) -> NDArray[np.void] | None:
    """The part table, PART_DTYPE [n_parts], if the block is the record of this page in this use of its slot."""
    if _CHECKSUM.unpack(block[_CHECKED_BYTES:RECORD_BYTES])[0] != crc64(block[:_CHECKED_BYTES]):
        return None
    magic, version, n_parts, length, algorithm, key, namespace, found = _HEAD.unpack(block[: _HEAD.size])
    if (magic, version, algorithm, found) != (_MAGIC, _VERSION, _CRC64_NVME, sequence):
        return None
    if PageFacts(key, facts.partition, namespace, length, n_parts) != facts or not 1 <= n_parts <= PARTS_MAX:
        return None
    parts = np.frombuffer(bytes(block[_HEAD.size : _HEAD.size + n_parts * _PART_BYTES]), dtype=PART_DTYPE)
    return parts if _covers(parts, length) else None


def bytes_are_right(payload: ByteBuffer, parts: NDArray[np.void]) -> bool:
    """Whether every part of the page has its checksum. One pass over the page, without the GIL."""
    view = np.frombuffer(payload, dtype=np.uint8)
    spans = zip(parts["offset"].tolist(), parts["length"].tolist(), parts["checksum"].tolist(), strict=True)
    return all(crc64(view[offset : offset + length]) == checksum for offset, length, checksum in spans)


def _covers(parts: NDArray[np.void], length: int) -> bool:
    """Whether the parts are the page from its first byte to its last, in any order, without a gap."""
    order = np.argsort(parts["offset"], kind="stable")
    offsets, lengths = parts["offset"][order].astype(np.int64), parts["length"][order].astype(np.int64)
    ends = np.cumsum(lengths)
    return bool((lengths > 0).all() and ends[-1] == length and (offsets == ends - lengths).all())
