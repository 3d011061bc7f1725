"""Fixtures of tests on the cluster, which is up before and stays up after them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from cluster import lifecycle
from cluster.control_plane import kubectl

from scenarios.installation import install
from scenarios.kube import apply, await_condition
from scenarios.pods import peer_cache_cluster, policy


@pytest.fixture(scope="session")
def cluster() -> None:
    """There is one."""
    if not lifecycle.is_up():
        pytest.fail("no cluster is up: run `make cluster-up`")


@pytest.fixture(scope="module")
def namespace(cluster: None) -> Iterator[str]:
    """A namespace of the module's own, deleted after it."""
    name = f"test-{secrets.token_hex(4)}"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--timeout=120s")


@pytest.fixture(scope="session")
def installed(cluster: None) -> str:
    """The chart is installed and the operator runs. The notes."""
    return install()


@pytest.fixture(scope="module")
def chat(installed: str, namespace: str) -> str:
    """A namespace with the cluster `chat`, whose images were tried, and a policy that is on."""
    apply(peer_cache_cluster(), policy(), namespace=namespace)
    await_condition("pcc", "chat", namespace, "ImagesReady")
    return namespace


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A table of the promises, for people: what held, and how long it took to see."""
    rows = [
        (report.duration, outcome, report.nodeid.partition("::")[2].removeprefix("test_").replace("_", " "))
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, ())
        if report.when == "call" and "/test_custom_resources.py" not in report.nodeid and "scenarios/" in report.nodeid
    ]
    if rows:
        terminalreporter.section("promises on the cluster")
        for seconds, outcome, promise in rows:
            terminalreporter.write_line(f"{outcome:7} {seconds:6.1f} s  {promise}")
