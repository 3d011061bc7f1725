"""Fixtures of tests with real SGLang servers. Those of a module are started together: starting is the slow part."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines.harness import keep_logs
from engines.sglang.servers import SGLangFleet, make_model

PYTHON_VARIABLE = "KVPEER_TEST_SGLANG_PYTHON"


@pytest.fixture(scope="session")
def engine_python() -> str:
    """The interpreter with SGLang and kvpeer in it."""
    python = os.environ.get(PYTHON_VARIABLE, "")
    if not python:
        pytest.fail(f"{PYTHON_VARIABLE} does not name an interpreter with SGLang: run `make engine-test`")
    return python


@pytest.fixture(scope="session")
def short_folder() -> Iterator[Path]:
    """Unix sockets lie below it, and their paths must be short; pytest's own folders are too deep."""
    folder = Path(tempfile.mkdtemp(prefix="kvp-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def sglang_fleet(short_folder: Path, engine_python: str) -> Iterator[SGLangFleet]:
    """The servers of one module; ended after it. KVPEER_TEST_LOGS keeps their logs."""
    folder = Path(tempfile.mkdtemp(dir=short_folder))
    fleet = SGLangFleet(folder, make_model(folder, engine_python), engine_python)
    try:
        yield fleet
    finally:
        fleet.close()
        if os.environ.get("KVPEER_TEST_LOGS"):
            keep_logs(fleet, os.environ["KVPEER_TEST_LOGS"])
