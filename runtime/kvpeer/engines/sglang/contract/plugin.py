"""Options and fixtures of the contract suite, as a pytest plug-in; see the package's docstring."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpeer.engines.sglang.contract.caches import Caches
from kvpeer.engines.sglang.contract.processes import CacheProcess


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--l3-backend", default="file", help="as --hicache-storage-backend of SGLang")
    parser.addoption("--l3-extra-config", default='{"file_storage_path": "{store}"}', help="JSON; see the package")


@pytest.fixture(scope="session")
def processes() -> Iterator[dict[str, CacheProcess]]:
    started = {name: CacheProcess(name) for name in ("a", "b")}
    yield started
    for process in started.values():
        process.end()


@pytest.fixture
def caches(processes: dict[str, CacheProcess], request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Caches]:
    options = request.config
    made = Caches(processes, options.getoption("--l3-backend"), options.getoption("--l3-extra-config"), tmp_path)
    yield made
    made.close()
