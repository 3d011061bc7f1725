"""Whole agents as processes of their own, started as users start them, and seen through their logs and metrics."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from processes.engine import Engine
from processes.handles import FOLDER, RUNTIME, eventually

HOST = "127.0.0.1"
START_DEADLINE_S = 30.0
POLL_S = 0.03

COMMAND = (sys.executable, "-m", "kvpeer.cli", "agent")

SMALL = {
    "agent.host": HOST,
    "pool.size": "32Mi",
    "pool.extent_size": "1Mi",
    "directory.anti_entropy_interval": "1s",
}
"""Settings of every agent, unless a test says otherwise."""

_SERVES = re.compile(r"agent ([0-9a-f]{32}) of cluster \S+ serves .* agents at \S+:(\d+), pages at port (\d+)")
_METRICS = re.compile(r"metrics and health at (http://\S+)/metrics")

_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def variables(settings: Mapping[str, str]) -> dict[str, str]:
    """An environment with these settings ("group.key") and no others."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVPEER_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(RUNTIME), str(FOLDER.parent)])
    for key, value in settings.items():
        environment["KVPEER_" + key.replace(".", "_").upper()] = value
    return environment


def free_port() -> int:
    """A port that nobody uses at the moment."""
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


class AgentProcess:
    """One agent and its folder. Its process can be ended and started again; each run has a log of its own."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, str], command: Sequence[str] = COMMAND) -> None:
        self.name = name
        self.folder = folder / name
        self.folder.mkdir(mode=0o700)
        self.socket = str(self.folder / "agent.sock")
        self._settings = {**SMALL, "agent.name": name, "agent.socket": self.socket, **settings}
        self._command = command
        self._n_runs = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.agent_id = b""
        self.control_port = self.data_port = 0
        self._url = ""

    # ---- life

    def launch(self) -> AgentProcess:
        """Starts a run; `wait_serving` before it is used."""
        self._n_runs += 1
        with open(self._log_path, "wb") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables(self._settings)
            )
        return self

    def wait_serving(self) -> AgentProcess:
        """Returns when engines can connect."""
        eventually(lambda: _SERVES.search(self.log) or not self.is_running, START_DEADLINE_S, POLL_S)
        assert self.is_running, self.log[-2000:]
        (serves,) = _SERVES.finditer(self.log)
        self.agent_id = bytes.fromhex(serves[1])
        self.control_port, self.data_port = int(serves[2]), int(serves[3])
        metrics = _METRICS.search(self.log)
        assert metrics is not None
        self._url = metrics[1]
        return self

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """Ends the run without giving the agent a chance to say anything."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(START_DEADLINE_S)

    def stop(self) -> int:
        """Ends the run in order; its exit status."""
        assert self.process is not None
        self.signal(signal.SIGTERM)
        return self.process.wait(START_DEADLINE_S)

    # ---- looking at it

    @property
    def _log_path(self) -> Path:
        return self.folder / f"run-{self._n_runs}.log"

    @property
    def log(self) -> str:
        """What this run has written so far."""
        return self._log_path.read_text(errors="replace") if self._n_runs else ""

    def metric(self, name: str, **labels: str) -> float:
        """One series of the agent's metrics page, 0 where there is none. Most are renewed once a second."""
        for family in text_string_to_metric_families(self.metrics_page()):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return float(sample.value)
        return 0.0

    def metrics_page(self) -> str:
        """All of the agent's metrics, as Prometheus would read them."""
        with _NO_PROXY.open(f"{self._url}/metrics", timeout=START_DEADLINE_S) as page:
            return str(page.read().decode())

    @property
    def is_healthy(self) -> bool:
        """What the agent says itself."""
        with _NO_PROXY.open(f"{self._url}/healthz", timeout=START_DEADLINE_S) as page:
            return page.status == 200

    def knows(self, n_members: int) -> bool:
        """Whether this agent sees so many members, itself included, and suspects none of them."""
        by_state = {state: self.metric("kvpeer_membership_members", state=state) for state in ("alive", "suspect")}
        return by_state == {"alive": n_members, "suspect": 0}


class Cluster:
    """Agents that share a user's runtime folder, and engines connected to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runtime_dir = folder / "run"
        self.runtime_dir.mkdir(mode=0o700)
        self.agents: dict[str, AgentProcess] = {}
        self._engines: list[tuple[AgentProcess, Engine]] = []

    def launch(
        self, name: str, settings: Mapping[str, str] | None = None, command: Sequence[str] = COMMAND
    ) -> AgentProcess:
        """A further agent; it may not serve yet."""
        chosen = {"agent.runtime_dir": str(self.runtime_dir), **(settings or {})}
        agent = self.agents[name] = AgentProcess(self.folder, name, chosen, command)
        return agent.launch()

    def start(self, *names: str, settings: Mapping[str, str] | None = None) -> list[AgentProcess]:
        """Further agents that serve and know each other and all that were there."""
        started = [self.launch(name, settings) for name in names]
        for agent in started:
            agent.wait_serving()
        self.wait_members()
        return started

    def wait_members(self) -> None:
        """Returns when all agents that run see each other, and nobody else."""
        running = [agent for agent in self.agents.values() if agent.is_running]
        for agent in running:
            eventually(lambda agent=agent: agent.knows(len(running)), poll_s=POLL_S)

    def engine(self, agent: AgentProcess, **settings: Any) -> Engine:
        """An engine in the test's own process, connected to this agent."""
        engine = Engine(agent.socket, **settings)
        self._engines.append((agent, engine))
        return engine

    def namespaces(self, agent: AgentProcess) -> set[bytes]:
        """Of the engines that are or were connected to this agent."""
        return {engine.namespace for at, engine in self._engines if at is agent}

    def close(self) -> None:
        for _, engine in self._engines:
            engine.copier.go_on.set()
            engine.client.close()
        for agent in self.agents.values():
            with contextlib.suppress(ProcessLookupError):
                agent.kill()
            print(f"---- log of agent {agent.name}\n{agent.log}")  # shown where a test failed


def address_files(runtime_dir: Path, cluster: str = "default") -> Iterator[dict[str, Any]]:
    """What agents wrote to be found by."""
    for path in (runtime_dir / "peers" / cluster).glob("*.json"):
        yield json.loads(path.read_bytes())


PAYLOAD_BYTES_MIN = 64 << 10
"""In a connection's buffers: more than any greeting or request, so that pages are on their way."""


def has_pages_on_the_way(data_port: int) -> bool:
    """Whether a connection of this data server has a part of a page in its buffers."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        n_bytes = sum(int(queue, 16) for queue in queues.split(":"))
        if f"{data_port:04X}" in (local[-4:], remote[-4:]) and n_bytes >= PAYLOAD_BYTES_MIN:
            return True
    return False


def publish_all(engine: Engine, numbers: Sequence[int]) -> None:
    """Returns when all these pages are in the pool: on a busy machine a pool that grows may refuse a part at first."""
    eventually(lambda: engine.publish(*numbers)[2] == 0, poll_s=POLL_S)


def finds(engine: Engine, numbers: Sequence[int]) -> None:
    """Returns when all these pages can be had."""
    eventually(lambda: 0 not in engine.locate(*numbers), poll_s=POLL_S)
