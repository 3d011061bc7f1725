"""Files that belong to one user alone: made with the right mode at once, and refused when somebody else could reach
them."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from kvpeer.folders import private_folder, refuse_foreign
from kvpeer.model import ConfigError

__all__ = ["ANYBODY", "NOT_OTHERS", "OWNER_ONLY", "generated_secret", "private_folder", "read_private"]

OWNER_ONLY = 0o077
NOT_OTHERS = 0o007  # a mounted Secret is often readable by the group of its pod
ANYBODY = 0

FILE_BYTES_MAX = 1 << 20
"""Secrets and PEM files have a few KiB; more is another file."""

_SECRET_BYTES = 32
_SECRET_NAME = "secret"  # noqa: S105 - the file's name


def generated_secret(folder: Path) -> str:
    """The secret in this user's folder, as text; the first process to ask generates it (256 bits). All get the same
    one.

    Raises:
        ConfigError: the folder or the file is not this user's alone.
    """
    path = private_folder(folder) / _SECRET_NAME
    if not path.exists():
        _create(path, secrets.token_hex(_SECRET_BYTES) + "\n")
    text = read_private(path, OWNER_ONLY)
    return text.decode("ascii", "replace")


def read_private(path: Path, forbidden_mode: int) -> bytes:
    """The file's content, after its mode was checked on the open file. `forbidden_mode`: OWNER_ONLY, NOT_OTHERS or
    ANYBODY.

    Raises:
        ConfigError: it cannot be read, or others have more access than they should.
    """
    try:
        with open(path, "rb") as stream:
            status = os.fstat(stream.fileno())
            content = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if forbidden_mode == OWNER_ONLY:
        refuse_foreign(path, status)
    mode = stat.S_IMODE(status.st_mode)
    if mode & forbidden_mode:
        fix = f"run  chmod o-rwx {path}  (in Kubernetes: defaultMode: 0440)"
        raise ConfigError(f"others may read or write {path} (mode {mode:04o}): {fix}")
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} has more than {FILE_BYTES_MAX} bytes: it is another file")
    return content


def _create(path: Path, text: str) -> None:
    """Writes the file in full under another name first: nobody ever sees half of it, and the first one wins."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w", encoding="ascii") as stream:
                stream.write(text)
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            os.unlink(draft)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; set security.secret_file") from error
