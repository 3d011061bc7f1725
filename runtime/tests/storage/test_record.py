"""The record in front of a page proves what follows it, and nothing else passes for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpeer.native import PART_DTYPE, crc64
from kvpeer.storage.record import RECORD_BYTES, bytes_are_right, pack_record, parts_of_record

from storage.pool_memory import content, facts_of, key_of, parts_of


def packed(number: int = 1, sequence: int = 7, parts: bytes | None = None) -> bytearray:
    block = bytearray(b"\xee" * RECORD_BYTES)
    pack_record(facts_of(number), sequence, parts_of(content(number)) if parts is None else parts, memoryview(block))
    return block


def sealed(block: bytearray) -> memoryview:
    """The block with a checksum that fits it."""
    block[-8:] = crc64(block[:-8]).to_bytes(8, "little")
    return memoryview(block)


def test_a_record_gives_back_the_part_table_that_verifies_the_page() -> None:
    parts = parts_of_record(memoryview(packed()), facts_of(1), 7)
    assert parts is not None
    assert parts.tobytes() == parts_of(content(1))
    assert bytes_are_right(content(1), parts)
    assert not bytes_are_right(content(2), parts)


def test_the_bytes_of_a_record_are_those_of_the_format() -> None:
    block = packed()
    head = bytes.fromhex("4b565044010002001027000001000000") + key_of(1) + b"n" * 32
    assert bytes(block[:72]) == head + (7).to_bytes(8, "little")
    assert bytes(block[72:104]) == parts_of(content(1))
    assert not any(block[104:-8])
    assert bytes(block[-8:]) == crc64(block[:-8]).to_bytes(8, "little")


@pytest.mark.parametrize(
    "other",
    [
        replace(facts_of(1), key=key_of(2)), replace(facts_of(1), namespace=b"m" * 32),
        replace(facts_of(1), length=9999), replace(facts_of(1), n_parts=1),
    ],
    ids=["key", "namespace", "length", "n_parts"],
)  # fmt: skip
def test_the_record_of_another_page_is_none_of_this_one(other) -> None:
    assert parts_of_record(memoryview(packed()), other, 7) is None


def test_the_record_of_an_earlier_use_of_the_slot_is_none_of_this_one() -> None:
    assert parts_of_record(memoryview(packed()), facts_of(1), 8) is None


@given(st.integers(0, RECORD_BYTES * 8 - 1))
def test_no_flipped_bit_goes_unnoticed(bit: int) -> None:
    block = packed()
    block[bit // 8] ^= 1 << bit % 8
    assert parts_of_record(memoryview(block), facts_of(1), 7) is None


@pytest.mark.parametrize(("offset", "value"), [(0, 0), (4, 2), (12, 2)], ids=["magic", "version", "algorithm"])
def test_another_format_is_not_read_even_if_it_is_whole(offset: int, value: int) -> None:
    block = packed()
    block[offset] = value
    assert parts_of_record(sealed(block), facts_of(1), 7) is None


@pytest.mark.parametrize(
    "spans",
    [[(0, 5000), (5000, 4999)], [(0, 5001), (5000, 5000)], [(0, 10_000), (10_000, 0)], [(1, 4999), (5000, 5000)]],
    ids=["too short", "overlap", "empty part", "gap"],
)
def test_parts_that_are_not_the_whole_page_are_refused(spans: list[tuple[int, int]]) -> None:
    parts = np.array([(offset, length, 0) for offset, length in spans], dtype=PART_DTYPE).tobytes()
    assert parts_of_record(memoryview(packed(parts=parts)), facts_of(1), 7) is None


@given(st.integers(0, 1 << 64))
def test_arbitrary_bytes_are_no_record(seed: int) -> None:
    block = np.random.default_rng(seed).bytes(RECORD_BYTES)
    assert parts_of_record(memoryview(block), facts_of(1), 7) is None
    assert parts_of_record(sealed(bytearray(block)), facts_of(1), 7) is None
