"""Packed columns <-> numpy arrays, with every length checked before use.

A column is the little-endian bytes of n values of one type. `unpack` gives a read-only view of the message's own bytes:
nothing is copied and no Python object is made per value. The names in errors are the message's field names.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvpeer.model import (
    AGENT_ID_BYTES,
    ANCHOR_GROUP_PAGES,
    HOLDER_DTYPE,
    KEY_BYTES,
    N_PARTITIONS,
    LocalProtocolError,
    RemoteProtocolError,
)
from kvpeer.wire.messages import Holders

__all__ = [
    "CHAIN_PAGES_MAX",
    "I8",
    "U1",
    "U2",
    "U4",
    "U8",
    "Column",
    "count",
    "n_anchors",
    "n_chain_keys",
    "pack",
    "unpack",
    "unpack_holders",
    "unpack_partitions",
]

Column = npt.NDArray[Any]

U1 = np.dtype("u1")
U2 = np.dtype("<u2")
U4 = np.dtype("<u4")
U8 = np.dtype("<u8")
I8 = np.dtype("<i8")

CHAIN_PAGES_MAX = 1 << 32
"""Index of a page in a chain fits 32 bits: no prompt is that long, and arithmetic on it stays far from 64 bits."""


def pack(column: Column, dtype: np.dtype[Any]) -> bytes:
    """The column's bytes, one copy.

    Raises:
        LocalProtocolError: the array is not one-dimensional or not of this type (nothing is converted silently).
    """
    if column.ndim != 1 or column.dtype != dtype:
        raise LocalProtocolError(
            f"cannot pack an array of {column.dtype} with {column.ndim} dimensions as a column of {dtype}"
        )
    return column.tobytes()


def count(column: bytes, item_bytes: int, name: str) -> int:
    """How many items of this size the column has.

    Raises:
        RemoteProtocolError: the length is not a multiple of the item's.
    """
    n, rest = divmod(len(column), item_bytes)
    if rest:
        raise RemoteProtocolError(f"{name}: {len(column)} bytes are not a whole number of {item_bytes}-byte items")
    return n


def unpack(column: bytes, dtype: np.dtype[Any], n: int, name: str) -> Column:
    """A read-only view [n] of the column; valid as long as the array lives.

    Raises:
        RemoteProtocolError: the column does not have exactly n items.
    """
    if len(column) != n * dtype.itemsize:
        raise RemoteProtocolError(f"{name}: {len(column)} bytes instead of {n} x {dtype.itemsize}")
    return np.frombuffer(column, dtype=dtype)


def unpack_partitions(column: bytes, n: int, name: str = "partitions") -> Column:
    """A read-only view [n] u2 of partition numbers, each below N_PARTITIONS.

    Raises:
        RemoteProtocolError: the length or a number is out of range.
    """
    partitions = unpack(column, U2, n, name)
    if n and int(partitions.max()) >= N_PARTITIONS:
        raise RemoteProtocolError(f"{name}: partition {int(partitions.max())} is not below {N_PARTITIONS}")
    return partitions


def n_anchors(first: int, n: int) -> int:
    """How many anchor groups the pages [first, first + n) of a chain touch."""
    return (first + n - 1) // ANCHOR_GROUP_PAGES - first // ANCHOR_GROUP_PAGES + 1 if n else 0


def n_chain_keys(first: int, keys: bytes, anchors: bytes) -> int:
    """How many pages this slice of a chain has, after `first`, `keys` and `anchors` were checked against each other.
    No anchors at all are right, too: each page is its own.

    Raises:
        RemoteProtocolError: they do not fit together.
    """
    n = count(keys, KEY_BYTES, "keys")
    if not 0 <= first <= CHAIN_PAGES_MAX - n:
        raise RemoteProtocolError(f"first: {first} is not the index of a page of a chain")
    expected = n_anchors(first, n)
    if anchors and len(anchors) != expected * KEY_BYTES:
        raise RemoteProtocolError(
            f"anchors: {len(anchors)} bytes instead of {expected} x {KEY_BYTES} for {n} pages from {first}"
        )
    return n


def unpack_holders(message: Holders, n: int) -> tuple[Column, Column, Column]:
    """(statuses u1 [n], counts u1 [n], holders HOLDER_DTYPE [sum of counts]) of the answer to a Lookup of n keys.
    `agent` of every holder is a valid index into `message.agents`.

    Raises:
        RemoteProtocolError: columns do not fit together or an index is out of range.
    """
    statuses = unpack(message.statuses, U1, n, "statuses")
    counts = unpack(message.counts, U1, n, "counts")
    n_agents = count(message.agents, AGENT_ID_BYTES, "agents")
    holders = unpack(message.holders, HOLDER_DTYPE, int(counts.sum(dtype=np.int64)), "holders")
    if len(holders) and int(holders["agent"].max()) >= n_agents:
        raise RemoteProtocolError(f"holders: agent index {int(holders['agent'].max())} is not below {n_agents}")
    return statuses, counts, holders
