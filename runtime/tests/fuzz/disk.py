"""What is read from the folder of the disk tier: the record of a page, and the index.

Whatever is there, the folder opens or says why not, its places never overlap, and nothing is taken for a page that has
not the bytes which its record says.
"""

from __future__ import annotations

import contextlib
import mmap
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from kvpeer.core.disk import Offer, PageFacts
from kvpeer.model import Outcome
from kvpeer.native import PART_DTYPE, crc64
from kvpeer.storage import DiskError, DiskFolder
from kvpeer.storage.folder import PageWrite
from kvpeer.storage.record import RECORD_BYTES, bytes_are_right, parts_of_record

__all__ = ["index_seeds", "record_seeds", "take_index", "take_record"]

SEGMENT_BYTES = 64 << 10
PAGE_BYTES = 5000
PAGE = bytes(range(250)) * 20
_SEALED = 1  # the first byte of a record's input: its checksum is made to fit

_folder = tempfile.TemporaryDirectory(prefix="kvpeer-fuzz-disk-")
_memory = mmap.mmap(-1, 16 << 10)
_address = np.frombuffer(_memory, dtype=np.uint8).ctypes.data


def take_record(content: bytes) -> None:
    """A record that verifies has parts that are the whole page, and no other page passes for it."""
    block = bytearray(content[1 : 1 + RECORD_BYTES].ljust(RECORD_BYTES, b"\0"))
    if content[:1] == bytes([_SEALED]):
        block[-8:] = crc64(block[:-8]).to_bytes(8, "little")
    facts = PageFacts(
        bytes(block[16:32]), 0, bytes(block[32:64]), int.from_bytes(block[8:12], "little"),
        int.from_bytes(block[6:8], "little"),
    )  # fmt: skip
    sequence = int.from_bytes(block[64:72], "little")
    parts = parts_of_record(memoryview(block), facts, sequence)
    if parts is None:
        return
    covered = np.zeros(min(facts.length, 1 << 20) + 1, dtype=np.int64)
    if facts.length <= 1 << 20:
        for offset, length, _ in parts.tolist():
            assert offset + length <= facts.length
            covered[offset : offset + length] += 1
        assert (covered[: facts.length] == 1).all()
        bytes_are_right(bytes(facts.length), parts)
    assert parts_of_record(memoryview(block), facts, sequence + 1) is None


def take_index(content: bytes) -> None:
    """A folder with this file as its index, beside a segment that holds one page."""
    path = Path(_folder.name) / "kv"
    path.mkdir(exist_ok=True)
    for left in path.glob("index.sqlite*"):
        left.unlink()
    (path / "index.sqlite").write_bytes(content)
    (path / "0.pages").write_bytes(_segment())
    with contextlib.suppress(DiskError):
        folder = DiskFolder(path, 2, SEGMENT_BYTES)
        try:
            _check(folder)
        finally:
            folder.close()


def _check(folder: DiskFolder) -> None:
    folder.pages.check()
    for page in folder.pages.all():
        segment, offset = folder.pages.segments.place(page.slot)
        assert 0 <= offset <= SEGMENT_BYTES - folder.pages.segments.slot_bytes(page.facts.length)
        if page.facts.length > len(_memory):
            continue
        got = folder.read(page, segment, offset, _address)
        if got.outcome is Outcome.HIT:
            assert _memory[: page.facts.length] == PAGE
            assert page.facts.key == b"k" * 16
    for number in range(8):
        folder.pages.begin(PageFacts(bytes([number]) * 16, 0, bytes(32), PAGE_BYTES, 1))
    folder.pages.check()


def _segment() -> bytes:
    """The file of a segment with the page of the seeds in its first slot."""
    if not _made:
        _made.extend(_make())
    return _made[0]


def index_seeds() -> Iterator[tuple[str, bytes]]:
    """A real index, in the smallest pages that SQLite has."""
    _segment()
    yield "index", _made[1]


def record_seeds() -> Iterator[tuple[str, bytes]]:
    """A real record, as it is and to be sealed."""
    for first in (0, _SEALED):
        yield f"record-{first}", bytes([first]) + _segment()[:256]
    yield "record-whole", b"\0" + _segment()[:RECORD_BYTES]


_made: list[bytes] = []


def _make() -> tuple[bytes, bytes]:
    path = Path(_folder.name) / "made"
    folder = DiskFolder(path, 2, SEGMENT_BYTES)
    _memory[:PAGE_BYTES] = PAGE
    facts = PageFacts(b"k" * 16, 7, b"n" * 32, PAGE_BYTES, 2)
    rows = [(0, 2000, crc64(PAGE[:2000])), (2000, 3000, crc64(PAGE[2000:]))]
    page = folder.pages.begin(facts)
    assert page is not None
    offer = Offer(facts, 0, 1, _address, np.array(rows, dtype=PART_DTYPE).tobytes())
    folder.write([PageWrite(page, offer, *folder.pages.segments.place(page.slot))])
    folder.commit({0: folder.pages.segments.slot_bytes_of[0]}, [page], [])
    folder.close()
    database = sqlite3.connect(path / "index.sqlite", isolation_level=None)
    for statement in ("journal_mode = DELETE", "page_size = 512"):
        database.execute(f"PRAGMA {statement}")
    database.execute("VACUUM")
    database.close()
    return (path / "0.pages").read_bytes(), (path / "index.sqlite").read_bytes()
