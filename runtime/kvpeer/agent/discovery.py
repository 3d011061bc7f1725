"""How agents of one user on one host find each other: a file with an agent's address in the user's runtime folder.

<runtime folder>/peers/<cluster>/<agent id>.json. A file is a hint like any seed: who is named there is authenticated
as always. Agents in containers may share the folder and not see each other's processes: what cannot be looked up goes
by the file's age, and an agent writes its file again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Annotated

import msgspec

from kvpeer.agent.private_files import private_folder
from kvpeer.model import AgentId, ConfigError
from kvpeer.wire.messages import AgentInfo

__all__ = ["AddressFile", "OwnAddress", "list_addresses", "withdraw_address", "write_address"]

ADDRESS_FILES_MAX = 256
"""Files that are read in one go; no host runs so many agents of one user."""

_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
RENEW_S = 30.0
"""Between two writings of an agent's file."""

STALE_S = 4 * RENEW_S
"""A file of another pid namespace that was not written for this long is a dead agent's."""

_log = logging.getLogger(__name__)


class AddressFile(msgspec.Struct, frozen=True):
    """Content of an address file. `start_ticks` (since boot) tells a process from a later one with the same pid;
    both mean something in `pid_namespace` only."""

    agent_id: str
    name: str
    host: str
    control_port: _Port
    data_port: _Port
    pid: int
    start_ticks: int
    pid_namespace: int = 0


class OwnAddress:
    """The file of this process's agent, and those of the others. Belongs to one event loop."""

    def __init__(self, runtime_dir: Path, cluster: str, info: AgentInfo) -> None:
        self._runtime_dir = runtime_dir
        self._cluster = cluster
        self._info = info
        self._is_withdrawn = False

    def write(self) -> None:
        """Makes the agent known. Raises ConfigError as `write_address`."""
        write_address(self._runtime_dir, self._cluster, self._info)

    def withdraw(self) -> None:
        """Removes the file for good."""
        self._is_withdrawn = True
        withdraw_address(self._runtime_dir, self._cluster, AgentId(self._info.agent_id))

    async def renew(self) -> None:
        """Keeps the file young, and there, until cancelled."""
        while True:
            await asyncio.sleep(RENEW_S)
            if self._is_withdrawn:
                continue
            try:
                self.write()
            except (ConfigError, OSError) as error:
                _log.warning("other agents of this host may not find this one: %s", error)

    def others(self) -> list[AddressFile]:
        """The other agents. Raises ConfigError as `list_addresses`."""
        return list_addresses(self._runtime_dir, self._cluster, AgentId(self._info.agent_id))


def write_address(runtime_dir: Path, cluster: str, info: AgentInfo) -> Path:
    """Makes this process's agent known; returns the file. Readers never see half of it.

    Raises:
        ConfigError: the folder is not this user's alone.
    """
    folder = _folder(runtime_dir, cluster)
    address = AddressFile(
        info.agent_id.hex(),
        info.name,
        info.host,
        info.control_port,
        info.data_port,
        os.getpid(),
        _start_ticks(os.getpid()) or 0,
        _pid_namespace(),
    )
    path = folder / f"{address.agent_id}.json"
    draft = path.with_suffix(".new")
    draft.write_bytes(msgspec.json.encode(address))
    draft.rename(path)
    return path


def withdraw_address(runtime_dir: Path, cluster: str, agent_id: AgentId) -> None:
    """Removes the agent's file; does nothing if it is gone."""
    with contextlib.suppress(FileNotFoundError):
        (runtime_dir / "peers" / cluster / f"{agent_id.hex()}.json").unlink()


def list_addresses(runtime_dir: Path, cluster: str, own_id: AgentId) -> list[AddressFile]:
    """The other agents of this user on this host that run, as far as can be told. Files of agents that ended are
    removed.

    Raises:
        ConfigError: the folder is not this user's alone.
    """
    addresses: list[AddressFile] = []
    for path in sorted(_folder(runtime_dir, cluster).glob("*.json"))[:ADDRESS_FILES_MAX]:
        try:
            address = msgspec.json.decode(path.read_bytes(), type=AddressFile)
        except FileNotFoundError:
            continue
        except (msgspec.DecodeError, RecursionError, OSError) as error:  # whatever lies there hides no other agent
            _log.warning("%s is not an address file: %s", path, error)
            continue
        if _is_gone(address, path):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        elif address.agent_id != own_id.hex():
            addresses.append(address)
    return addresses


def _folder(runtime_dir: Path, cluster: str) -> Path:
    for folder in (runtime_dir, runtime_dir / "peers"):
        private_folder(folder)
    return private_folder(runtime_dir / "peers" / cluster)


def _is_gone(address: AddressFile, path: Path) -> bool:
    if address.pid_namespace == _pid_namespace():
        return _start_ticks(address.pid) != address.start_ticks
    try:
        return time.time() - path.stat().st_mtime > STALE_S
    except FileNotFoundError:
        return True


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_ticks(pid: int) -> int | None:
    """When the process was started, in ticks since boot; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command, in parentheses, may contain anything; what follows its last parenthesis are the fields from the
    # third on.
    return int(stat.rpartition(b")")[2].split()[19])
