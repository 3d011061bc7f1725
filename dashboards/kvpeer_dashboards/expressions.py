"""Every PromQL expression of the dashboards and of the rules, with where it stands: what tests ask a parser and a
Prometheus about."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

__all__ = ["DASHBOARDS", "RULES", "Expression", "dashboards", "filled", "of_dashboards", "of_rules", "variables_of"]

_ROOT = Path(__file__).parents[2]
DASHBOARDS = _ROOT / "helm" / "kvpeer" / "files" / "dashboards"
RULES = _ROOT / "dashboards" / "rules"

_VARIABLE = re.compile(r"\$(\w+)")


@dataclass(frozen=True, slots=True)
class Expression:
    """`where`: dashboard and panel, or file and rule. `legend`: of the panel's line."""

    where: str
    text: str
    legend: str = ""


def dashboards() -> dict[str, dict[str, Any]]:
    """The generated dashboards by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))}


def of_dashboards() -> Iterator[Expression]:
    """Those of all panels."""
    for name, dashboard in dashboards().items():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                yield Expression(f"{name}: {panel['title']}", target["expr"], target["legendFormat"])


def of_rules() -> Iterator[Expression]:
    """Those of all recording rules and alerts."""
    for path in sorted(RULES.glob("*.yaml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                yield Expression(f"{path.name}: {rule.get('alert') or rule['record']}", rule["expr"])


def variables_of(text: str) -> set[str]:
    """Names of the variables in an expression or query."""
    return set(_VARIABLE.findall(text))


def filled(text: str, values: Mapping[str, str]) -> str:
    """The expression with values in the place of its variables. Raises KeyError for one that has none."""
    return _VARIABLE.sub(lambda found: values[found[1]], text)
