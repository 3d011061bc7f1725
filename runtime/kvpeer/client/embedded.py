"""An agent for engines that have none beside them: started by the first process of an engine that needs it, shared by
all of them.

Each engine has a folder of its own below the user's runtime folder, with the agent's socket, log, and a lock. Who has
the lock starts the agent and leaves the lock to it, so there is one agent at a time however long it takes to start;
everybody else waits for it. The agent runs in a session of its own and is no descendant of the process
that started it, because engines kill all their descendants when they stop: it outlives them, with a warm pool for the
next one, and ends by itself some time after its last client left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvpeer import AGENT_PACKAGES
from kvpeer.client.settings import ClientSettings
from kvpeer.folders import private_folder, user_folder
from kvpeer.model import ConfigError, PeerUnavailableError

__all__ = ["DetachedAgent", "engine_folder", "ensure_agent", "runtime_folder", "started_agents"]

POLL_S = 0.02
"""How often a starting agent's socket and its lock are tried."""

LOG_TAIL_BYTES = 2000
"""How much of a failed agent's log goes into the error."""

_DETACH = """
import os, sys
pid = os.fork()
if pid:
    print(pid)
else:
    os.setsid()
    os.dup2(2, 1)
    os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Runs in an interpreter of its own, which ends at once and leaves the agent to the init process: a fork of the engine,
with its threads and device handles, would not do."""

DETACH_TIMEOUT_S = 10.0
"""A bare interpreter starts in 20 ms; on a starving machine in a second or two."""


def ensure_agent(settings: ClientSettings, deadline: float) -> str:
    """The socket of the engine's agent, which serves there; started here if no process has done so. Blocks until
    `deadline` (monotonic seconds) at most.

    Raises:
        ConfigError: the agent cannot start as things are; the message names the fix.
        PeerUnavailableError: it was not ready by the deadline.
    """
    folder = engine_folder(settings.engine, os.environ)
    path = str(folder / "agent.sock")
    if _is_served(path):
        return path
    log_path = folder / "agent.log"
    lock, agent = _private(str(folder / "agent.lock"), os.O_RDWR | os.O_CREAT), None
    try:
        while not _is_served(path):
            if agent is None and _try_lock(lock):
                agent = _start(settings, folder, path, lock)
            elif agent is None:
                time.sleep(POLL_S)
            elif agent.has_ended(POLL_S):
                raise ConfigError(f"the agent ended at its start; {log_path} says:\n{_tail(log_path)}")
            if time.monotonic() >= deadline:
                raise PeerUnavailableError(f"the agent is not ready yet; see {log_path}")
    finally:
        os.close(lock)  # the agent has it too
    return path


def runtime_folder(environment: Mapping[str, str]) -> Path:
    """The user's folder for agents on this host, the same that an agent takes by default."""
    configured = environment.get("KVPEER_AGENT_RUNTIME_DIR", "")
    return Path(configured) if configured else user_folder(environment)


def engine_folder(engine: str, environment: Mapping[str, str]) -> Path:
    """The folder of one engine's agent, made with mode 0700 where it was missing.

    Raises:
        ConfigError: it cannot be made, or somebody else could reach into it.
    """
    name = hashlib.sha256(engine.encode()).hexdigest()[:16]  # any text names an engine; paths must stay short
    top = private_folder(runtime_folder(environment))
    return private_folder(private_folder(top / "engines") / name)


@dataclass(frozen=True)
class DetachedAgent:
    """An agent that this process started. It holds the other end of the pipe `lifeline` until it ends."""

    pid: int
    lifeline: int

    def has_ended(self, wait_s: float = 0.0) -> bool:
        """Whether it has ended; waits for that for `wait_s` at most."""
        poll = select.poll()
        poll.register(self.lifeline, select.POLLIN)
        return bool(poll.poll(wait_s * 1000))

    def forget(self) -> None:
        """Gives the pipe back; nothing can be asked afterwards."""
        os.close(self.lifeline)


started_agents: list[DetachedAgent] = []
"""Agents that this process started, the latest last; those that ended leave when another one is started."""


def _start(settings: ClientSettings, folder: Path, path: str, lock: int) -> DetachedAgent:
    command = list(settings.agent_command) or _default_command()
    environment = {**os.environ, **settings.agent_environment, "KVPEER_AGENT_SOCKET": path}
    package_root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package_root, environment.get("PYTHONPATH", ""))))
    for ended in [agent for agent in started_agents if agent.has_ended()]:
        started_agents.remove(ended)
        ended.forget()
    agent = _detached(command, environment, folder / "agent.log", lock)
    started_agents.append(agent)
    return agent


def _detached(command: list[str], environment: Mapping[str, str], log_path: Path, lock: int) -> DetachedAgent:
    """Starts a command that is no descendant of this process, and that has the lock until it ends."""
    lifeline, held_by_agent = os.pipe()
    try:
        with open(log_path, "wb", opener=_private) as log:
            detach = subprocess.run(  # noqa: S603 - our own command line
                [sys.executable, "-S", "-c", _DETACH, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                pass_fds=[held_by_agent, lock],
                timeout=DETACH_TIMEOUT_S,
                check=True,
            )
        return DetachedAgent(int(detach.stdout), lifeline)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        os.close(lifeline)
        raise ConfigError(f"the agent cannot be started by {sys.executable}: {error}; see {log_path}") from error
    finally:
        os.close(held_by_agent)


def _default_command() -> list[str]:
    missing = [name for name in AGENT_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"this engine has no agent and cannot start one, because the packages {', '.join(missing)} are missing: "
            "install kvpeer[agent], or set KVPEER_SOCKET to a running agent's socket"
        )
    return [sys.executable, "-m", "kvpeer.cli", "agent", "--embedded"]


def _is_served(path: str) -> bool:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return True  # its backlog is full
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
                return False
            raise ConfigError(f"{path} is not an agent's socket: {error}") from error
    return True


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _private(path: str, flags: int) -> int:
    """Opens a file of the engine's folder; a link in its place, which only another user lays there, is an error."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _tail(path: Path) -> str:
    with open(path, "rb") as log:
        log.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        return log.read().decode(errors="replace").strip()
