"""The fault of a disk tier: what is on the disk is not found after a restart."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from faults.fault import SMALL_PAGES, Fault, Observation, finds, publish_all, read_until_right
from faults.system import DiedError, System

__all__ = ["FAULTS"]

FLUSH_S = 3.0
"""For asynchronous writes of 1 MiB to reach the disk."""

FOUND_S_MAX = 15.0


def _lost_index(system: System) -> Observation:
    pages = list(range(SMALL_PAGES.n_pages))
    disk = Path(tempfile.mkdtemp(dir=system.folder))
    reader, owner = system.start(2, SMALL_PAGES, disks=[None, disk])
    publish_all(owner, pages)
    finds(reader, pages)
    time.sleep(FLUSH_S)
    owner.stop()
    n_bytes = sum(path.stat().st_size for path in disk.rglob("*") if path.is_file())
    if n_bytes < SMALL_PAGES.pool_bytes:
        return Observation(None, f"only {n_bytes} bytes are on the disk, so there is nothing to find again")
    owner.start()
    system.settle()
    found = {}
    for name, node in (("another node", reader), ("its own node", owner)):
        try:
            found[name] = read_until_right(node, pages, FOUND_S_MAX).n_right
        except DiedError as error:
            return Observation(True, str(error))
    text = ", ".join(f"{n} by {name}" for name, n in found.items())
    return Observation(
        any(n < len(pages) for n in found.values()), f"of {len(pages)} pages on the disk can be read: {text}"
    )


FAULTS = [
    Fault(
        "disk index lost on restart",
        "A node with a disk tier publishes 64 pages, is stopped in order 3 s later, and is started again with the same "
        "folder",
        _lost_index,
    ),
]
