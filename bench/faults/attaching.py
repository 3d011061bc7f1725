"""Faults of a backend's life in a process: SGLang attaches and detaches it at run time, and asks it for statistics."""

from __future__ import annotations

import time

from faults.fault import Fault, Observation, finds, publish_all
from faults.system import BlockedError, Footprint, Shape, System

__all__ = ["FAULTS"]

ROOMY = Shape(128 << 10, 64)

ATTACH_S_MAX = 20.0
"""It runs on SGLang's scheduler thread, so that nothing is served meanwhile."""

CYCLES = 5
ENDED_S = 2.0
"""After a detach, for threads and sockets to end."""

WRITTEN = [1, 2, 3, 4]


def _blocked_attach(system: System) -> Observation:
    (node,) = system.start(1, ROOMY)
    node.engine.ask("detach")
    try:
        seconds = node.attach(ATTACH_S_MAX)
    except BlockedError:
        return Observation(True, f"attaching again still blocks after {ATTACH_S_MAX:g} s")
    publish_all(node, WRITTEN)
    finds(node, WRITTEN)
    return Observation(False, f"attached again after {seconds:.2f} s, and pages are stored and found")


def _leaks(system: System) -> Observation:
    _, node = system.start(2, ROOMY)
    held: list[list[Footprint]] = []
    for cycle in range(CYCLES + 1):  # the first fills caches, and is what the others are compared with
        publish_all(node, range(1000 * cycle, 1000 * cycle + ROOMY.n_pages))
        node.engine.ask("detach")
        time.sleep(ENDED_S)
        held.append(node.footprints())
        node.attach()
    pairs = list(zip(held[0], held[-1], strict=True))
    n_threads = sum(last.n_threads - first.n_threads for first, last in pairs)
    n_fds = sum(last.n_fds - first.n_fds for first, last in pairs)
    n_bytes = sum(last.resident_bytes - first.resident_bytes for first, last in pairs)
    is_shown = n_threads >= CYCLES or n_fds >= CYCLES or n_bytes >= CYCLES * ROOMY.pool_bytes // 2
    return Observation(is_shown, f"{n_threads:+d} threads, {n_fds:+d} descriptors, {n_bytes / 2**20:+.1f} MiB")


def _cumulative_stats(system: System) -> Observation:
    (node,) = system.start(1, ROOMY)
    publish_all(node, WRITTEN)
    written = [sum(node.engine.ask("stats")[1]) for _ in range(3)]
    text = f"one write of {len(WRITTEN)} pages; asked three times, it says " + ", ".join(map(str, written))
    return Observation(any(written[1:]), f"{text} pages written")


FAULTS = [
    Fault(
        "re-attach blocks",
        "The backend of a single node is detached and attached again in the same process",
        _blocked_attach,
    ),
    Fault(
        "detach leaks",
        f"{CYCLES} times: attach, publish {ROOMY.pool_bytes >> 20} MiB (the whole pool), detach; what the node's "
        "processes hold afterwards, detached",
        _leaks,
    ),
    Fault("cumulative get_stats", "Pages are written once and `get_stats` is asked three times", _cumulative_stats),
]
