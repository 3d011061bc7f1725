"""Fixtures of tests with real engines. Servers that a module needs are started together, because starting is the slow
part."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.harness import PYTHON_VARIABLE, Fleet, keep_logs, make_fleet


@pytest.fixture(scope="session")
def model_fleet() -> Iterator[Fleet]:
    """A folder with the model in it, from which `fleet` takes its servers."""
    python = os.environ.get(PYTHON_VARIABLE, "")
    if not python:
        pytest.fail(f"{PYTHON_VARIABLE} does not name an interpreter with vLLM: run `make engine-test`")
    # Unix sockets lie below it, and their paths must be short; pytest's own folders are too deep.
    folder = Path(tempfile.mkdtemp(prefix="kvp-", dir="/tmp"))
    try:
        yield make_fleet(folder, python)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def fleet(model_fleet: Fleet) -> Iterator[Fleet]:
    """The servers of one module; ended after it. KVPEER_TEST_LOGS keeps their logs."""
    fleet = Fleet(model_fleet.folder, model_fleet.model, model_fleet.python)
    try:
        yield fleet
    finally:
        fleet.close()
        if os.environ.get("KVPEER_TEST_LOGS"):
            keep_logs(fleet, os.environ["KVPEER_TEST_LOGS"])
