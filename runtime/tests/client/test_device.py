"""The copy interface over a real pool: blocks to slots and back, byte for byte."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
from kvpeer.client.device import EngineLayout, NativeCopier, SlotPages
from kvpeer.model import LocalProtocolError, Outcome, Verify
from kvpeer.native import PART_DTYPE, Pool, PoolMap

RUN_ID = b"r" * 16
EXTENT_BYTES = 1 << 20
SLOT_BYTES = 16384
N_BLOCKS, N_LAYERS, LAYER_BYTES = 12, 3, 4096


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(EXTENT_BYTES, EXTENT_BYTES, RUN_ID)
    pool.touch_extent(0)
    pool.assign_extent(0, SLOT_BYTES)
    yield pool
    pool.close()


@pytest.fixture
def mapped(pool: Pool) -> Iterator[PoolMap]:
    payload_fd, header_fd = pool.fds
    mapped = PoolMap(payload_fd, header_fd, EXTENT_BYTES, RUN_ID)
    yield mapped
    mapped.close()


def memory(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (N_LAYERS, N_BLOCKS, LAYER_BYTES), np.uint8)


def layout_of(memory: np.ndarray) -> EngineLayout:
    return EngineLayout(
        base=np.array([layer.ctypes.data for layer in memory], np.uint64),
        stride=np.full(N_LAYERS, LAYER_BYTES, np.uint64),
        length=np.full(N_LAYERS, LAYER_BYTES, np.uint32),
    )


def commit(pool: Pool, slots: np.ndarray, generations: np.ndarray, keys: bytes, checksums: np.ndarray) -> None:
    parts = np.zeros((len(slots), 1), PART_DTYPE)
    parts["length"], parts["checksum"] = N_LAYERS * LAYER_BYTES, checksums[:, None]
    pool.mark_committed(slots, generations, keys, parts)


def test_what_was_gathered_is_scattered_into_other_blocks_unchanged(pool: Pool, mapped: PoolMap) -> None:
    source, target = memory(1), np.zeros_like(memory(1))
    slots, generations = np.array([0, 1, 2], np.uint32), np.ones(3, np.uint32)
    offsets = slots.astype(np.uint64) * SLOT_BYTES
    keys = b"".join(hashlib.sha256(bytes([n])).digest()[:16] for n in range(3))
    pool.mark_writing(slots, generations)
    copier = NativeCopier(layout_of(source))
    copier.wait_for(copier.fence())
    checksums = copier.gather(mapped, offsets, 0, np.array([7, 2, 9], np.int64))
    commit(pool, slots, generations, keys, checksums)
    outcomes = NativeCopier(layout_of(target)).scatter(
        mapped, SlotPages(keys, slots, generations, offsets), 0, 0, np.array([1, 3, 5], np.int64), Verify.FULL
    )
    assert outcomes.tolist() == [Outcome.HIT] * 3
    assert np.array_equal(target[:, [1, 3, 5]], source[:, [7, 2, 9]])
    assert not target[:, [0, 2, 4, 6, 7, 8, 9, 10, 11]].any()


def test_bytes_that_changed_in_the_pool_are_no_hit(pool: Pool, mapped: PoolMap) -> None:
    source = memory(1)
    slots, generations, offsets = np.array([0], np.uint32), np.array([1], np.uint32), np.array([0], np.uint64)
    pool.mark_writing(slots, generations)
    copier = NativeCopier(layout_of(source))
    checksums = copier.gather(mapped, offsets, 0, np.array([4], np.int64))
    commit(pool, slots, generations, b"k" * 16, checksums)
    mapped.payload_view()[100] ^= 1
    pages = SlotPages(b"k" * 16, slots, generations, offsets)
    assert copier.scatter(mapped, pages, 0, 0, np.array([0], np.int64), Verify.FULL).tolist() == [Outcome.CORRUPT]


@pytest.mark.parametrize("column", ["base", "stride", "length"])
def test_a_layout_whose_columns_do_not_fit_is_refused(column: str) -> None:
    layout = layout_of(memory(1))
    columns = {"base": layout.base, "stride": layout.stride, "length": layout.length}
    columns[column] = columns[column][:-1] if column != "base" else columns[column].astype(np.int64)
    with pytest.raises(LocalProtocolError, match=column):
        EngineLayout(**columns)
