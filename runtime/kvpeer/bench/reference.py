"""libkvpeer_bench.so for Python: the references of the data plane. As with the product, the GIL is released for the
whole of each call; arrays are checked by their makers, not here.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvpeer.model import ConfigError, InternalError
from kvpeer.native import LIBRARY_PATH

__all__ = ["Loopback", "copy", "copy_and_sum"]

REFERENCE_PATH = Path(__file__).with_name("libkvpeer_bench.so")

Addresses = npt.NDArray[np.uint64]

_u64, _pointer, _int = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int
_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "kvb_copy": (None, [_u64, _u64, _pointer, _pointer, _u64]),
    "kvb_copy_and_sum": (None, [_u64, _u64, _pointer, _pointer, _u64, _pointer, _pointer]),
    "kvb_loopback_open": (_int, [_pointer]),
    "kvb_loopback_fetch": (_int, [_pointer, _u64, _pointer, _pointer, _u64]),
    "kvb_loopback_close": (None, [_pointer]),
}


def copy(to: Addresses, source: Addresses, piece_bytes: int) -> None:
    """memcpy of each piece, in order. to, source: u8 [n_pages, n_pieces], C-contiguous."""
    _library().kvb_copy(*to.shape, to.ctypes.data, source.ctypes.data, piece_bytes)


def copy_and_sum(to: Addresses, source: Addresses, piece_bytes: int) -> npt.NDArray[np.uint64]:
    """`copy`, and after each page a pass of the product's own checksum over it; returns the checksums, u8 [n_pages].
    The pieces of a page lie one after another at `to`."""
    sums = np.empty(len(to), np.uint64)
    arguments = (to.ctypes.data, source.ctypes.data, piece_bytes, _checksum(), sums.ctypes.data)
    _library().kvb_copy_and_sum(*to.shape, *arguments)
    return sums


class Loopback:
    """A TCP connection over 127.0.0.1 whose other end is a native thread of this process. For one thread at a time.

    Raises:
        ConfigError: the system gives no connection.
    """

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        error = _library().kvb_loopback_open(ctypes.byref(self._handle))
        if error:
            raise ConfigError(f"no loopback connection for the reference: {os.strerror(error)}")

    def fetch(self, to: Addresses, source: Addresses, page_bytes: int) -> None:
        """One request for these pages, u8 [n] each, and their bytes by writev and readv. Blocks.

        Raises:
            InternalError: the connection broke.
        """
        error = _library().kvb_loopback_fetch(self._handle, len(to), to.ctypes.data, source.ctypes.data, page_bytes)
        if error:
            raise InternalError(f"the reference's connection broke: {os.strerror(error)}")

    def close(self) -> None:
        """Ends the connection and its thread."""
        _library().kvb_loopback_close(self._handle)


@functools.cache
def _library() -> ctypes.CDLL:
    if not REFERENCE_PATH.is_file():
        raise ConfigError(f"{REFERENCE_PATH} is missing: install a kvpeer wheel, or run `make native` in a source tree")
    loaded = ctypes.CDLL(str(REFERENCE_PATH))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


@functools.cache
def _checksum() -> int | None:
    """Address of kvp_crc64."""
    return ctypes.cast(ctypes.CDLL(str(LIBRARY_PATH)).kvp_crc64, ctypes.c_void_p).value
