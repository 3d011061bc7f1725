"""What the operator shows to Prometheus is what it saw and did."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import pytest
from kvpeer.metrics.operator import OPERATOR_METRICS, SKIPS
from kvpeer_operator.injection import Patch, Skip, SkipReason
from kvpeer_operator.metrics import Endpoint, OperatorMetrics
from kvpeer_operator.reconciler import Reconciler
from prometheus_client.parser import text_string_to_metric_families
from store import KEY, SECRET, TIME, Agents, Store, cluster_object, policy_object


@pytest.fixture
def metrics() -> OperatorMetrics:
    return OperatorMetrics()


@pytest.fixture
def endpoint(metrics: OperatorMetrics) -> Iterator[Endpoint]:
    endpoint = Endpoint.serve(0, metrics)
    yield endpoint
    endpoint.close()


def _value(metrics: OperatorMetrics, name: str, **labels: str) -> float:
    value = metrics.registry.get_sample_value(f"kvpeer_operator_{name}", labels)
    assert value is not None, f"there is no series {name}{labels}"
    return value


def test_reasons_and_conditions_are_those_of_the_operator(metrics: OperatorMetrics) -> None:
    assert tuple(reason.value for reason in SkipReason) == SKIPS
    reconciler = Reconciler(Store(cluster_object()), Agents().post)
    reconciler.look(KEY, 0.0, TIME, SECRET)
    (clusters,) = (each for each in OPERATOR_METRICS if each.name == "kvpeer_operator_clusters")
    shown = {each.type for each in reconciler.seen[KEY].status.conditions}
    assert shown == set(clusters.labels["condition"])
    (members,) = (each for each in OPERATOR_METRICS if each.name == "kvpeer_operator_members")
    assert reconciler.seen[KEY].status.members.model_dump().keys() == set(members.labels["state"])


def test_a_look_shows_conditions_members_and_modes_of_what_is_there(metrics: OperatorMetrics) -> None:
    store = Store(cluster_object(), policy_object())
    reconciler = Reconciler(store, Agents().post)
    reconciler.look(KEY, 0.0, TIME, SECRET)
    metrics.looked("done", 0.02, reconciler.seen)
    assert _value(metrics, "clusters", condition="Ready", status="False") == 1
    assert _value(metrics, "clusters", condition="Ready", status="True") == 0
    assert _value(metrics, "policies", mode="On") == 1
    assert _value(metrics, "look_seconds_count") == 1

    del store.objects["PeerCacheCluster", "chat"]
    assert reconciler.look(KEY, 0.0, TIME, SECRET) is None
    metrics.looked("gone", 0.01, reconciler.seen)
    assert _value(metrics, "clusters", condition="Ready", status="False") == 0
    assert _value(metrics, "policies", mode="On") == 0
    assert _value(metrics, "looks_total", outcome="gone") == 1


@pytest.mark.parametrize(
    ("patch", "skip", "outcome"),
    [
        (Patch(({"op": "add"},)), None, "agent"),
        (Patch(()), None, "present"),
        (Patch(({"op": "add"},)), Skip(SkipReason.QUOTA, "make room"), "quota"),
    ],
    ids=["agent", "present", "skipped"],
)
def test_an_answer_of_the_webhook_is_counted_by_what_was_done(
    metrics: OperatorMetrics, patch: Patch, skip: Skip | None, outcome: str
) -> None:
    metrics.admitted(patch, skip, 0.01)
    assert _value(metrics, "admissions_total", outcome=outcome) == 1


def test_prometheus_reads_exactly_what_is_defined(metrics: OperatorMetrics, endpoint: Endpoint) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=5) as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    for metric in OPERATOR_METRICS:
        family = families.pop(metric.name.removesuffix("_total"))
        assert (family.type, family.documentation) == (metric.type.value, metric.help)
    assert all(name.startswith("process_") or name.endswith("_created") for name in families)
