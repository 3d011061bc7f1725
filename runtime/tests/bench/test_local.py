"""The benchmark of this machine, run for real but quickly: that it measures, not what."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kvpeer.bench import decode_rows
from kvpeer.bench.memory import PIECE_BYTES, EngineMemory
from kvpeer.bench.reference import Loopback, copy_and_sum
from kvpeer.native import crc64

RUNTIME = Path(__file__).parents[2]

PAGE_BYTES = 2 * PIECE_BYTES


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(RUNTIME)}
    command = [sys.executable, "-m", "kvpeer.cli", "bench", "local", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_quick_run_measures_everything_and_writes_what_it_prints(tmp_path):
    file = tmp_path / "rows.json"
    done = bench("--quick", "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = decode_rows(file.read_bytes())
    assert {row.name for row in rows} == {
        *(
            "publish.copy",
            "disk.write",
            "disk.read",
            "directory.record",
            "agent.start",
            "agent.idle.cpu",
            "agent.idle.memory",
        ),
        *(f"fetch.{by}.{verify}" for by in ("shm", "tcp") for verify in ("generation", "full")),
        *(f"fetch.{by}.{verify}.together" for by in ("shm", "tcp") for verify in ("generation", "full")),
        *("locate.1_keys", "locate.64_keys", "locate.512_keys", "locate.messages"),
    }
    assert all(row.value > 0 or row.name == "agent.idle.cpu" for row in rows)
    assert all(row.name in done.stdout for row in rows)
    assert "budgets hold" in done.stdout
    n_messages = next(row for row in rows if row.name == "locate.messages")
    assert n_messages.holds, n_messages


def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path):
    done = bench("--json", str(tmp_path / "no" / "such" / "folder.json"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "--json: cannot write" in done.stderr


def test_the_reference_moves_the_bytes_that_it_is_timed_for():
    engine, target = EngineMemory(PAGE_BYTES, 8), np.zeros((4, PAGE_BYTES), np.uint8)
    blocks = np.array([6, 1, 7, 0], np.int64)
    to = (target.ctypes.data + np.arange(4 * 2, dtype=np.uint64).reshape(4, 2) * PIECE_BYTES).astype(np.uint64)
    sums = copy_and_sum(to, engine.pieces(blocks), PIECE_BYTES)
    assert sums.tolist() == [crc64(page) for page in target]
    loopback, over_tcp = Loopback(), np.zeros_like(target)
    addresses = (target.ctypes.data + np.arange(4, dtype=np.uint64) * PAGE_BYTES).astype(np.uint64)
    destinations = (over_tcp.ctypes.data + np.arange(4, dtype=np.uint64) * PAGE_BYTES).astype(np.uint64)
    loopback.fetch(destinations, addresses, PAGE_BYTES)
    loopback.close()
    assert np.array_equal(over_tcp, target)
    assert len({page.tobytes() for page in target}) == 4
