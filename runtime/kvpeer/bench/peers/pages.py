"""The pages that are read: memory of one process, which others may map, whose every page has bytes of its own."""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["PAGES_BYTES", "PageMemory", "Place"]

PAGES_BYTES = 128 << 20
"""Of each process: larger than most last-level caches, and a batch of 1 MiB pages for each of four threads."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that no two words of a memory are equal."""


class Place(NamedTuple):
    """Where another process of the same user finds a memory."""

    pid: int
    fd: int

    def open(self) -> int:
        """Returns a descriptor of this process's own."""
        return os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR)


class PageMemory:
    """PAGES_BYTES in pages of page_bytes, all backed and mapped. fd: of a memory to map; without one, a new memory of
    zeros. It is there until the process ends."""

    def __init__(self, page_bytes: int, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("kvpeer-bench")
            os.ftruncate(fd, PAGES_BYTES)
        self.page_bytes = page_bytes
        self.n_pages = PAGES_BYTES // page_bytes
        self.place = Place(os.getpid(), fd)
        mapped = mmap.mmap(fd, PAGES_BYTES, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._words = np.frombuffer(mapped, np.uint64).reshape(self.n_pages, -1)

    @property
    def address(self) -> int:
        """Where it begins in this process."""
        return int(self._words.ctypes.data)

    def addresses(self, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Returns where these pages begin, u8 [n]."""
        addresses: npt.NDArray[np.uint64] = np.uint64(self.address) + pages.astype(np.uint64) * np.uint64(
            self.page_bytes
        )
        return addresses

    def fill(self) -> None:
        """Gives every page its bytes."""
        flat = self._words.reshape(-1)
        np.multiply(np.arange(len(flat), dtype=np.uint64), _FACTOR, out=flat)

    def spoil(self, slots: npt.NDArray[np.int64]) -> None:
        """Makes these pages wrong at both ends, so that bytes of an earlier read are not taken for new ones."""
        self._words[slots, 0] = 0
        self._words[slots, -1] = 0

    def n_wrong(self, slots: npt.NDArray[np.int64], pages: npt.NDArray[np.int64]) -> int:
        """Returns how many of these slots do not hold the bytes of these pages, one for one."""
        n_words = self._words.shape[1]
        wrong = 0
        for slot, page in zip(slots.tolist(), pages.tolist(), strict=True):
            first = page * n_words
            expected = np.arange(first, first + n_words, dtype=np.uint64) * _FACTOR
            wrong += not np.array_equal(self._words[slot], expected)
        return wrong
