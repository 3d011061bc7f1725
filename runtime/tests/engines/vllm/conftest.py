"""Fixtures of the scheduler side's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvpeer.engines.vllm import scheduler_side
from scheduler_of_vllm import Engine


@pytest.fixture
def each_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated pages are published one by one."""
    monkeypatch.setattr(scheduler_side, "GENERATED_PAGES", 1)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.side.close()
