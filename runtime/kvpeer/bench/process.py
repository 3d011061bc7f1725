"""What an agent costs as a process: its start, its memory, and the CPU time of doing nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvpeer.bench.agents import AgentProcess, cluster, own_environment, served_after_s
from kvpeer.bench.rounds import Comparison, Experiment

__all__ = ["idling", "starting"]

IMPORT = (sys.executable, "-c", "import kvpeer.agent.main")

IMPORT_S_MAX = 30.0

SETTLE_S = 1.0
"""After agents have met: the first exchanges of membership and directory are not idling."""

N_AGENTS = 3


@contextmanager
def starting() -> Iterator[Experiment]:
    """From the launch of an agent with default settings to the first engine's connection, against an interpreter that
    imports the agent and ends. The process is new, its files are in the page cache, and the cluster's secret exists."""
    with cluster() as agents:

        def start() -> float:
            launched_at = time.perf_counter()
            agent = agents.launch()
            took_s = served_after_s(agent, launched_at)
            agents.end(agent)
            return took_s

        def import_only() -> float:
            launched_at = time.perf_counter()
            subprocess.run(IMPORT, check=True, timeout=IMPORT_S_MAX, env=own_environment())  # noqa: S603 - our own command line
            return time.perf_counter() - launched_at

        yield Experiment(
            {"import": import_only, "start": start},
            [Comparison("agent.start", "s", "start", "import", "python, import of the agent", budget="value <= 0.5")],
        )


@contextmanager
def idling(window_s: float) -> Iterator[Experiment]:
    """CPU time, and memory besides the pool, of an agent that knows two others and has nothing to do."""
    with cluster() as agents:
        agent, *_ = agents.start(N_AGENTS)
        time.sleep(SETTLE_S)
        yield Experiment(
            {
                "cpu": lambda: _idle_percent(agent, window_s),
                "memory": lambda: agent.resident_bytes() / 1e6,
            },
            [
                Comparison("agent.idle.cpu", "% of a core", "cpu", budget="value < 1"),
                Comparison("agent.idle.memory", "MB besides the pool", "memory", budget="value < 80"),
            ],
        )


def _idle_percent(agent: AgentProcess, window_s: float) -> float:
    before, started = agent.cpu_s(), time.perf_counter()
    time.sleep(window_s)
    return 100 * (agent.cpu_s() - before) / (time.perf_counter() - started)
