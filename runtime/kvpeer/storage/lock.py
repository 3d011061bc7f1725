"""One agent a folder, and whether the folder is still there."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from kvpeer.core.disk import Condition
from kvpeer.storage.conditions import DiskError

__all__ = ["FolderLock"]

LOCK_NAME = "lock"


class FolderLock:
    """Holds the folder until `close`, or until the process ends, however it does.

    Makes the folder (mode 0700) where its parent is there.

    Raises:
        DiskError: another agent holds it.
        OSError: the folder or the lock file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_NAME
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise DiskError(Condition.LOCKED, f"another agent uses {folder}: give each agent its own") from error

    def check(self) -> None:
        """Raises DiskError if the folder is gone, or its path leads to another one by now."""
        try:
            there = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            there = None
        if there is None or not os.path.samestat(there, os.fstat(self._fd)):
            raise DiskError(Condition.VANISHED, f"{self._path.parent} is not the folder any more that it was")

    def close(self) -> None:
        os.close(self._fd)
