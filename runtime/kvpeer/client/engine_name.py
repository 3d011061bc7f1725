"""Names for the engines of one user on one host, so that each has its own embedded agent and finds it again after a
restart.

Two engines with one model would otherwise ask for the same agent. A name is `base` and the lowest number that no
living engine has: an engine that starts again takes its old one, with the agent that still lingers there and its warm
pool. Claims are locks on files, so they end with the processes that made them, however those end.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from pathlib import Path

from kvpeer.folders import private_folder
from kvpeer.model import ConfigError

__all__ = ["claim_engine_name"]

ENGINES_MAX = 64
"""Engines with one base name on one host: more than there are accelerators in one."""

LOCK_TIMEOUT_S = 5.0
"""The scan of all names takes milliseconds; who holds it up longer is stuck."""

LOCK_POLL_S = 0.01

OWNER_BYTES_MAX = 4096
"""An owner is a UUID in practice."""

_claims: list[int] = []
"""Descriptors whose locks are this process's claims; open until it ends."""


def claim_engine_name(base: str, owner: str, folder: Path) -> str:
    """Returns the engine's name, the same in all processes that give the same `owner`. Blocks for `LOCK_TIMEOUT_S` at
    most.

    owner: random per run of the engine. folder: the user's runtime folder.

    Raises:
        ConfigError: all names are taken, or the folder does not work or is not this user's alone.
    """
    stem = hashlib.sha256(base.encode()).hexdigest()[:16]
    try:
        names = private_folder(private_folder(folder) / "names")
        scan = _open(names / f"{stem}.scan")
        try:
            _lock_scan(scan, names)
            for number in range(ENGINES_MAX):
                if _claim(names / f"{stem}.{number}", owner):
                    return f"{base}#{number}"
        finally:
            os.close(scan)
    except OSError as error:
        raise ConfigError(f"cannot claim an engine name in {folder}: {error.strerror}; set XDG_RUNTIME_DIR") from error
    raise ConfigError(f"{ENGINES_MAX} engines named {base!r} run on this host: set engine_name on each of them")


def _lock_scan(fd: int, names: Path) -> None:
    give_up = time.monotonic() + LOCK_TIMEOUT_S
    while not _try_lock(fd):
        if time.monotonic() >= give_up:
            raise ConfigError(f"another process holds the lock of {names} for {LOCK_TIMEOUT_S} s")
        time.sleep(LOCK_POLL_S)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open(path: Path) -> int:
    # A link would be followed to a file of ours that is none of kvpeer's.
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _claim(path: Path, owner: str) -> bool:
    """Whether the name is ours now: it was free, or this engine's run has it already. A claim is a shared lock."""
    fd = _open(path)
    if _try_lock(fd):
        os.ftruncate(fd, 0)
        os.pwrite(fd, owner.encode(), 0)
    elif os.pread(fd, OWNER_BYTES_MAX, 0) != owner.encode():
        os.close(fd)
        return False
    # Nobody else changes a lock while the scan's lock is held, so taking the exclusive one down to shared loses
    # nothing.
    fcntl.flock(fd, fcntl.LOCK_SH)
    _claims.append(fd)
    return True
