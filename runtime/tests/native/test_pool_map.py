"""Pages survive the way engine -> slot -> engine; what is not the expected page is never a hit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpeer.model import LocalProtocolError, Outcome, Verify
from kvpeer.native import PART_DTYPE, crc64
from pool_pages import (
    EXTENT_BYTES,
    SLOT_BYTES,
    SLOTS_PER_EXTENT,
    EngineMemory,
    i8,
    key_of,
    map_of,
    new_pool,
    offset_of,
    publish,
    u4,
    u8,
)

SLOT = 3
both_verify_modes = pytest.mark.parametrize("verify", list(Verify), ids=lambda verify: verify.name.lower())


@pytest.fixture
def pool():
    with new_pool() as pool:
        yield pool


@pytest.fixture
def view(pool):
    with map_of(pool) as view:
        yield view


@pytest.fixture
def engine():
    return EngineMemory(lengths=[5000, 64, 3000], gaps=[0, 8, 100], n_blocks=4)


def fetch(view, engine, generation, *, slot=SLOT, key=None, verify=Verify.FULL, part=0, block=0):
    outcomes = view.scatter(
        u4(slot), u4(generation), u8(offset_of(slot)), key or key_of(slot), part, engine, i8(block), verify
    )
    return Outcome(outcomes[0])


@settings(deadline=None, max_examples=40)
@given(
    segments=st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 70)), min_size=1, max_size=12),
    blocks=st.permutations(range(8)),
    n=st.integers(0, 8),
    verify=st.sampled_from(Verify),
    seed=st.integers(0, 2**32),
)
def test_strided_pages_come_back_unchanged(segments, blocks, n, verify, seed):
    lengths, gaps = [length for length, _ in segments], [gap for _, gap in segments]
    engine = EngineMemory(lengths, gaps, n_blocks=8, seed=seed)
    other = EngineMemory(lengths, gaps, n_blocks=8, seed=seed + 1)
    gaps_before = [other.gaps_of(block) for block in range(8)]
    slots = u4(*(SLOTS_PER_EXTENT * (idx % 2) + idx for idx in range(n)))
    generations = np.arange(1, n + 1, dtype=np.uint32)
    offsets = u8(*(offset_of(slot) for slot in slots.tolist()))
    with new_pool() as pool, map_of(pool) as view:
        keys = publish(pool, view, slots, generations, engine, i8(*blocks[:n]))
        outcomes = view.scatter(slots, generations, offsets, keys, 0, other, i8(*reversed(blocks[:n])), verify)
        checksums = view.checksums(offsets, 0, engine.part_bytes)
    assert outcomes.tolist() == [Outcome.HIT] * n
    assert [other.block(to) for to in reversed(blocks[:n])] == [engine.block(block) for block in blocks[:n]]
    assert [other.gaps_of(block) for block in range(8)] == gaps_before
    assert checksums.tolist() == [crc64(engine.block(block)) for block in blocks[:n]]


@both_verify_modes
def test_a_large_batch_comes_back_unchanged(pool, view, verify):
    n = 16
    engine, other = (EngineMemory([SLOT_BYTES // 2 + 1, SLOT_BYTES // 2 - 1], [3, 0], n, seed) for seed in (1, 2))
    slots, generations = np.arange(n, dtype=np.uint32), np.full(n, 9, np.uint32)
    offsets = u8(*(offset_of(slot) for slot in range(n)))
    blocks = np.arange(n, dtype=np.int64)
    keys = publish(pool, view, slots, generations, engine, blocks)
    outcomes = view.scatter(slots, generations, offsets, keys, 0, other, blocks, verify)
    assert outcomes.tolist() == [Outcome.HIT] * n
    assert [other.block(block) for block in range(n)] == [engine.block(block) for block in range(n)]


def test_each_rank_gets_its_own_part(pool, view, engine):
    n_parts, part_bytes = 3, engine.part_bytes
    parts = np.zeros((1, n_parts), PART_DTYPE)
    pool.mark_writing(u4(SLOT), u4(1))
    for part in range(n_parts):
        checksum = view.gather(u8(offset_of(SLOT)), part * part_bytes, engine, i8(part))
        parts[0, part] = (part * part_bytes, part_bytes, checksum[0])
    pool.mark_committed(u4(SLOT), u4(1), key_of(SLOT), parts)
    expected = [engine.block(part) for part in range(n_parts)]
    for part in range(n_parts):
        assert fetch(view, engine, 1, part=part, block=3) is Outcome.HIT
        assert engine.block(3) == expected[part]
    assert fetch(view, engine, 1, part=n_parts) is Outcome.STALE


@both_verify_modes
def test_anything_but_the_expected_page_is_stale(pool, view, engine, verify):
    assert fetch(view, engine, 1, verify=verify) is Outcome.STALE, "never written"
    pool.mark_writing(u4(SLOT), u4(1))
    assert fetch(view, engine, 1, verify=verify) is Outcome.STALE, "being written"
    publish(pool, view, u4(SLOT), u4(2), engine, i8(1))
    assert fetch(view, engine, 2, verify=verify) is Outcome.HIT
    assert fetch(view, engine, 1, verify=verify) is Outcome.STALE, "an older generation"
    assert fetch(view, engine, 2, verify=verify, key=key_of(99)) is Outcome.STALE, "another page"
    assert fetch(view, EngineMemory([100], [0], 4), 2, verify=verify) is Outcome.STALE, "another layout"
    with map_of(pool, run_id=b"x" * 16) as other_run:
        assert fetch(other_run, engine, 2, verify=verify) is Outcome.STALE, "another run of the agent"
    pool.mark_withdrawn(u4(SLOT), u4(2))
    assert fetch(view, engine, 2, verify=verify) is Outcome.STALE, "withdrawn"


def test_a_changed_payload_is_corrupt_only_to_who_verifies_it(pool, view, engine):
    publish(pool, view, u4(SLOT), u4(1), engine, i8(1))
    view.payload_view()[offset_of(SLOT) + 4000] ^= 1
    assert fetch(view, engine, 1, verify=Verify.FULL) is Outcome.CORRUPT
    assert fetch(view, engine, 1, verify=Verify.GENERATION) is Outcome.HIT


def test_refuses_places_outside_the_pool(pool, view, engine):
    end = 2 * EXTENT_BYTES
    for offset in (end, 2**64 - 1, end - engine.part_bytes + 1, EXTENT_BYTES - 1):
        with pytest.raises(LocalProtocolError, match="gather 1 pages"):
            view.gather(u8(offset), 0, engine, i8(0))
        with pytest.raises(LocalProtocolError, match="checksum 1 parts"):
            view.checksums(u8(offset), 0, engine.part_bytes)
    with pytest.raises(LocalProtocolError, match="gather"):
        view.gather(u8(0), 2**32 - 1, engine, i8(0))
    with pytest.raises(LocalProtocolError, match="gather"):
        view.gather(u8(0), 0, engine, i8(-1))
    with pytest.raises(LocalProtocolError, match="scatter"):
        fetch(view, engine, 1, slot=2 * SLOTS_PER_EXTENT)
    with pytest.raises(LocalProtocolError, match="scatter"):
        fetch(view, engine, 1, part=64)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("offsets", {"offsets": np.array([0], np.int64)}),
        ("offsets", {"offsets": u8(0, 0)}),
        ("offsets", {"offsets": np.array([[0]], np.uint64)}),
        ("blocks", {"blocks": u8(0)}),
        ("offsets", {"offsets": u8(0, 0, 0, 0)[::2], "blocks": i8(0, 1)}),
    ],
    ids=["dtype", "length", "shape", "signedness", "strided"],
)
def test_refuses_arrays_of_another_kind(view, engine, name, wrong):
    arguments = {"offsets": u8(0), "part_offset": 0, "layout": engine, "blocks": i8(0), **wrong}
    with pytest.raises(LocalProtocolError, match=f"{name} must be a C-contiguous"):
        view.gather(**arguments)


def test_refuses_keys_that_are_too_short(view, engine):
    with pytest.raises(LocalProtocolError, match="keys must be"):
        fetch(view, engine, 1, key=b"short")


def test_refuses_files_that_are_not_a_pool_of_such_extents(pool):
    with pytest.raises(LocalProtocolError, match="map a pool"):
        map_of_wrong_extents(pool)
    with pytest.raises(LocalProtocolError, match="run_id must have 16 bytes"):
        map_of(pool, run_id=b"short")


def map_of_wrong_extents(pool):
    from kvpeer.native import PoolMap

    return PoolMap(*pool.fds, pool.extent_bytes // 2, bytes(16))
