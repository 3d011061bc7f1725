"""Every alert is tried by promtool, firing and not, and has a page that says what to do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvpeer_dashboards.expressions import RULES

ROOT = Path(__file__).parents[2]
RUNBOOKS = ROOT / "docs" / "runbooks"
FILES = sorted(RULES.glob("*.yaml"))

_RULES = [
    (path, rule) for path in FILES for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]
]
ALERTS = [(path, rule) for path, rule in _RULES if "alert" in rule]
RECORDED = [(path, rule) for path, rule in _RULES if "record" in rule]


def _tests_of(path: Path) -> list[dict[str, Any]]:
    tests: list[dict[str, Any]] = yaml.safe_load((RULES / "tests" / path.name).read_text())["tests"]
    return tests


@pytest.mark.parametrize(("path", "rule"), ALERTS, ids=[rule["alert"] for _, rule in ALERTS])
def test_an_alert_is_seen_to_fire_and_not_to_fire(path: Path, rule: dict[str, Any]) -> None:
    tried = [
        each
        for test in _tests_of(path)
        for each in test.get("alert_rule_test", ())
        if each["alertname"] == rule["alert"]
    ]
    assert {bool(each["exp_alerts"]) for each in tried} == {True, False}


@pytest.mark.parametrize(("path", "rule"), RECORDED, ids=[rule["record"] for _, rule in RECORDED])
def test_a_recording_rule_is_seen_to_record(path: Path, rule: dict[str, Any]) -> None:
    assert re.fullmatch(r"[a-z]+:kvpeer_\w+:\w+", rule["record"]), "level:metric:operations"
    tried = [each["expr"] for test in _tests_of(path) for each in test.get("promql_expr_test", ())]
    assert any(expression.startswith(rule["record"]) for expression in tried)


@pytest.mark.parametrize(("path", "rule"), ALERTS, ids=[rule["alert"] for _, rule in ALERTS])
def test_an_alert_has_a_page_that_says_what_to_do(path: Path, rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"info", "warning", "critical"}
    assert rule["annotations"]["runbook"] == f"docs/runbooks/{rule['alert']}.md"
    page = (ROOT / rule["annotations"]["runbook"]).read_text()
    assert page.startswith(f"# {rule['alert']}\n")
    assert re.findall(r"^## (.+)$", page, re.M) == ["Meaning", "Impact", "First look", "Fix"]
    for link in re.findall(r"\]\(([^)]+)\)", page):
        assert (RUNBOOKS / link).exists(), link


def test_every_page_is_of_an_alert() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == {rule["alert"] for _, rule in ALERTS}


@pytest.mark.monitoring
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_promtool_finds_the_rules_to_do_what_their_tests_say(path: Path) -> None:
    promtool = shutil.which("promtool", path=os.pathsep.join([str(ROOT / "build" / "bin"), os.environ["PATH"]]))
    assert promtool, "there is no promtool: run  make metrics-test  (it builds one)"
    for arguments in (["check", "rules", str(path)], ["test", "rules", str(RULES / "tests" / path.name)]):
        run = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
