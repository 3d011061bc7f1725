"""Dashboards are what the generator makes of their sources, are laid out on Grafana's grid, and ask Prometheus for
nothing that kvpeer does not show."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from kvpeer.metrics.catalogue import CATALOGUE, series
from kvpeer.metrics.metric import Metric, MetricType
from kvpeer_dashboards.expressions import (
    DASHBOARDS,
    RULES,
    Expression,
    dashboards,
    filled,
    of_dashboards,
    of_rules,
    variables_of,
)

ROOT = Path(__file__).parents[2]
ALL = dashboards()
NAMES = sorted(ALL)

OF_GRAFANA = {"__rate_interval": "5m", "__range": "1h"}
"""Variables that Grafana itself gives a value."""

OF_SCRAPES = {"instance", "job", "cluster", "model_name", "engine", "le", "__name__"}
"""Labels that come from Prometheus, an engine or a join with kvpeer_agent_info."""

OF_OTHERS = {
    "up", "process_cpu_seconds_total", "process_max_fds", "process_open_fds", "process_resident_memory_bytes",
    "process_start_time_seconds",
}  # fmt: skip


def _values(dashboard: dict[str, Any]) -> dict[str, str]:
    return OF_GRAFANA | {each["name"]: ".*" for each in dashboard["templating"]["list"]}


SERIES = series()
RECORDED = {
    rule["record"]
    for path in RULES.glob("*.yaml")
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
    if "record" in rule
}
EVERYTHING = [*of_dashboards(), *of_rules()]
_FILLED = OF_GRAFANA | {each["name"]: ".*" for one in ALL.values() for each in one["templating"]["list"]}


def _selectors(expression: str) -> list[promql_parser.VectorSelector]:
    found: list[promql_parser.VectorSelector] = []

    def visit(node: object) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def _metric_names(selector: promql_parser.VectorSelector) -> list[str]:
    if selector.name:
        return [selector.name]
    (matcher,) = [each for each in selector.matchers.matchers if each.name == "__name__"]
    return list(matcher.value.split("|"))


# ---- form


def test_the_files_are_what_the_generator_makes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvpeer_dashboards.generate", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT / "dashboards", capture_output=True)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_text() for path in DASHBOARDS.iterdir()}, "run: make dashboards"


def test_the_chart_has_the_rules() -> None:
    charts = ROOT / "helm" / "kvpeer" / "files" / "rules"
    ours = {path.name: path.read_text() for path in RULES.glob("*.yaml")}
    assert {path.name: path.read_text() for path in charts.iterdir()} == ours, "run: make dashboards"


@pytest.mark.parametrize("name", NAMES)
def test_panels_lie_on_the_grid_and_not_on_each_other(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in ALL[name]["panels"]:
        at = panel["gridPos"]
        assert at["x"] >= 0
        assert at["x"] + at["w"] <= 24, panel["title"]
        cells = set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
        assert len(cells) == at["w"] * at["h"] > 0
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells


@pytest.mark.parametrize("name", NAMES)
def test_a_dashboard_is_whole(name: str) -> None:
    dashboard = ALL[name]
    assert dashboard["uid"] == name
    assert dashboard["templating"]["list"][0]["name"] == "datasource"
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in panels:
        assert panel["description"].endswith("."), f"{panel['title']} does not say what it shows"
        assert panel["datasource"]["uid"] == "${datasource}"
        refs = [target["refId"] for target in panel["targets"]]
        assert refs
        assert len(set(refs)) == len(refs)


@pytest.mark.parametrize("name", NAMES)
def test_variables_are_declared_and_used(name: str) -> None:
    variables = ALL[name]["templating"]["list"]
    declared = {each["name"] for each in variables}
    texts = [target["expr"] for panel in ALL[name]["panels"] for target in panel.get("targets", ())]
    queries = [each["query"]["query"] for each in variables if each["type"] == "query"]
    used = set().union(*map(variables_of, [*texts, *queries])) - OF_GRAFANA.keys()
    assert used | {"datasource"} == declared


@pytest.mark.parametrize("name", NAMES)
def test_variables_take_their_values_from_what_is_defined(name: str) -> None:
    for each in ALL[name]["templating"]["list"]:
        if each["type"] == "query":
            selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", each["query"]["query"]).groups()  # type: ignore[union-attr]
            (found,) = _selectors(filled(selector, _values(ALL[name])))
            assert label in OF_SCRAPES | SERIES[str(found.name)].labels.keys()


# ---- what is asked


@pytest.mark.parametrize("expression", EVERYTHING, ids=lambda each: each.where)
def test_an_expression_names_only_metrics_labels_and_values_that_are_defined(expression: Expression) -> None:
    for selector in _selectors(filled(expression.text, _FILLED)):
        for name in _metric_names(selector):
            if name in OF_OTHERS | RECORDED:
                continue
            metric = SERIES[name]
            for matcher in selector.matchers.matchers:
                if matcher.name in OF_SCRAPES:
                    continue
                assert matcher.name in metric.labels, f"{name} has no label {matcher.name}"
                listed = metric.labels[matcher.name]
                if listed:
                    assert set(matcher.value.split("|")) <= set(listed), f"{name}: {matcher.name}={matcher.value}"


@pytest.mark.parametrize("expression", EVERYTHING, ids=lambda each: each.where)
def test_counters_are_asked_for_their_growth_and_gauges_for_their_value(expression: Expression) -> None:
    text = filled(expression.text, _FILLED)
    grown = {
        name
        for call in re.findall(r"(?:rate|increase)\(([^\[]*)\[", text)
        for name in re.findall(r"\b(?:kvpeer|process)_\w+", call)
    }
    for selector in _selectors(text):
        for name in _metric_names(selector):
            if name in SERIES:
                is_gauge = SERIES[name].type is MetricType.GAUGE
                assert (name in grown) != is_gauge, f"{name} is a {SERIES[name].type.value}"


@pytest.mark.parametrize("expression", list(of_dashboards()), ids=lambda each: each.where)
def test_a_legend_names_labels_that_are_left(expression: Expression) -> None:
    for label in re.findall(r"\{\{(\w+)\}\}", expression.legend):
        is_aggregated = re.search(r"\b(sum|min|max|count|avg) ?(by|\()", expression.text)
        assert not is_aggregated or re.search(rf"by \([^)]*\b{label}\b[^)]*\)", expression.text), expression.where


def test_every_metric_is_on_a_dashboard() -> None:
    shown = {name for each in of_dashboards() for name in re.findall(r"kvpeer_\w+", each.text)}
    missing = [metric.name for metric in _defined() if not shown & _names(metric)]
    assert missing == []


def _defined() -> list[Metric]:
    return [metric for section in CATALOGUE for metric in section.metrics]


def _names(metric: Metric) -> set[str]:
    return {name for name, each in SERIES.items() if each.name == metric.name}
