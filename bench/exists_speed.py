"""How long SGLang's `exists` takes for a long prompt: 4,096 pages at a peer, with their records at 16 other agents.

    python bench/exists_speed.py

Starts 17 agents on this host and asks as the SGLang adapter does, key derivation included. SGLang itself is not needed.
Beside it stands the least that such a question can cost: as many bytes, sent at once to 16 bare ends of the control
channel with nothing behind them, until all have answered. They take turns. Where all of them share a few cores, the
ratio says more than the milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))

from kvpeer.bench.agents import AgentProcess, Cluster, cluster, served_after_s, wait_until
from kvpeer.bench.control import fan_outs
from kvpeer.bench.report import table
from kvpeer.bench.rounds import Comparison, Experiment, measure
from kvpeer.client import Client, ClientSettings, EngineLayout, Registration
from kvpeer.core.chain import loose_pages, namespace_digest
from kvpeer.engines.sglang.layout import PageLayout
from kvpeer.engines.sglang.pages import PoolPages
from kvpeer.wire.messages import Lookup
from kvpeer.wire.packing import U2, pack

BUDGET = "value <= 20"

PAGE_BYTES = 512
PUBLISH_PAGES = 256
DEADLINE_S = 10
POLL_S = 0.1
CPU_REPEATS = 10
CLOSE_S = 1.0
SETTINGS = {"pool.size": "32Mi", "pool.extent_size": "1Mi"}
NAMESPACE = namespace_digest({"bench": "exists"})


def open_pool(socket: str, n_pages: int, name: str) -> PoolPages:
    """A host pool of one segment at this agent."""
    memory = np.zeros((n_pages, PAGE_BYTES), np.uint8)
    segments = EngineLayout(
        np.array([memory.ctypes.data], np.uint64), np.array([PAGE_BYTES], np.uint64), np.array([PAGE_BYTES], np.uint32)
    )
    registration = Registration(name, NAMESPACE, {"bench": "exists"}, PAGE_BYTES, 1, 0, 0, PAGE_BYTES)
    client = Client.connect(ClientSettings(socket=socket), registration)
    client.register_layout(segments)
    return PoolPages(memory, PageLayout(segments, n_pages, 1, PAGE_BYTES, "bench"), client, NAMESPACE, 0)


def n_found(pool: PoolPages, keys: Sequence[str]) -> int:
    return int(np.count_nonzero(pool.statuses(keys, time.monotonic() + DEADLINE_S)))


def asked_ms(pool: PoolPages, keys: Sequence[str], n_expected: int) -> float:
    began_at = time.perf_counter()
    n = n_found(pool, keys)
    elapsed_ms = (time.perf_counter() - began_at) * 1000
    assert n == n_expected, f"{n} of {len(keys)} pages were found, not {n_expected}"
    return elapsed_ms


def cpu_ms(pool: PoolPages, keys: Sequence[str], processes: Sequence[AgentProcess]) -> float:
    """CPU time of a question, in this process and these agents, beyond what they use anyway: what depends little on the
    load of the machine."""

    def used_s(act: Callable[[], object]) -> float:
        before = time.process_time() + sum(agent.cpu_s() for agent in processes)
        act()
        return time.process_time() + sum(agent.cpu_s() for agent in processes) - before

    began_at = time.monotonic()
    asking_s = used_s(lambda: [asked_ms(pool, keys, len(keys)) for _ in range(CPU_REPEATS)])
    idle_s = used_s(functools.partial(time.sleep, time.monotonic() - began_at))
    return (asking_s - idle_s) * 1000 / CPU_REPEATS


def new_keys(n_pages: int) -> list[str]:
    """As SGLang makes them: 64 hex digits."""
    return [uuid.uuid4().hex * 2 for _ in range(n_pages)]


def published(producer: PoolPages, reader: PoolPages, n_pages: int) -> list[str]:
    """Keys of pages that the reader can find."""
    keys = new_keys(n_pages)
    for start in range(0, n_pages, PUBLISH_PAGES):
        batch = keys[start : start + PUBLISH_PAGES]
        numbers = np.arange(start, start + len(batch), dtype=np.int64)
        while not producer.write(batch, numbers, time.monotonic() + DEADLINE_S).all():
            time.sleep(0.05)
    while n_found(reader, keys) < n_pages:
        time.sleep(0.5)
    return keys


def shares(keys: Sequence[str], n_owners: int) -> list[Lookup]:
    """A message for each owner, of an equal share of the keys."""
    chain = loose_pages(NAMESPACE, map(str.encode, keys))
    bounds = np.linspace(0, len(chain), n_owners + 1).astype(int).tolist()
    parts = [chain.part(start, stop) for start, stop in itertools.pairwise(bounds)]
    return [Lookup(part.keys, pack(part.partitions(), U2)) for part in parts]


def started(agents: Cluster, n: int) -> list[AgentProcess]:
    """Agents that serve and know each other; started one after another, because on few cores so many would starve each
    other for longer than a start may take."""
    running = []
    for _ in range(n):
        running.append(agents.launch(SETTINGS))
        served_after_s(running[-1], 0.0, POLL_S)
    alive = 'kvpeer_membership_members{state="alive"}'
    for agent in running:
        wait_until(lambda agent=agent: agent.metric(alive) == n, "the agents do not see each other", POLL_S)
    return running


@contextlib.contextmanager
def asking(n_agents: int, n_pages: int) -> Iterator[Experiment]:
    with cluster() as agents, contextlib.ExitStack() as ending:
        producing, reading, *_ = running = started(agents, n_agents)
        producer = open_pool(producing.socket, n_pages, "producer")
        reader = open_pool(reading.socket, n_pages, "reader")
        for pool in (producer, reader):
            ending.callback(lambda pool=pool: pool.close(time.monotonic() + CLOSE_S))
        keys = published(producer, reader, n_pages)
        bare = ending.enter_context(fan_outs(agents.folder, n_agents - 1))
        messages = shares(keys, n_agents - 1)
        subjects: dict[str, Callable[[], float]] = {
            "bare": lambda: bare(messages) / 1000,
            "at_a_peer": lambda: asked_ms(reader, keys, n_pages),
            "nowhere": lambda: asked_ms(reader, new_keys(n_pages), 0),
            "in_the_own_pool": lambda: asked_ms(producer, keys, n_pages),
        }
        subjects["cpu"] = lambda: cpu_ms(reader, keys, running)
        subjects["cpu_asked"] = lambda: cpu_ms(reader, keys, [reading])
        name = f"bare round trips to {n_agents - 1}"
        rows = [
            Comparison(f"sglang.exists.{n_pages}_keys.{where}", "ms", where, "bare", name, budget=BUDGET)
            for where in ("at_a_peer", "nowhere", "in_the_own_pool")
        ]
        rows.append(Comparison(f"sglang.exists.{n_pages}_keys.at_a_peer.cpu", "ms", "cpu"))
        rows.append(Comparison(f"sglang.exists.{n_pages}_keys.at_a_peer.cpu_of_the_asking_side", "ms", "cpu_asked"))
        yield Experiment(subjects, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=17)
    parser.add_argument("--pages", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args()
    with asking(options.agents, options.pages) as experiment:
        print(table(measure(experiment, options.rounds)))


if __name__ == "__main__":
    main()
