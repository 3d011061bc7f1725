"""The operator under an API server that fails, another manager of its objects and clocks that jump: it comes to the
same end, says what is true, and asks no more often than it should. By HTTP, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_server import FailingServer
from kubernetes import client
from kvpeer_operator.kubernetes_api import connect_to
from kvpeer_operator.reconcile.plan import LOOK_AGAIN_S
from kvpeer_operator.reconciler import Reconciler
from kvpeer_operator.work import RETRY_LAST_S, WorkQueue
from store import KEY, SECRET, TIME, Agents, Store, cluster_object, policy_object

HOUR_S = 3600.0
READS = 6
"""Requests of a look that changes nothing."""

IDLE_MAX = HOUR_S / LOOK_AGAIN_S * READS + READS
"""Requests in an hour without events."""


class Operator:
    """The work of main's task, in virtual time."""

    def __init__(self, server: FailingServer, folder: Path) -> None:
        configuration = client.Configuration()
        configuration.host = server.url
        self.api = connect_to(configuration, str(folder / "discovery"))
        self.server = server
        self.reconciler = Reconciler(self.api, Agents().post)
        self.queue = WorkQueue()
        self.now = self.wall = 1000.0
        self.n_failed = 0
        self.queue.changed(KEY, self.now)

    def run(self, seconds: float) -> int:
        """Returns the number of requests in that time."""
        before, until = len(self.server.requests), self.now + seconds
        while self.now + self.queue.wait_s(self.now) <= until:
            wait_s = self.queue.wait_s(self.now)
            self.now, self.wall = self.now + wait_s, self.wall + wait_s
            key = self.queue.take(self.now)
            if key is not None:
                self._look()
        self.wall, self.now = self.wall + until - self.now, until
        return len(self.server.requests) - before

    def _look(self) -> None:
        trial = self.server.store.objects.get(("Pod", "chat-kvpeer-trial"))
        if trial:
            trial["status"] = {"phase": "Succeeded"}
        try:
            again_s = self.reconciler.look(KEY, self.wall, TIME, SECRET)
        except Exception:  # noqa: BLE001 - as main does
            self.n_failed += 1
            self.queue.failed(KEY, self.now)
        else:
            self.queue.done(KEY, self.now, again_s)


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    server = FailingServer(Store(cluster_object(), policy_object()))
    made = Operator(server, tmp_path)
    yield made
    made.api.close()
    server.close()


def ready(operator: Operator) -> str:
    conditions = operator.server.store.objects["PeerCacheCluster", "chat"].get("status", {}).get("conditions", ())
    return str({each["type"]: each["status"] for each in conditions}.get("Ready"))


def test_without_faults_an_hour_is_a_few_dozen_requests(operator: Operator) -> None:
    operator.run(60)
    assert ready(operator) == "True"
    assert READS < operator.run(HOUR_S) <= IDLE_MAX


FAULTS: dict[str, Callable[[int, str], int]] = {
    "the first twenty": lambda number, method: number <= 20,
    "every eleventh": lambda number, method: number % 11 == 0,
    "each second write": lambda number, method: method != "GET" and number % 2 == 0,
}


@pytest.mark.parametrize("status", [409, 410, 429, 500, 503])
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_the_api_server_answers_the_end_is_the_same(operator: Operator, fault: str, status: int) -> None:
    store = operator.server.store
    operator.run(HOUR_S)
    whole = dict(store.objects)
    store.objects = {(each["kind"], "chat"): each for each in (cluster_object(), policy_object())}
    operator.server.fault = lambda number, method: status * FAULTS[fault](number, method)
    n_before = len(operator.server.requests)
    operator.queue.changed(KEY, operator.now)
    operator.server.requests.clear()
    assert operator.run(HOUR_S) < 4 * IDLE_MAX + n_before
    assert ready(operator) == "True"
    assert {key: each.get("spec") for key, each in store.objects.items()} == {
        key: each.get("spec") for key, each in whole.items()
    }


@pytest.mark.parametrize("status", [409, 410, 429, 500])
def test_an_api_server_that_only_fails_is_asked_at_growing_distances_whatever_happens(
    operator: Operator, status: int
) -> None:
    operator.server.fault = lambda number, method: status
    n_requests = 0
    for _ in range(int(HOUR_S)):
        operator.queue.changed(KEY, operator.now)  # events go on
        n_requests += operator.run(1)
    assert operator.n_failed == n_requests <= HOUR_S / RETRY_LAST_S + 8


def test_a_server_that_asks_to_wait_for_long_holds_up_no_other_cluster(operator: Operator) -> None:
    """The client of Kubernetes would sleep as long as it is told, without a limit."""
    operator.server.headers = {"Retry-After": "30"}
    operator.server.fault = lambda number, method: 429
    assert operator.run(5) <= 2
    assert operator.n_failed >= 1


def test_a_manager_that_always_changes_a_service_back_is_met_at_each_look_and_no_more_often(operator: Operator) -> None:
    operator.run(60)
    store, take_over = operator.server.store, operator.server.store.apply

    def contested(obj: Any) -> None:
        take_over(obj)
        store.objects["Service", "chat-kvpeer-agents"]["spec"]["publishNotReadyAddresses"] = False

    store.apply = contested  # type: ignore[method-assign]
    store.objects["Service", "chat-kvpeer-agents"]["spec"]["publishNotReadyAddresses"] = False
    n_patches = -sum(each[0] == "PATCH" for each in operator.server.requests)
    assert operator.run(HOUR_S) <= IDLE_MAX + HOUR_S / LOOK_AGAIN_S + 1
    n_patches += sum(each[0] == "PATCH" for each in operator.server.requests)
    assert 6 <= n_patches <= 7


@pytest.mark.parametrize("jump_s", [-400 * 86400.0, 400 * 86400.0])
def test_a_clock_that_jumps_ends_no_retries_and_starts_no_storm(operator: Operator, jump_s: float) -> None:
    store = operator.server.store
    store.forbidden = "exceeded quota: team"

    def quota(number: int, method: str) -> int:
        is_pod = operator.server.requests[-1][1].endswith("/pods")
        return 403 if method == "POST" and is_pod and store.forbidden else 0

    operator.server.fault = quota
    operator.run(120)
    assert ready(operator) == "False"
    operator.wall += jump_s
    assert operator.run(600) < 600 / 30 * (READS + 2) + 2 * READS
    store.forbidden = ""
    operator.run(120)
    assert ready(operator) == "True"
