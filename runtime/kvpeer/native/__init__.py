"""The native data plane (libkvpeer.so) for Python: page bytes, checksums, data connections, the directory table.

The library is loaded at the first use; ConfigError says which file is missing or does not fit. Its calls release the
GIL. Arrays are numpy arrays, C-contiguous and of exactly the dtype that a method names; they are checked, never copied
or kept. A wrapper owns its native object and frees it at `close`, at garbage collection or at exit, whichever is first.
"""

from __future__ import annotations

import time

from kvpeer.native._arrays import PART_DTYPE, Keys
from kvpeer.native._library import LIBRARY_PATH
from kvpeer.native.checksum import build_info, copy_crc64, crc64, select_crc64
from kvpeer.native.connection import DataConnection, FetchedPages
from kvpeer.native.directory import DirectoryStats, DirectoryTable
from kvpeer.native.map import PoolMap, StridedLayout
from kvpeer.native.pool import Pool
from kvpeer.native.server import CAPABILITY_BYTES, DataServer, ServerLimits, ServerStats
from kvpeer.native.verbs import (
    ENDPOINT_BYTES,
    EXTENT_BYTES,
    RAILS_MAX,
    VerbsConnection,
    VerbsDevice,
    VerbsSettings,
    VerbsStats,
    fetch_by_verbs,
)

__all__ = [
    "CAPABILITY_BYTES",
    "ENDPOINT_BYTES",
    "EXTENT_BYTES",
    "LIBRARY_PATH",
    "PART_DTYPE",
    "RAILS_MAX",
    "DataConnection",
    "DataServer",
    "DirectoryStats",
    "DirectoryTable",
    "FetchedPages",
    "Keys",
    "Pool",
    "PoolMap",
    "ServerLimits",
    "ServerStats",
    "StridedLayout",
    "VerbsConnection",
    "VerbsDevice",
    "VerbsSettings",
    "VerbsStats",
    "build_info",
    "copy_crc64",
    "crc64",
    "fetch_by_verbs",
    "monotonic_ns",
    "select_crc64",
]


def monotonic_ns() -> int:
    """Returns the time that native deadlines are measured in (CLOCK_MONOTONIC)."""
    return time.monotonic_ns()
