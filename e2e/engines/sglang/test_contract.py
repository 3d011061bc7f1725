"""The contract suite for L3 backends, on SGLang's own file backend (a fault of the suite would show there) and on
kvpeer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

KVPEER = {
    "backend_name": "kvpeer",
    "module_path": "kvpeer.engines.sglang",
    "class_name": "KVPeerStorage",
    "weights_identity": "{test}",
    "engine_name": "contract-{process}",
    # For machines that stall.
    "exists_timeout_s": 5,
    "get_timeout_base_s": 5,
    "get_timeout_max_s": 10,
    "set_timeout_s": 10,
}

SUITE = "kvpeer.engines.sglang.contract"
RUN_DEADLINE_S = 800


def run_suite(python: str, folder: Path, *options: str) -> None:
    runtime_folder = folder / "run"
    runtime_folder.mkdir(mode=0o700)
    environment = {
        **os.environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "KVPEER_AGENT_RUNTIME_DIR": str(runtime_folder),
        "KVPEER_POOL_SIZE": "64Mi",
        "KVPEER_POOL_EXTENT_SIZE": "8Mi",
    }
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    try:
        ran = subprocess.run(
            [*command, "--pyargs", SUITE, "-p", f"{SUITE}.plugin", *options],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=RUN_DEADLINE_S,
        )
    finally:
        for path in runtime_folder.glob("engines/*/agent.sock"):
            with contextlib.suppress(OSError):
                os.kill(process_behind(path), signal.SIGTERM)
    print(ran.stdout[-8000:])
    assert ran.returncode == 0, ran.stdout[-8000:]
    assert " passed" in ran.stdout


def process_behind(path: Path) -> int:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
        return int.from_bytes(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], "little")


def test_sglangs_file_backend_keeps_the_contract(engine_python: str, short_folder: Path) -> None:
    folder = short_folder / "file"
    folder.mkdir()
    run_suite(engine_python, folder, "--l3-backend", "file")


def test_kvpeer_keeps_the_contract(engine_python: str, short_folder: Path) -> None:
    folder = short_folder / "contract"
    folder.mkdir()
    run_suite(engine_python, folder, "--l3-backend", "dynamic", "--l3-extra-config", json.dumps(KVPEER))
