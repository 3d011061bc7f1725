"""A real Prometheus scrapes real engines, their agents and the operator's page under load, and every expression of
every dashboard gives numbers (`make metrics-test`).

The operator's numbers come from its own reconciler and endpoint, over an API server that is a dictionary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from kvpeer_dashboards.expressions import RULES, Expression, dashboards, filled, of_dashboards
from kvpeer_operator.metrics import Endpoint, OperatorMetrics
from kvpeer_operator.reconciler import Reconciler, admit_pod
from store import KEY, SECRET, TIME, Store, cluster_object, pod_object, policy_object

from engines.harness import PAGE_TOKENS, Fleet, Server, eventually, prompt
from engines.prometheus import Prometheus

pytestmark = [pytest.mark.monitoring, pytest.mark.timeout(900)]

N_TOKENS = 20 * PAGE_TOKENS + 5
N_PROMPTS = 6

SCRAPED_S = 30.0
"""For the last numbers of the load to be scraped: the interval is 1 s, and the machine may be busy."""

WINDOW = "2m"
"""What rates are taken over: the load, and what the machine takes for it."""

NOTHING_HERE = {
    "kvpeer-pulls: Pages, by operation and outcome": "no SGLang engine runs here",
    "kvpeer-pulls: How long calls take, 99th percentile": "no SGLang engine runs here",
    "kvpeer-transport: What is wrong with machines": "shows only what is wrong, and nothing may be",
}
"""Panels that need what this machine or test does not have."""


@dataclass
class Watched:
    prometheus: Prometheus
    values: dict[str, str]
    """Of the dashboards' variables."""


def _load(producer: Server, reader: Server) -> None:
    """Prompts are computed here and pulled there, then read from the reader's own pool."""
    for n in range(N_PROMPTS):
        tokens = prompt(f"watched {n}", N_TOKENS)
        producer.complete(tokens)
        producer.published()
        reader.complete(tokens)
    reader.reset_prefix_cache()
    reader.complete(prompt("watched 0", N_TOKENS))


def _operate(metrics: OperatorMetrics) -> None:
    store = Store(cluster_object(), policy_object())
    reconciler = Reconciler(store)
    for _ in range(3):
        reconciler.look(KEY, 0.0, TIME, SECRET)
        metrics.looked("done", 0.01, reconciler.seen)
    metrics.admitted(*admit_pod(store, pod_object(), "models"), 0.02)
    metrics.certificate(4e9)


def _values(prometheus: Prometheus) -> dict[str, str]:
    """What Grafana would fill in with everything chosen."""
    values = {"__rate_interval": WINDOW, "__range": WINDOW}
    for dashboard in dashboards().values():
        for variable in dashboard["templating"]["list"][1:]:
            selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
            found = prometheus.get(f"label/{label}/values", **{"match[]": filled(selector, values)})
            assert found, f"the variable {variable['name']} has no values"
            values[variable["name"]] = variable.get("allValue") or "|".join(map(re.escape, found)).replace("\\", "\\\\")
    return values


@pytest.fixture(scope="module")
def watched(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Two engines under load, and what Prometheus has of them."""
    disk = {name: str(tmp_path_factory.mktemp(name)) for name in ("producer", "reader")}
    producer, reader = (
        fleet.start(name, environment={"KVPEER_DISK_PATH": folder, "KVPEER_DISK_SIZE": "1Gi"})
        for name, folder in disk.items()
    )
    operator = OperatorMetrics()
    endpoint = Endpoint.serve(0, operator)
    for server in fleet.servers:
        server.wait_ready()
    ports = {
        "agent": [server.agent_port for server in fleet.servers],
        "vllm": [server.port for server in fleet.servers],
        "operator": [endpoint.port],
    }
    prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), ports, RULES)
    try:
        prometheus.wait_scraping()
        _operate(operator)
        _load(producer, reader)
        yield Watched(prometheus, _values(prometheus))
    finally:
        prometheus.close()
        endpoint.close()


def _fault(watched: Watched, expression: Expression) -> str:
    samples = watched.prometheus.query(filled(expression.text, watched.values))
    if not samples:
        return f"{expression.where}: nothing: {expression.text}"
    wrong = [sample for sample in samples if not math.isfinite(float(sample["value"][1]))]
    return f"{expression.where}: not finite: {wrong}" if wrong else ""


def test_every_expression_of_every_dashboard_gives_numbers(watched: Watched) -> None:
    asked = [each for each in of_dashboards() if each.where not in NOTHING_HERE]
    faults: list[str] = []

    def all_answer() -> bool:
        faults[:] = filter(None, (_fault(watched, each) for each in asked))
        return not faults

    eventually(all_answer, "every expression gives numbers", SCRAPED_S, seen=lambda: "\n".join(faults))
    print(f"{len(asked)} expressions gave numbers")


def test_what_cannot_be_shown_here_is_understood_all_the_same(watched: Watched) -> None:
    for each in of_dashboards():
        if each.where in NOTHING_HERE:
            watched.prometheus.query(filled(each.text, watched.values))


def test_rules_are_evaluated_and_healthy_engines_raise_no_alarm(watched: Watched) -> None:
    def rules() -> list[dict[str, str]]:
        return [rule for group in watched.prometheus.get("rules")["groups"] for rule in group["rules"]]

    eventually(
        lambda: all(rule["health"] == "ok" for rule in rules()), "every rule is evaluated", SCRAPED_S, seen=rules
    )
    firing = {rule["name"] for rule in rules() if rule.get("state") == "firing"}
    assert firing == set()
    for rule in rules():
        if rule["type"] == "recording":
            assert watched.prometheus.query(rule["name"]), f"{rule['name']} recorded nothing"


def test_prometheus_finds_no_fault_with_what_it_scrapes(watched: Watched) -> None:
    targets = watched.prometheus.get("targets")["activeTargets"]
    assert {target["lastError"] for target in targets} == {""}
