"""Definitions: names follow the rules, the page is up to date, and what is exposed is what is defined."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import promql_parser
import pytest
from kvpeer.core.reasons import DecisionReason, MissReason, UnaskedReason
from kvpeer.core.topology import ProblemName
from kvpeer.metrics import build
from kvpeer.metrics.catalogue import CATALOGUE, series
from kvpeer.metrics.comparison import COMPARISON
from kvpeer.metrics.definitions import METRICS, MISSES, OUTCOMES, PROMISES
from kvpeer.metrics.metric import Metric, MetricType
from kvpeer.metrics.policy import DECISION_REASONS
from kvpeer.metrics.reference import reference
from kvpeer.model import Outcome
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[3]

ALL = [metric for section in CATALOGUE for metric in section.metrics]

UNITS = {"", "seconds", "bytes"}
"""Base units. Counts have none."""

SERIES_MAX = 200
"""Of one metric: what a process may add to a Prometheus that scrapes thousands of them."""

UNBOUNDED = {"key", "request", "request_id", "agent", "agent_id", "peer", "address", "prompt", "namespace", "pod", "le"}


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_a_name_says_subsystem_noun_and_unit(metric: Metric) -> None:
    assert re.fullmatch(r"kvpeer(_[a-z]+){2,}", metric.name)
    assert metric.name.endswith("_total") == (metric.type is MetricType.COUNTER)
    assert not metric.name.removesuffix("_total").endswith(("_count", "_sum", "_bucket", "_info_total"))
    assert metric.unit in UNITS
    assert (metric.type is MetricType.HISTOGRAM) <= (metric.unit == "seconds")
    words = metric.name.removesuffix("_total").split("_")
    assert words[-1] == metric.unit or not {*UNITS, "ms", "us", "milliseconds", "kib", "mib", "gb"} & {words[-1]}
    assert metric.help.endswith(".")
    assert metric.question.endswith("?")


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_labels_take_few_values(metric: Metric) -> None:
    assert not UNBOUNDED & metric.labels.keys()
    n_series = 1
    for name, values in metric.labels.items():
        assert re.fullmatch(r"[a-z_]+", name)
        assert len(set(values)) == len(values)
        n_series *= len(values) or 1
    assert n_series <= SERIES_MAX


def test_names_are_unique() -> None:
    names = [metric.name for metric in ALL]
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
    families = {name for name in families if not name.endswith("_created") and not name.startswith("process_")}
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


def test_promised_expressions_and_comparisons_use_defined_metrics_and_label_values() -> None:
    ours = [name for _, rows in COMPARISON for row in rows for name in row.ours if name.startswith("kvpeer_")]
    for expression in PROMISES.values():
        _check(expression)
    for name in ours:
        metric = {**series(), **{metric.name: metric for metric in ALL}}[name.partition("{")[0]]
        for label, value in re.findall(r'(\w+)="(\w+)"', name):
            assert value in metric.labels[label]


def _check(expression: str) -> None:
    promql_parser.parse(expression)
    for name in re.findall(r"kvpeer_\w+", expression):
        assert name in series(), expression


def test_the_reference_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == reference()


def _values(name: str, label: str) -> tuple[str, ...]:
    (metric,) = (metric for metric in ALL if metric.name == name)
    return metric.labels[label]


@pytest.mark.parametrize(
    ("listed", "known"),
    [
        (_values("kvpeer_topology_problems", "problem"), (name.value for name in ProblemName)),
        (_values("kvpeer_transport_unasked_pages_total", "reason"), (reason.value for reason in UnaskedReason)),
        (OUTCOMES, (outcome.name.lower() for outcome in Outcome)),
        (MISSES, (reason.value for reason in MissReason)),
        (DECISION_REASONS, (reason.value for reason in DecisionReason)),
    ],
    ids=["problems", "unasked", "outcomes", "misses", "decisions"],
)
def test_listed_values_are_those_of_the_code(listed: tuple[str, ...], known: Iterable[str]) -> None:
    assert sorted(listed) == sorted(known)


def test_names_can_be_had_without_numpy() -> None:
    """The operator has the definitions, and has no numpy."""
    script = "import sys, kvpeer.metrics.catalogue; print('numpy' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT / "runtime", check=True
    )
    assert run.stdout == "False\n"
