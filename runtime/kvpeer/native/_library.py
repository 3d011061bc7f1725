"""Finds, loads and checks libkvpeer.so, and declares its functions once, as `native/include/kvpeer/kvpeer.h` has them.

ctypes drops the GIL for the whole of each call.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from kvpeer.model import ConfigError

__all__ = [
    "LIBRARY_PATH",
    "DirectoryCounters",
    "Layout",
    "ServerCounters",
    "ServerLimitValues",
    "VerbsCounters",
    "VerbsSettings",
    "declared_functions",
    "library",
    "load",
]

ABI_VERSION = 3
"""KVP_ABI_VERSION of the header that this binding was written for."""

LIBRARY_PATH = Path(__file__).with_name("libkvpeer.so")

_int = ctypes.c_int
_u16 = ctypes.c_uint16
_u32 = ctypes.c_uint32
_u64 = ctypes.c_uint64
_i64 = ctypes.c_int64
_pointer = ctypes.c_void_p
_text = ctypes.c_char_p


class Layout(ctypes.Structure):
    """kvp_layout."""

    _fields_ = [("n_segments", _u32), ("base", _pointer), ("stride", _pointer), ("length", _pointer)]


class ServerLimitValues(ctypes.Structure):
    """kvp_server_limits."""

    _fields_ = [
        ("connections_max", _u32),
        ("pages_max", _u32),
        ("idle_timeout_ms", _u32),
        ("io_timeout_ms", _u32),
        ("handshake_timeout_ms", _u32),
    ]


class ServerCounters(ctypes.Structure):
    """kvp_server_stats."""

    _fields_ = [
        ("connections_open", _u64),
        ("connections_accepted", _u64),
        ("connections_refused", _u64),
        ("protocol_errors", _u64),
        ("requests", _u64),
        ("pages_sent", _u64),
        ("pages_stale", _u64),
        ("bytes_sent", _u64),
        ("io_timeouts", _u64),
    ]


class DirectoryCounters(ctypes.Structure):
    """kvp_dir_stats."""

    _fields_ = [
        ("records", _u64),
        ("holders", _u64),
        ("bytes", _u64),
        ("full_rejections", _u64),
        ("dropped_holders", _u64),
    ]


class VerbsSettings(ctypes.Structure):
    """kvp_verbs_settings."""

    _fields_ = [
        ("device", _text),
        ("gid_index", ctypes.c_int32),
        ("connections_max", _u32),
        ("reader_connections_max", _u32),
    ]


class VerbsCounters(ctypes.Structure):
    """kvp_verbs_stats."""

    _fields_ = [
        ("connections_open", _u64),
        ("connections_accepted", _u64),
        ("connections_replaced", _u64),
        ("registered_bytes", _u64),
    ]


# name: (result, arguments). Arrays and handles are plain addresses; `_arrays` checks what they point at.
_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "kvp_abi_version": (_u32, []),
    "kvp_last_errno": (_int, []),
    "kvp_build_info": (_text, []),
    "kvp_crc64": (_u64, [_u64, _pointer, _u64]),
    "kvp_copy_crc64": (_u64, [_u64, _pointer, _pointer, _u64]),
    "kvp_crc64_select": (_int, [_int]),
    "kvp_pool_create": (_int, [_u64, _u64, _u64, _text, _pointer]),
    "kvp_pool_destroy": (None, [_pointer]),
    "kvp_pool_fds": (_int, [_pointer, _pointer, _pointer]),
    "kvp_pool_n_extents": (_u64, [_pointer]),
    "kvp_pool_touch_extent": (_int, [_pointer, _u32]),
    "kvp_pool_assign_extent": (_int, [_pointer, _u32, _u32]),
    "kvp_pool_payload": (_pointer, [_pointer, _pointer]),
    "kvp_pool_slot_address": (_pointer, [_pointer, _u32]),
    "kvp_pool_mark_writing": (_int, [_pointer, _u64, _pointer, _pointer]),
    "kvp_pool_mark_committed": (_int, [_pointer, _u64, _pointer, _pointer, _pointer, _u32, _pointer]),
    "kvp_pool_mark_withdrawn": (_int, [_pointer, _u64, _pointer, _pointer]),
    "kvp_pool_check": (_int, [_pointer, _u32, _u32, _text]),
    "kvp_map_create": (_int, [_int, _int, _u64, _text, _pointer]),
    "kvp_map_destroy": (None, [_pointer]),
    "kvp_map_payload": (_pointer, [_pointer, _pointer]),
    "kvp_map_gather": (_int, [_pointer, _u64, _pointer, _u32, _pointer, _pointer, _pointer]),
    "kvp_map_scatter": (
        _int,
        [_pointer, _u64, _pointer, _pointer, _pointer, _pointer, _u32, _pointer, _pointer, _int, _pointer],
    ),
    "kvp_map_checksum": (_int, [_pointer, _u64, _pointer, _u32, _u32, _pointer]),
    "kvp_server_start": (_int, [_pointer, _text, _u16, _pointer, _pointer, _pointer]),
    "kvp_server_admit": (_int, [_pointer, _text, _text, _u64]),
    "kvp_server_revoke": (_int, [_pointer, _text]),
    "kvp_server_get_stats": (None, [_pointer, _pointer]),
    "kvp_server_stop": (None, [_pointer]),
    "kvp_conn_open": (_int, [_text, _u16, _text, _text, _text, _u64, _pointer]),
    "kvp_conn_pages_max": (_u32, [_pointer]),
    "kvp_conn_fetch": (
        _int,
        [
            *[_pointer, _u64, _pointer, _pointer, _pointer, _pointer, _pointer],
            *[_int, _u64, _pointer, _pointer, _pointer],
        ],
    ),
    "kvp_conn_shutdown": (None, [_pointer]),
    "kvp_conn_free": (None, [_pointer]),
    "kvp_verbs_open": (_int, [_pointer, _pointer, _pointer, _u64, _pointer]),
    "kvp_verbs_close": (None, [_pointer]),
    "kvp_verbs_device": (_text, [_pointer]),
    "kvp_verbs_register": (_int, [_pointer, _pointer, _u64]),
    "kvp_verbs_unregister": (_int, [_pointer, _pointer]),
    "kvp_verbs_extents": (_i64, [_pointer, _u32, _u64, _pointer]),
    "kvp_verbs_accept": (_int, [_pointer, _text, _text, _pointer]),
    "kvp_verbs_revoke": (_int, [_pointer, _text]),
    "kvp_verbs_get_stats": (None, [_pointer, _pointer]),
    "kvp_verbs_conn_create": (_int, [_pointer, _text, _pointer, _pointer]),
    "kvp_verbs_conn_connect": (_int, [_pointer, _text]),
    "kvp_verbs_conn_learn": (_int, [_pointer, _u32, _u64, _text]),
    "kvp_verbs_conn_knows": (_int, [_pointer, _u64, _pointer]),
    "kvp_verbs_conn_probe": (_int, [_pointer, _u64]),
    "kvp_verbs_fetch": (
        _int,
        [
            *[_pointer, _u32, _pointer, _u64, _pointer, _pointer, _pointer, _pointer, _pointer],
            *[_int, _u64, _pointer, _pointer, _pointer],
        ],
    ),
    "kvp_verbs_conn_fault": (_text, [_pointer]),
    "kvp_verbs_conn_shutdown": (None, [_pointer]),
    "kvp_verbs_conn_free": (None, [_pointer]),
    "kvp_dir_create": (_int, [_u32, _int, _pointer]),
    "kvp_dir_destroy": (None, [_pointer]),
    "kvp_dir_apply": (
        _int,
        [_pointer, _u32, _u64, _pointer, _pointer, _pointer, _pointer, _pointer, _pointer, _pointer, _pointer],
    ),
    "kvp_dir_lookup": (_i64, [_pointer, _u64, _pointer, _pointer, _pointer, _u32, _pointer, _pointer, _u64]),
    "kvp_dir_digests": (_int, [_pointer, _u32, _u64, _pointer, _pointer, _pointer]),
    "kvp_dir_dropped": (_i64, [_pointer, _u64, _pointer, _pointer]),
    "kvp_dir_records": (_int, [_pointer, _u64, _pointer, _pointer]),
    "kvp_dir_dump": (_i64, [_pointer, _u32, _u16, _u64, _pointer, _pointer, _pointer, _pointer, _pointer]),
    "kvp_dir_replace": (_int, [_pointer, _u32, _u16, _u64, _pointer, _pointer, _pointer, _pointer, _pointer]),
    "kvp_dir_drop_partition": (_i64, [_pointer, _u16]),
    "kvp_dir_sweep": (_i64, [_pointer, _u32, _u32, _u32]),
    "kvp_dir_get_stats": (None, [_pointer, _pointer]),
}


def declared_functions() -> frozenset[str]:
    """Returns the names of all functions that the binding knows."""
    return frozenset(_FUNCTIONS)


def load(path: Path) -> ctypes.CDLL:
    """Returns the library at `path` with all functions declared.

    Raises:
        ConfigError: the file is missing, is for another machine, or was built from other sources than this package.
    """
    if not path.is_file():
        raise ConfigError(
            f"the native library {path} is missing: install a kvpeer wheel, or run `make native` in a source tree"
        )
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(f"the native library {path} does not load on this machine: {error}") from error
    try:
        abi_version = loaded.kvp_abi_version()
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(loaded, name)
            function.restype = result
            function.argtypes = arguments
    except AttributeError as error:
        raise ConfigError(f"the native library {path} belongs to another version of kvpeer: {error}") from error
    if abi_version != ABI_VERSION:
        raise ConfigError(
            f"the native library {path} has ABI version {abi_version}, this package needs {ABI_VERSION}: rebuild it"
        )
    return loaded


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the library, loading it at the first call. Thread-safe.

    Raises:
        ConfigError: see `load`.
    """
    return load(LIBRARY_PATH)
