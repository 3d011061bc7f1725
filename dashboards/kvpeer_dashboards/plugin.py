"""Components of grafana-dashboard-builder that yield what Grafana reads today: panels with fieldConfig and options,
variables, and a grid instead of rows of spans.

The builder finds components by their base classes; importing this module is enough. In its YAML they are `number`,
`series`, `bars`, `listing` (panels), `source` and `variable` (templates). Every panel has `queries`: a mapping from
legends to PromQL expressions.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from grafana_dashboards.components.panels import PanelsItemBase
from grafana_dashboards.components.templates import TemplatesItemBase

__all__ = ["SCHEMA_VERSION", "Bars", "Listing", "Number", "Series", "Source", "Variable", "grid"]

SCHEMA_VERSION = 41
"""Grafana 12's. Later ones read it, and show what they made of it."""

COLUMNS = 24
"""Of Grafana's grid; a span of the YAML is two of them."""

_Json = dict[str, Any]
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


class _Panel(PanelsItemBase):  # type: ignore[misc]  # the builder has no types
    """What all panels have in common. `kind`: Grafana's name; `height`: in rows of the grid."""

    kind = ""
    height = 8
    is_instant = False

    def gen_json_from_data(self, data: _Json, context: Any) -> _Json:
        """The panel, with `height` for `grid`."""
        defaults: _Json = {"unit": data.get("unit", "short"), **self.defaults(data)}
        if "thresholds" in data:
            steps = [{"value": value, "color": color} for value, color in data["thresholds"].items()]
            defaults["thresholds"] = {"mode": "absolute", "steps": [{"value": None, "color": "green"}, *steps]}
        return {
            "type": self.kind,
            "title": data["title"],
            "description": data["description"],
            "datasource": _DATASOURCE,
            "span": data["span"],
            "height": self.height,
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": self.options(data),
            "targets": [
                self._target(ref, legend, expression)
                for ref, (legend, expression) in zip(string.ascii_uppercase, data["queries"].items(), strict=False)
            ],
        }

    def defaults(self, data: Mapping[str, Any]) -> _Json:
        """Of fieldConfig."""
        return {}

    def options(self, data: Mapping[str, Any]) -> _Json:
        """Of the panel."""
        return {}

    def _target(self, ref: str, legend: str, expression: str) -> _Json:
        return {
            "refId": ref,
            "datasource": _DATASOURCE,
            "editorMode": "code",
            "expr": " ".join(expression.split()),
            "legendFormat": legend,
            "instant": self.is_instant,
            "range": not self.is_instant,
            **({"format": "table"} if self.kind == "table" else {}),
        }


class Series(_Panel):
    """Lines over time; `stack: true` lays them on each other."""

    kind = "timeseries"

    def defaults(self, data: Mapping[str, Any]) -> _Json:
        """See the base class."""
        is_stacked = data.get("stack", False)
        stacking = {"mode": "normal" if is_stacked else "none", "group": "A"}
        fill = 30 if is_stacked else 10
        return {"min": 0, "custom": {"lineWidth": 1, "fillOpacity": fill, "showPoints": "never", "stacking": stacking}}

    def options(self, data: Mapping[str, Any]) -> _Json:
        """See the base class."""
        legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
        return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


class Number(_Panel):
    """One number a query, with a line behind it."""

    kind = "stat"
    height = 4

    def options(self, data: Mapping[str, Any]) -> _Json:
        """See the base class."""
        reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {"reduceOptions": reduce, "colorMode": "value", "graphMode": "area", "textMode": "auto"}


class Bars(_Panel):
    """A bar for each series, as it is at the end of the shown time."""

    kind = "bargauge"
    is_instant = True

    def options(self, data: Mapping[str, Any]) -> _Json:
        """See the base class."""
        reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {"reduceOptions": reduce, "orientation": "horizontal", "displayMode": "basic", "showUnfilled": True}


class Listing(_Panel):
    """A line for each series, with its labels as columns."""

    kind = "table"
    is_instant = True

    def options(self, data: Mapping[str, Any]) -> _Json:
        """See the base class."""
        return {"showHeader": True, "cellHeight": "sm"}


class Source(TemplatesItemBase):  # type: ignore[misc]
    """The Prometheus that is asked: the dashboard's first variable."""

    def gen_json_from_data(self, data: _Json, context: Any) -> _Json:
        """The variable."""
        return {"type": "datasource", "name": "datasource", "label": data["label"], "query": "prometheus"}


class Variable(TemplatesItemBase):  # type: ignore[misc]
    """Values of a label: one, several or all. `all`: a pattern for all of them, which matches series without the label,
    too; by default those that were found, because they may depend on another variable."""

    def gen_json_from_data(self, data: _Json, context: Any) -> _Json:
        """The variable."""
        return {
            "type": "query",
            "name": data["name"],
            "label": data["label"],
            "datasource": _DATASOURCE,
            "query": {"query": data["query"], "refId": data["name"]},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            **({"allValue": data["all"]} if "all" in data else {}),
            "current": {"text": ["All"], "value": ["$__all"]},
        }


def grid(dashboard: Mapping[str, Any]) -> _Json:
    """The dashboard with its rows laid out on Grafana's grid: from left to right, and down where a line is full."""
    panels: list[_Json] = []
    y = 0
    for row in dashboard["rows"]:
        panels.append(_placed(_row(row["title"]), len(panels) + 1, (0, y), (COLUMNS, 1)))
        y += 1
        x = line_height = 0
        for panel in row["panels"]:
            width, height = int(panel.pop("span")) * 2, panel.pop("height")
            if x + width > COLUMNS:
                x, y, line_height = 0, y + line_height, 0
            panels.append(_placed(panel, len(panels) + 1, (x, y), (width, height)))
            x, line_height = x + width, max(line_height, height)
        y += line_height
    kept = {key: dashboard[key] for key in ("uid", "title", "tags", "time")}
    return {
        **kept,
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "30s",
        "annotations": {"list": []},
        "links": [_link_to_others()],
        "templating": {"list": dashboard["templating"]["list"]},
        "panels": panels,
    }


def _row(title: str) -> _Json:
    return {"type": "row", "title": title, "collapsed": False, "panels": []}


def _placed(panel: _Json, number: int, at: tuple[int, int], size: tuple[int, int]) -> _Json:
    return {**panel, "id": number, "gridPos": {"x": at[0], "y": at[1], "w": size[0], "h": size[1]}}


def _link_to_others() -> _Json:
    return {
        "type": "dashboards",
        "title": "kvpeer",
        "tags": ["kvpeer"],
        "asDropdown": True,
        "icon": "external link",
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "tooltip": "",
        "url": "",
    }
