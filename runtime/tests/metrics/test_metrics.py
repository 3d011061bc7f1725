"""Definitions: names follow the rules, the page is up to date, and what is exposed is what is defined."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kvpeer.core.reasons import UnaskedReason
from kvpeer.core.topology import ProblemName
from kvpeer.metrics import build
from kvpeer.metrics.definitions import METRICS, PROMISES, Metric, MetricType
from kvpeer.metrics.policy import POLICY_METRICS
from kvpeer.metrics.reference import reference
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("metric", [*METRICS, *POLICY_METRICS.values()], ids=lambda metric: metric.name)
def test_a_name_says_subsystem_noun_and_unit(metric: Metric) -> None:
    assert re.fullmatch(r"kvpeer(_[a-z]+){2,}", metric.name)
    assert metric.name.endswith("_total") == (metric.type is MetricType.COUNTER)
    if metric.unit:
        assert metric.name.removesuffix("_total").endswith(f"_{metric.unit}")
    assert metric.help.endswith(".")
    assert metric.question.endswith("?")
    assert not {"key", "request", "agent", "peer", "le"} & metric.labels.keys()


def test_names_are_unique() -> None:
    names = [metric.name for metric in (*METRICS, *POLICY_METRICS.values())]
    assert len(set(names)) == len(names)


def test_the_page_shows_exactly_what_is_defined() -> None:
    registry = CollectorRegistry()
    build(registry)
    families = {family.name: family for family in text_string_to_metric_families(generate_latest(registry).decode())}
    for metric in METRICS:
        family = families.pop(metric.name.removesuffix("_total"))
        assert family.type == metric.type.value
        assert family.documentation == metric.help
        if all(metric.labels.values()):
            assert family.samples, metric.name
    families = {name for name in families if not name.endswith("_created")}
    assert families == set()


def test_a_total_counted_elsewhere_advances_and_survives_a_restart_of_its_source() -> None:
    registry = CollectorRegistry()
    metrics = build(registry)
    name = "kvpeer_transport_served_bytes_total"
    for total in (10, 25, 25, 5):
        metrics.advance(name, total, transport="tcp")
    metrics.advance(name, 7, transport="shm")
    assert registry.get_sample_value(name, {"transport": "tcp"}) == 30
    assert registry.get_sample_value(name, {"transport": "shm"}) == 7


def test_a_metric_is_had_only_under_its_name_and_type() -> None:
    metrics = build(CollectorRegistry())
    with pytest.raises(KeyError):
        metrics.counter("kvpeer_links_refusal_total")
    with pytest.raises(TypeError, match="kvpeer_links_up is a Gauge, not a Counter"):
        metrics.counter("kvpeer_links_up")


def test_promised_expressions_use_defined_metrics() -> None:
    defined = {metric.name for metric in METRICS}
    for expression in PROMISES.values():
        for name in re.findall(r"kvpeer_\w+", expression):
            assert name.removesuffix("_bucket") in defined


def test_the_reference_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == reference()


def test_the_problems_of_the_topology_are_those_of_the_core() -> None:
    (metric,) = (metric for metric in METRICS if metric.name == "kvpeer_topology_problems")
    assert metric.labels["problem"] == tuple(name.value for name in ProblemName)


def test_the_reasons_of_pages_not_asked_for_are_those_of_the_core() -> None:
    (metric,) = (metric for metric in METRICS if metric.name == "kvpeer_transport_unasked_pages_total")
    assert set(metric.labels["reason"]) == {reason.value for reason in UnaskedReason}
