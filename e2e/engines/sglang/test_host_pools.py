"""What kvpeer makes of SGLang's real host pools, layout by layout, and of one without bytes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def said_by(python: str, script: str) -> dict[str, Any]:
    """What a script of this folder prints last, run in the engine's Python."""
    ran = subprocess.run(
        [python, str(Path(__file__).with_name(script))],
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    said: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return said


def test_an_anchor_without_bytes_has_all_pages_and_the_pools_beside_it_decide(engine_python: str) -> None:
    assert said_by(engine_python, "logical_anchor.py") == {
        "exists": 3,
        "set": [True] * 3,
        "get": [True] * 3,
        "stops": [1, 2, 3],
        "stops beside a pool that has nothing": [],
        "pages beside a pool that has nothing": 0,
    }


def test_every_host_pool_is_read_into_as_sglang_means_it_or_refused_by_name(engine_python: str) -> None:
    verdicts = said_by(engine_python, "host_pool_layouts.py")
    # SGLang itself makes no pool of these, and that may change.
    possible = {name: verdict for name, verdict in verdicts.items() if not verdict.startswith("not made")}
    refused = {name: possible.pop(name) for name in list(possible) if "page_unified" in name}
    assert possible.pop("logical") == "logical"
    assert possible.pop("asymmetric page_first") == "strided, no flat pages"
    assert possible.pop("asymmetric page_first_direct") == "strided, no flat pages"
    expected = {f"mha {layout}" for layout in ("layer_first", "page_first", "page_first_direct", "page_head")}
    expected |= {f"mla {layout}" for layout in ("layer_first", "page_first", "page_first_direct")}
    assert possible == dict.fromkeys(expected, "same")
    assert refused
    assert all(
        verdict.startswith("refused") and "--hicache-mem-layout page_first_direct" in verdict
        for verdict in refused.values()
    )
