"""How long SGLang's `exists` takes for a long prompt: 4,096 pages at a peer, with their records at 16 other agents.

    python bench/exists_speed.py

Starts 17 agents on this host and asks as the SGLang adapter does, key derivation included. SGLang itself is not needed.
Prints milliseconds; they say something on a machine that is idle otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime" / "tests"))

from kvpeer.client import Client, ClientSettings, EngineLayout, Registration
from kvpeer.core.chain import namespace_digest
from kvpeer.engines.sglang.layout import PageLayout
from kvpeer.engines.sglang.pages import PoolPages
from processes.agents import Cluster

PAGE_BYTES = 512
PUBLISH_PAGES = 256
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


def asked_ms(pool: PoolPages, keys: list[str], n_expected: int) -> float:
    began_at = time.perf_counter()
    found = pool.exist(keys, time.monotonic() + 10)
    elapsed_ms = (time.perf_counter() - began_at) * 1000
    assert int(found.sum()) == n_expected, f"{int(found.sum())} of {len(keys)} pages were found, not {n_expected}"
    return elapsed_ms


def published(producer: PoolPages, reader: PoolPages, n_pages: int) -> list[str]:
    """Keys of pages that the reader can find."""
    keys = [uuid.uuid4().hex * 2 for _ in range(n_pages)]
    for start in range(0, n_pages, PUBLISH_PAGES):
        batch = keys[start : start + PUBLISH_PAGES]
        numbers = np.arange(start, start + len(batch), dtype=np.int64)
        while not producer.write(batch, numbers, time.monotonic() + 10).all():
            time.sleep(0.05)
    while not reader.exist(keys, time.monotonic() + 10).all():
        time.sleep(0.5)
    return keys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=17)
    parser.add_argument("--pages", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvp-", dir="/tmp") as folder:
        cluster = Cluster(Path(folder))
        try:
            producing, reading, *_ = cluster.start(*(f"agent-{n}" for n in range(options.agents)))
            producer = open_pool(producing.socket, options.pages, "producer")
            reader = open_pool(reading.socket, options.pages, "reader")
            keys = published(producer, reader, options.pages)
            unknown = [[uuid.uuid4().hex * 2 for _ in range(options.pages)] for _ in range(options.runs)]
            for what, times in (
                ("all at a peer", [asked_ms(reader, keys, len(keys)) for _ in range(options.runs)]),
                ("nowhere", [asked_ms(reader, some, 0) for some in unknown]),
                ("in the own pool", [asked_ms(producer, keys, len(keys)) for _ in range(options.runs)]),
            ):
                times.sort()
                print(
                    f"exists of {options.pages} pages, {options.agents} agents, {what}: min {times[0]:.1f}, "
                    f"median {statistics.median(times):.1f}, p90 {times[int(0.9 * len(times))]:.1f} ms"
                )
        finally:
            print("", flush=True)
            for agent in cluster.agents.values():
                agent.kill()


if __name__ == "__main__":
    main()
