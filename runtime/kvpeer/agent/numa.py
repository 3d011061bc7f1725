"""The kernel's calls about NUMA: on which nodes memory is to be, and on which it is.

By number, through libc's `syscall`: glibc has no wrappers, and libnuma is rarely in an image. Containers often refuse
these calls (seccomp); that is an OSError, for the caller to make something of.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["bind_memory", "pages_by_node", "refused_calls"]

_NUMBERS = {"x86_64": {"mbind": 237, "move_pages": 279}, "aarch64": {"mbind": 235, "move_pages": 239}}

_PREFERRED = 1
_INTERLEAVE = 3

_MASK_BITS = 1024
"""The kernel's own limit of nodes (MAX_NUMNODES)."""

_CHUNK_PAGES = 4096
"""Pages that are asked about in one call: 48 KiB of arguments, and a few hundred microseconds."""


def bind_memory(address: int, n_bytes: int, nodes: Sequence[int]) -> None:
    """From now on new pages of this mapping come from these nodes: from the one, or from each in turn. Both are
    preferences: where such a node is full another one gives, because a cache must not bring the OOM killer.

    For a shared mapping of a memory file the file remembers it, whoever touches its pages first.

    Raises:
        OSError: the kernel refuses.
    """
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << (node % 64)
    mode = _PREFERRED if len(nodes) == 1 else _INTERLEAVE
    # The kernel takes one bit less than it is told of.
    _call("mbind", ctypes.c_void_p(address), ctypes.c_ulong(n_bytes), mode, mask, ctypes.c_ulong(_MASK_BITS + 1), 0)


def pages_by_node(address: int, n_bytes: int, page_bytes: int) -> Counter[int]:
    """How many pages of this mapping lie on each node; those without memory behind them are not counted.

    Raises:
        OSError: the kernel refuses.
    """
    counts: Counter[int] = Counter()
    for start in range(0, n_bytes, _CHUNK_PAGES * page_bytes):
        stop = min(n_bytes, start + _CHUNK_PAGES * page_bytes)
        pages = np.arange(address + start, address + stop, page_bytes, dtype=np.uint64)
        nodes = np.full(len(pages), -1, dtype=np.intc)
        _call("move_pages", 0, ctypes.c_ulong(len(pages)), _pointer(pages), None, _pointer(nodes), 0)
        counts.update(dict(zip(*(each.tolist() for each in np.unique(nodes, return_counts=True)), strict=True)))
    for error in [node for node in counts if node < 0]:
        del counts[error]
    return counts


def refused_calls() -> frozenset[str]:
    """Those of mbind, move_pages and sched_setaffinity that the kernel refuses this process, tried on a page of its own
    and on the CPUs that it has."""
    refused = set()
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        page[0] = 1
        view = ctypes.c_char.from_buffer(page)
        address = ctypes.addressof(view)
        try:
            node = next(iter(pages_by_node(address, mmap.PAGESIZE, mmap.PAGESIZE)), 0)
        except OSError:
            refused.add("move_pages")
            node = 0
        try:
            bind_memory(address, mmap.PAGESIZE, [node])
        except OSError:
            refused.add("mbind")
        del view
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(0))
    except OSError:
        refused.add("sched_setaffinity")
    return frozenset(refused)


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        raise OSError(f"{name} is not known on {platform.machine()}")
    if _libc.syscall(ctypes.c_long(numbers[name]), *arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
