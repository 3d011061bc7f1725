"""A process may end while its threads copy: engines end without asking, and their copying threads are daemons."""

from __future__ import annotations

import subprocess
import sys

import pytest
from processes.handles import RUNTIME

_COPIES_AT_EXIT = """
import threading
import numpy as np
from kvpeer.client.device import EngineLayout, NativeCopier
from kvpeer.native import Pool, PoolMap

N_PAGES, PAGE_BYTES, EXTENT_BYTES = 16, 1 << 20, 16 << 20
pool = Pool(EXTENT_BYTES, EXTENT_BYTES, b"r" * 16)
pool.touch_extent(0)
pool.assign_extent(0, PAGE_BYTES)
view = PoolMap(*pool.fds, EXTENT_BYTES, b"r" * 16)
memory = np.ones(EXTENT_BYTES, np.uint8)
base, stride, length = ([memory.ctypes.data], np.uint64), ([PAGE_BYTES], np.uint64), ([PAGE_BYTES], np.uint32)
copier = NativeCopier(EngineLayout(np.array(*base), np.array(*stride), np.array(*length), memory=memory))
offsets = np.arange(N_PAGES, dtype=np.uint64) * np.uint64(PAGE_BYTES)
is_copying = threading.Event()

def copy():
    while True:
        copier.gather(view, offsets, 0, np.arange(N_PAGES, dtype=np.int64))
        is_copying.set()

threading.Thread(target=copy, daemon=True).start()
is_copying.wait()
"""


@pytest.mark.process
@pytest.mark.parametrize("attempt", range(3))
def test_a_process_that_ends_while_a_thread_copies_ends_in_order(attempt: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COPIES_AT_EXIT],
        env={"PYTHONPATH": str(RUNTIME)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
