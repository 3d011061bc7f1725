"""Public faults of PeerCache 0.8.4 that kvpeer does not have: each is tried as `bench/faults` tries it, on real agents
and engine processes.

With KVPEER_TEST_FAULTS_OF=peercache, and the PYTHONPATH of `make faults`, the same tests judge PeerCache, and fail.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BENCH = Path(__file__).parents[3] / "bench" / "faults"
RUN_DEADLINE_S = 850
FAULTS = [
    "evict, then read",
    "put after delete",
    "zombie records after a ring change",
    "model collision",
    "dtype collision",
    "tensor parallel collision",
    "context parallel collision",
    "dead owner poisons keys",
    "frozen peer hangs a read",
    "re-attach blocks",
    "detach leaks",
    "cumulative get_stats",
    "disk index lost on restart",
]


@pytest.fixture(scope="module")
def rows(engine_python: str, short_folder: Path) -> dict[str, dict[str, Any]]:
    """What came of every fault, by its name."""
    judged = os.environ.get("KVPEER_TEST_FAULTS_OF", "kvpeer")
    against = [] if judged == "kvpeer" else ["--against", judged]
    path = short_folder / "faults.json"
    ran = subprocess.run(
        [engine_python, str(BENCH), *against, "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=RUN_DEADLINE_S,
    )
    print(ran.stderr)
    assert path.exists(), ran.stderr[-4000:]
    return {row["fault"]: row for row in json.loads(path.read_text()) if row["system"].lower().startswith(judged)}


def test_every_fault_is_tried(rows: dict[str, dict[str, Any]]) -> None:
    assert list(rows) == FAULTS


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_does_not_show(rows: dict[str, dict[str, Any]], fault: str) -> None:
    row = rows[fault]
    assert row["is_shown"] is False, row["observed"]
