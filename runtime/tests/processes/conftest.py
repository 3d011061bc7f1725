"""Clusters of real agents, ended whatever happens."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from processes.agents import Cluster


@contextlib.contextmanager
def _cluster() -> Iterator[Cluster]:
    # A short path: Unix sockets have room for 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kv") as folder, contextlib.closing(Cluster(Path(folder))) as cluster:
        yield cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A cluster for one test, without agents."""
    with _cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[Cluster]:
    """A cluster for the tests of one module, without agents. Tests take pages or namespaces of their own."""
    with _cluster() as cluster:
        yield cluster
