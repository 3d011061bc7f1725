"""The folder in which the agents and engines of one user on one host meet, and the care that it is that user's alone.

Secrets, sockets and locks lie in it, so a folder that somebody else could write to or enter is refused before
anything in it is opened. Standard library only: engines use it too.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from kvpeer.model import ConfigError

__all__ = ["private_folder", "refuse_foreign", "user_folder"]

_FIX = "remove it, or choose another folder (agent.runtime_dir, KVPEER_AGENT_RUNTIME_DIR or XDG_RUNTIME_DIR)"


def user_folder(environment: Mapping[str, str]) -> Path:
    """The user's folder unless one is configured. It may not exist; see `private_folder`."""
    base = environment.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(base):
        return Path(base) / "kvpeer"
    return Path(f"/tmp/kvpeer-{os.getuid()}")  # noqa: S108 - owner and mode are checked before use


def private_folder(path: Path) -> Path:
    """The folder, made with mode 0700 where it was missing (its parents with the default mode), and owned by this
    user alone.

    Raises:
        ConfigError: it cannot be made, is no real folder, belongs to somebody else, or others may enter it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
    except OSError as error:
        raise ConfigError(f"cannot make the folder {path}: {error.strerror}; {_FIX}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{path} is not a folder (a link is not followed): {_FIX}")
    refuse_foreign(path, status)
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise ConfigError(f"others may enter {path} (mode {mode:04o}): run  chmod 700 {path}")
    return path


def refuse_foreign(path: Path, status: os.stat_result) -> None:
    """Returns only when the file or folder belongs to this user.

    Raises:
        ConfigError: it does not.
    """
    if status.st_uid != os.getuid():
        raise ConfigError(f"{path} belongs to user {status.st_uid}, not to user {os.getuid()}: {_FIX}")
