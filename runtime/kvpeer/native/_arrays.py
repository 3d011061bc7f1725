"""Addresses of numpy arrays for native calls, after cheap checks. Nothing here copies.

An address is valid as long as the caller holds the array; every wrapper does so for the whole call.
"""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias, Union

import numpy as np
import numpy.typing as npt

from kvpeer.model import AGENT_ID_BYTES, KEY_BYTES, LocalProtocolError

__all__ = [
    "I8",
    "PART_DTYPE",
    "U1",
    "U2",
    "U4",
    "U8",
    "Keys",
    "address",
    "bytes_at",
    "fixed_bytes",
    "i8",
    "key_address",
    "u1",
    "u2",
    "u4",
    "u8",
]

U1: TypeAlias = npt.NDArray[np.uint8]
U2: TypeAlias = npt.NDArray[np.uint16]
U4: TypeAlias = npt.NDArray[np.uint32]
U8: TypeAlias = npt.NDArray[np.uint64]
I8: TypeAlias = npt.NDArray[np.int64]

Keys: TypeAlias = Union[bytes, npt.NDArray[np.uint8]]  # noqa: UP007  (not a type expression to Python 3.10's numpy)
"""n packed keys: n * 16 bytes, or u1 of shape [n, 16] or [n * 16]."""

i8 = np.dtype("<i8")
u1 = np.dtype("<u1")
u2 = np.dtype("<u2")
u4 = np.dtype("<u4")
u8 = np.dtype("<u8")

PART_DTYPE = np.dtype([("offset", "<u4"), ("length", "<u4"), ("checksum", "<u8")])
"""One part of a page as the slot's part table holds it; offset counts from the start of the slot."""


def address(name: str, array: npt.NDArray[Any], dtype: np.dtype[Any], *shape: int) -> int:
    """Returns the address of a C-contiguous array of exactly this dtype and shape.

    Raises:
        LocalProtocolError: the array is another one; the message says what is expected.
    """
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        order = "" if array.flags.c_contiguous else ", not C-contiguous"
        raise LocalProtocolError(
            f"{name} must be a C-contiguous {dtype} array of shape {shape}, not {array.dtype} {array.shape}{order}"
        )
    return int(array.ctypes.data)


def bytes_at(start: int, n_bytes: int) -> U1:
    """Returns an array over memory that somebody else owns; it must not be used after that memory is gone."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(start))


def key_address(keys: Keys, n: int) -> int:
    """Returns the address of n packed keys.

    Raises:
        LocalProtocolError: there are more or fewer, or the array is not C-contiguous u1.
    """
    array = np.frombuffer(keys, u1) if isinstance(keys, bytes) else keys
    shape = (n, KEY_BYTES) if array.ndim == 2 else (n * KEY_BYTES,)
    return address("keys", array, u1, *shape)


def fixed_bytes(name: str, value: bytes, n_bytes: int = AGENT_ID_BYTES) -> bytes:
    """Returns `value` if it has n_bytes.

    Raises:
        LocalProtocolError: it has not.
    """
    if len(value) != n_bytes:
        raise LocalProtocolError(f"{name} must have {n_bytes} bytes, not {len(value)}")
    return value
