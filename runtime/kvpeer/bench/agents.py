"""Agents as processes of their own, started by this package's own command line, and what the kernel says of them."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvpeer.model import InternalError

__all__ = ["AgentProcess", "Cluster", "cluster", "own_environment", "served_after_s", "wait_until"]

HOST = "127.0.0.1"
COMMAND = (sys.executable, "-m", "kvpeer.cli", "agent")

START_S_MAX = 30.0
"""A start that takes longer ends the benchmark with an error; the budget is half a second."""

STOP_S_MAX = 10.0

_SERVES = re.compile(r"agent ([0-9a-f]{32}) of cluster \S+ serves .* agents at \S+:(\d+),")
_METRICS = re.compile(r"metrics and health at (http://\S+)/metrics")
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class AgentProcess:
    """A running agent. `folder` has its socket and its log."""

    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def socket(self) -> str:
        return str(self.folder / "agent.sock")

    @property
    def agent_id(self) -> bytes:
        return bytes.fromhex(self._logged(_SERVES))

    def metric(self, series: str) -> float:
        """Returns a series of the agent's metrics page by its name and labels as they stand there; 0 if it does not."""
        with _NO_PROXY.open(f"{self._logged(_METRICS)}/metrics", timeout=START_S_MAX) as page:
            for line in page.read().decode().splitlines():
                name, _, number = line.rpartition(" ")
                if name == series:
                    return float(number)
        return 0.0

    def cpu_s(self) -> float:
        """Returns the CPU time of all its threads so far, to the nanosecond (schedstat, where stat counts in ticks)."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def resident_bytes(self) -> int:
        """Returns its resident memory without shared memory, which is the pool and its headers."""
        status = dict(line.split(":", 1) for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines())
        return sum(int(status[field].split()[0]) << 10 for field in ("RssAnon", "RssFile"))

    def end(self) -> None:
        """Ends it at once and waits for that."""
        self.process.kill()
        self.process.wait(STOP_S_MAX)

    def _logged(self, pattern: re.Pattern[str]) -> str:
        match = pattern.search((self.folder / "agent.log").read_text())
        if match is None:
            raise InternalError(f"the agent's log in {self.folder} has no line like {pattern.pattern}")
        return match[1]


class Cluster:
    """Agents of one user in a folder of their own, which find each other there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: list[AgentProcess] = []
        self._n_started = 0

    def launch(self, settings: Mapping[str, str] | None = None) -> AgentProcess:
        """Returns a further agent that may not serve yet. settings: by "group.key"."""
        folder = self.folder / str(self._n_started)
        folder.mkdir(mode=0o700)
        self._n_started += 1
        chosen = {
            "agent.name": f"bench-{self._n_started}",
            "agent.host": HOST,
            "agent.runtime_dir": str(self.folder),
            "agent.socket": str(folder / "agent.sock"),
            **(settings or {}),
        }
        environment = own_environment()
        for key, value in chosen.items():
            environment["KVPEER_" + key.replace(".", "_").upper()] = value
        with open(folder / "agent.log", "wb") as log:
            process = subprocess.Popen(  # noqa: S603 - our own command line
                COMMAND, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        agent = AgentProcess(process, folder)
        self._running.append(agent)
        return agent

    def start(self, n: int, settings: Mapping[str, str] | None = None) -> list[AgentProcess]:
        """Returns n further agents that serve and know each other.

        Raises:
            InternalError: one of them does not start.
        """
        agents = [self.launch(settings) for _ in range(n)]
        for agent in agents:
            served_after_s(agent, 0.0)
        members = 'kvpeer_membership_members{state="alive"}'
        wait_until(lambda: all(agent.metric(members) == n for agent in agents), "the agents do not see each other")
        return agents

    def end(self, agent: AgentProcess) -> None:
        """Ends an agent."""
        self._running.remove(agent)
        agent.end()

    def close(self) -> None:
        """Ends all agents."""
        for agent in list(self._running):
            self.end(agent)


def own_environment() -> dict[str, str]:
    """Returns an environment for processes of this package, without settings of agents. They may write bytecode: an
    installed package has it, and compiling at every start is not what is measured."""
    left_out = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")
    kept = {
        name: value for name, value in os.environ.items() if name not in left_out and not name.startswith("KVPEER_")
    }
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """No agents yet; a folder that goes with them. Its path is short, because Unix sockets have room for 107 bytes."""
    with (
        tempfile.TemporaryDirectory(prefix="kvpeer-bench-") as folder,
        contextlib.closing(Cluster(Path(folder))) as agents,
    ):
        yield agents


def served_after_s(agent: AgentProcess, launched_at: float, poll_s: float = 0.001) -> float:
    """Returns when engines could connect, in seconds after `launched_at` (time.perf_counter). Blocks until then.

    Raises:
        InternalError: the agent ended, or does not serve within START_S_MAX.
    """

    def is_served() -> bool:
        if agent.process.poll() is not None:
            log = (agent.folder / "agent.log").read_text()
            raise InternalError(f"an agent ended at its start: {log[-2000:]}")
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
            return probe.connect_ex(agent.socket) == 0

    wait_until(is_served, "an agent does not serve", poll_s)
    return time.perf_counter() - launched_at


def wait_until(condition: Callable[[], bool], fault: str, poll_s: float = 0.02) -> None:
    """Returns when the condition holds.

    Raises:
        InternalError: it does not within START_S_MAX; the message is `fault`.
    """
    deadline = time.monotonic() + START_S_MAX
    while not condition():
        if time.monotonic() > deadline:
            raise InternalError(f"{fault} within {START_S_MAX:g} s")
        time.sleep(poll_s)
