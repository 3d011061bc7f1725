"""Files of a fixed size that pages lie in: preallocated, read and written past the page cache where that can be had.

Blocking; different threads may read at once, one writes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from kvpeer.core.disk.segments import BLOCK_BYTES

__all__ = ["SegmentFiles", "memory_at"]

_VECTORS_MAX = os.sysconf("SC_IOV_MAX")


def memory_at(address: int, n_bytes: int) -> memoryview:
    """The memory there, writable; it must not be used after that memory is gone."""
    return memoryview((ctypes.c_uint8 * n_bytes).from_address(address)).cast("B")


class SegmentFiles:
    """The files `<number>.pages` of a folder, all of `segment_bytes`. Memory, offsets and lengths that are read and
    written are multiples of BLOCK_BYTES. Every method may raise OSError."""

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self._folder = folder
        self._fds: dict[int, int] = {}
        self.is_direct = True
        """Whether the page cache is passed by: False once the file system refused that."""

    def found(self) -> dict[int, int]:
        """The size of every such file in the folder, by its number."""
        paths = [path for path in self._folder.glob("*.pages") if path.stem.isdecimal()]
        return {int(path.stem): path.stat().st_size for path in paths}

    def prepare(self, number: int) -> None:
        """Makes the file, with all its room reserved. What was reserved of a file that does not fit is given back."""
        if number in self._fds:
            return
        fd = self._open(number)
        try:
            if os.fstat(fd).st_size != self.segment_bytes:
                os.ftruncate(fd, 0)
            os.posix_fallocate(fd, 0, self.segment_bytes)
            if self.is_direct and not _reads_blocks(fd):
                os.close(fd)
                self.is_direct = False
                fd = self._open(number)
        except OSError:
            os.close(fd)
            self.remove(number)
            raise
        self._fds[number] = fd

    def remove(self, number: int) -> None:
        """The file is gone."""
        if number in self._fds:
            os.close(self._fds.pop(number))
        with contextlib.suppress(FileNotFoundError):
            self._path(number).unlink()

    def write(self, number: int, offset: int, pieces: Sequence[memoryview]) -> None:
        """Writes the pieces one after another; they are durable after the next `sync`."""
        fd = self._fds[number]
        for first in range(0, len(pieces), _VECTORS_MAX):
            some = pieces[first : first + _VECTORS_MAX]
            n_bytes = sum(len(piece) for piece in some)
            if os.pwritev(fd, some, offset) != n_bytes:
                raise OSError(errno.ENOSPC, f"{self._path(number)} took a part of what was written")
            offset += n_bytes

    def sync(self, number: int) -> None:
        """Makes durable what was written to the file."""
        os.fdatasync(self._fds[number])
        if not self.is_direct:
            os.posix_fadvise(self._fds[number], 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, number: int, offset: int, pieces: Sequence[memoryview]) -> bool:
        """Fills the pieces one after another. False if the file ends before that."""
        return os.preadv(self._fds[number], pieces, offset) == sum(len(piece) for piece in pieces)

    def close(self) -> None:
        """Nothing may be under way."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.pages"

    def _open(self, number: int) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        if self.is_direct:
            try:
                return os.open(self._path(number), flags | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.is_direct = False
        return os.open(self._path(number), flags, 0o600)


def _reads_blocks(fd: int) -> bool:
    """Whether direct I/O works with our blocks: some file systems want larger ones."""
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        try:
            os.preadv(fd, [block], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
    return True
