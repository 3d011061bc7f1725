"""Looking at a full agent costs it nothing that its engines would feel."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from processes.agents import Cluster, publish_all
from processes.handles import eventually

pytestmark = [pytest.mark.process, pytest.mark.long]

N_PAGES = 100_000
PAGE_BYTES = 4096
BATCH_PAGES = 2000
N_SCRAPES = 20
SCRAPE_S_MAX = 0.05
"""Of the agent's CPU time: on a busy machine a scrape waits, but costs the same."""


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _cost_s(pid: int, act: Callable[[], None]) -> tuple[float, float]:
    """CPU time of the process, and time on the clock, of what is done."""
    cpu_s, began_at = _cpu_s(pid), time.perf_counter()
    act()
    return _cpu_s(pid) - cpu_s, time.perf_counter() - began_at


def test_a_scrape_of_100000_pages_costs_less_than_50_ms(cluster: Cluster) -> None:
    (agent,) = cluster.start("full", settings={"pool.size": "1Gi", "pool.extent_size": "32Mi"})
    engine = cluster.engine(agent, page_bytes=PAGE_BYTES, n_blocks=BATCH_PAGES)
    for start in range(0, N_PAGES, BATCH_PAGES):
        publish_all(engine, range(start, start + BATCH_PAGES))
    eventually(lambda: agent.metric("kvpeer_pool_pages", state="committed") == N_PAGES)
    assert agent.process is not None
    pid = agent.process.pid

    def scrape() -> None:
        for _ in range(N_SCRAPES):
            agent.metrics_page()

    cpu_s, wall_s = _cost_s(pid, scrape)
    print(f"one scrape: {cpu_s / N_SCRAPES * 1000:.1f} ms of CPU, {wall_s / N_SCRAPES * 1000:.1f} ms on the clock")
    assert cpu_s / N_SCRAPES < SCRAPE_S_MAX
