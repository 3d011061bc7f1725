"""Fixtures of the scheduler side's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scheduler_of_vllm import Engine


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.side.close()
