"""What an error of the file system or of SQLite means for the disk tier."""

from __future__ import annotations

import contextlib
import errno
import sqlite3
from collections.abc import Iterator

from kvpeer.core.disk import Condition
from kvpeer.model import KvPeerError

__all__ = ["BROKEN_INDEX_ERRORS", "DiskError", "condition_of", "disk_errors"]

_BY_ERRNO = {
    errno.ENOSPC: Condition.FULL,
    errno.EDQUOT: Condition.FULL,
    errno.EFBIG: Condition.FULL,
    errno.EROFS: Condition.READ_ONLY,
    errno.EACCES: Condition.READ_ONLY,
    errno.EPERM: Condition.READ_ONLY,
    errno.ENOENT: Condition.VANISHED,
    errno.ENOTDIR: Condition.VANISHED,
    errno.ESTALE: Condition.VANISHED,
    errno.ENODEV: Condition.VANISHED,
    errno.EWOULDBLOCK: Condition.LOCKED,
}

_BY_TEXT = {
    "disk is full": Condition.FULL,
    "readonly": Condition.READ_ONLY,
    "unable to open": Condition.VANISHED,
    "locked": Condition.LOCKED,
}
"""SQLite's texts; Python 3.10 does not tell its codes."""


BROKEN_INDEX_ERRORS = (UnicodeDecodeError, MemoryError, OverflowError)
"""What comes of a broken index besides SQLite's own errors: Python decodes what SQLite quotes of it, and memory is
asked for by sizes that stand in it."""


class DiskError(KvPeerError):
    """The disk tier cannot go on; the message is for people."""

    def __init__(self, condition: Condition, message: str) -> None:
        super().__init__(message)
        self.condition = condition


def condition_of(error: OSError | sqlite3.Error) -> Condition:
    """The condition that an error stands for; FAILING where it stands for none in particular."""
    if isinstance(error, OSError):
        return _BY_ERRNO.get(error.errno or 0, Condition.FAILING)
    text = str(error)
    return next((condition for part, condition in _BY_TEXT.items() if part in text), Condition.FAILING)


@contextlib.contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Turns every error of the file system and of SQLite into a DiskError."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise DiskError(condition_of(error), f"{doing}: {error}") from error
    except BROKEN_INDEX_ERRORS as error:
        raise DiskError(Condition.FAILING, f"{doing}: the index is broken") from error
