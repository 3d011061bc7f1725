"""Whose the path of a Unix socket is: one agent's, for as long as it holds the lock beside it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from pathlib import Path

from kvpeer.agent.config.settings import SOCKET_PATH_BYTES_MAX
from kvpeer.agent.private_files import private_folder
from kvpeer.model import ConfigError

__all__ = ["prepare_socket_path"]


def prepare_socket_path(path: str, *, is_private: bool) -> int:
    """Makes the socket's folder where it is missing and removes a socket that an earlier agent left behind. Returns
    the descriptor of a lock that makes the path this agent's until it is closed.

    The lock is on `<path>.lock`: a socket that another agent has bound and does not listen at yet looks like one that
    was left behind.

    Raises:
        ConfigError: the path is too long, the folder is open to others though the socket is private, or an agent
        serves there.
    """
    n_bytes = len(os.fsencode(path))
    if n_bytes > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"the socket path {path} has {n_bytes} bytes, but Unix sockets have room for {SOCKET_PATH_BYTES_MAX}: "
            "choose a shorter folder (agent.socket)"
        )
    folder = Path(path).parent
    if is_private:
        private_folder(folder)
    else:
        folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot open {path}.lock: {error.strerror}; choose another agent.socket") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_left_behind(path)
    except BlockingIOError as error:
        os.close(lock)
        raise ConfigError(f"another agent serves at {path}: stop it or choose another agent.socket") from error
    except ConfigError:
        os.close(lock)
        raise
    return lock


def _remove_left_behind(path: str) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        try:
            probe.connect(path)
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise ConfigError(f"{path} exists and is not a socket: choose another agent.socket") from None
            os.unlink(path)
            return
        except OSError as error:
            raise ConfigError(f"{path} exists and is not an agent's socket: {error}") from error
    raise ConfigError(f"another agent serves at {path}: stop it or choose another agent.socket")
