"""CRC-64/NVME over buffers, alone or in one pass with a copy. Thread-safe; the GIL is released."""

from __future__ import annotations

from typing import TypeAlias, Union

import numpy as np
import numpy.typing as npt

from kvpeer.model import LocalProtocolError
from kvpeer.native._arrays import u1
from kvpeer.native._errors import check
from kvpeer.native._library import library

__all__ = ["ByteBuffer", "build_info", "copy_crc64", "crc64", "select_crc64"]

ByteBuffer: TypeAlias = Union[bytes, bytearray, memoryview, npt.NDArray[np.uint8]]  # noqa: UP007
"""C-contiguous bytes."""


def crc64(source: ByteBuffer, crc: int = 0) -> int:
    """Returns the CRC-64/NVME of the buffer; `crc` is the result so far, to go on with the next piece."""
    view = np.frombuffer(source, u1)
    return int(library().kvp_crc64(crc, view.ctypes.data, view.size))


def copy_crc64(destination: bytearray | memoryview | npt.NDArray[np.uint8], source: ByteBuffer, crc: int = 0) -> int:
    """Copies source to destination in one pass with the checksum, which it returns. The two must not overlap.

    Raises:
        LocalProtocolError: the buffers have different lengths, or the destination is read-only.
    """
    target, view = np.frombuffer(destination, u1), np.frombuffer(source, u1)
    if target.size != view.size or not target.flags.writeable:
        raise LocalProtocolError(f"cannot copy {view.size} bytes into a {_kind(target)} buffer of {target.size}")
    return int(library().kvp_copy_crc64(crc, target.ctypes.data, view.ctypes.data, view.size))


def _kind(view: npt.NDArray[np.uint8]) -> str:
    return "writable" if view.flags.writeable else "read-only"


def select_crc64(implementation: int) -> None:
    """Makes this process use an implementation: 0 the fastest, 1 table, 2 pclmul, 3 vpclmul. For tests and benchmarks.

    Raises:
        LocalProtocolError: this CPU lacks it.
    """
    check(library().kvp_crc64_select(implementation), f"select CRC-64 implementation {implementation}")


def build_info() -> str:
    """Returns one line about the native library: version, compiler, sanitizer, checksum implementation."""
    return str(library().kvp_build_info().decode())
