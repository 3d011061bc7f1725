"""Packed columns: exact lengths, no silent conversion, no index out of range."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpeer.model import ANCHOR_GROUP_PAGES, HOLDER_DTYPE, N_PARTITIONS, LocalProtocolError, RemoteProtocolError
from kvpeer.wire.messages import Holders
from kvpeer.wire.packing import (
    CHAIN_PAGES_MAX,
    I8,
    U1,
    U2,
    U4,
    U8,
    count,
    n_anchors,
    n_chain_keys,
    pack,
    unpack,
    unpack_holders,
    unpack_partitions,
)


@given(st.sampled_from([U1, U2, U4, U8, I8]), st.lists(st.integers(0, 255), max_size=50))
def test_columns_survive_the_round_trip_without_a_copy_on_arrival(dtype: np.dtype, values: list[int]) -> None:
    column = pack(np.array(values, dtype=dtype), dtype)
    received = unpack(column, dtype, len(values), "slots")
    assert received.tolist() == values
    assert not received.flags.writeable
    assert not received.flags.owndata


def test_values_are_little_endian() -> None:
    assert pack(np.array([1, 0x0203], dtype=U2), U2) == b"\x01\x00\x03\x02"


@pytest.mark.parametrize("array", [np.zeros(2, "<u8"), np.zeros(2, ">u4"), np.zeros((2, 1), "<u4"), np.zeros(2, "<i4")])
def test_nothing_is_converted_silently(array: np.ndarray) -> None:
    with pytest.raises(LocalProtocolError, match="cannot pack"):
        pack(array, U4)


@given(st.binary(max_size=40), st.integers(0, 10))
def test_a_column_has_exactly_the_expected_length_or_is_refused_by_name(column: bytes, n: int) -> None:
    if len(column) == 4 * n:
        assert len(unpack(column, U4, n, "slots")) == n
    else:
        with pytest.raises(RemoteProtocolError, match=f"slots: {len(column)} bytes instead of {n} x 4"):
            unpack(column, U4, n, "slots")


def test_count_refuses_a_fraction() -> None:
    assert count(bytes(32), 16, "keys") == 2
    with pytest.raises(RemoteProtocolError, match="keys: 17 bytes"):
        count(bytes(17), 16, "keys")


def test_a_partition_out_of_range_is_refused() -> None:
    last = pack(np.array([0, N_PARTITIONS - 1], dtype=U2), U2)
    assert unpack_partitions(last, 2).tolist() == [0, N_PARTITIONS - 1]
    assert unpack_partitions(b"", 0).tolist() == []
    beyond = pack(np.array([N_PARTITIONS], dtype=U2), U2)
    with pytest.raises(RemoteProtocolError, match=r"^partitions: partition 4096"):
        unpack_partitions(beyond, 1)
    with pytest.raises(RemoteProtocolError, match=r"^repair: 2 bytes"):
        unpack_partitions(beyond, 2, "repair")


@given(st.integers(0, 200), st.integers(0, 200))
def test_anchor_groups_are_those_that_the_pages_touch(first: int, n: int) -> None:
    assert n_anchors(first, n) == len({page // ANCHOR_GROUP_PAGES for page in range(first, first + n)})


@pytest.mark.parametrize(
    ("first", "n", "groups"), [(0, 31, 1), (0, 32, 1), (0, 33, 2), (31, 1, 1), (31, 2, 2), (33, 0, 0)]
)
def test_anchor_groups_at_their_ends(first: int, n: int, groups: int) -> None:
    assert n_anchors(first, n) == groups


def test_the_last_page_of_a_chain_is_a_page_and_the_one_behind_it_is_none() -> None:
    assert n_chain_keys(CHAIN_PAGES_MAX - 1, bytes(16), bytes(16)) == 1
    for first in (CHAIN_PAGES_MAX, CHAIN_PAGES_MAX + 1):
        with pytest.raises(RemoteProtocolError, match=f"^first: {first} is not"):
            n_chain_keys(first, bytes(16), bytes(16))


def test_a_chain_slice_has_keys_and_anchors_that_fit() -> None:
    assert n_chain_keys(31, bytes(2 * 16), bytes(2 * 16)) == 2
    assert n_chain_keys(0, b"", b"") == 0
    assert n_chain_keys(0, bytes(5 * 16), b"") == 5
    with pytest.raises(RemoteProtocolError, match="anchors: 16 bytes instead of 2 x 16 for 2 pages from 31"):
        n_chain_keys(31, bytes(2 * 16), bytes(16))
    with pytest.raises(RemoteProtocolError, match=r"^keys: "):
        n_chain_keys(0, bytes(15), bytes(16))
    with pytest.raises(RemoteProtocolError, match="first: -1"):
        n_chain_keys(-1, bytes(16), bytes(16))
    with pytest.raises(RemoteProtocolError, match="first: 9223372036854775807"):
        n_chain_keys((1 << 63) - 1, bytes(16), bytes(16))


def test_holders_are_cut_by_their_counts() -> None:
    holders = np.zeros(3, HOLDER_DTYPE)
    holders["agent"] = [0, 1, 1]
    message = Holders(b"\0\1\0", b"\2\0\1", bytes(32), holders.tobytes())
    statuses, counts, received = unpack_holders(message, 3)
    assert statuses.tolist() == [0, 1, 0]
    assert counts.tolist() == [2, 0, 1]
    assert received["agent"].tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("statuses", "counts", "agents", "holders", "fault"),
    [
        (b"\0\0", b"\1", bytes(16), bytes(20), "statuses"),
        (b"\0", b"\1\1", bytes(16), bytes(20), "counts"),
        (b"\0", b"\1", bytes(15), bytes(20), "agents"),
        (b"\0", b"\1", bytes(16), bytes(19), "holders"),
        (b"\0", b"\2", bytes(16), bytes(20), "holders"),
        (b"\0", b"\1", bytes(16), b"\1" + bytes(19), "agent index 1 is not below 1"),
        (b"\0", b"\1", b"", bytes(20), "agent index 0 is not below 0"),
    ],
)
def test_holders_that_do_not_fit_are_refused(
    statuses: bytes, counts: bytes, agents: bytes, holders: bytes, fault: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=f"^(holders: )?{fault}"):
        unpack_holders(Holders(statuses, counts, agents, holders), 1)
