"""Makes Grafana's JSON of the YAML in sources/: `python -m kvpeer_dashboards.generate FOLDER` writes a file for each
dashboard.

The builder's own command would expand {placeholders}, and the selectors of PromQL are in braces, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grafana_dashboards.parser import DefinitionParser

from kvpeer_dashboards.plugin import grid  # which registers its components with the builder

__all__ = ["dashboards", "text"]

SOURCES = Path(__file__).parents[1] / "sources"


def dashboards() -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and contents of all dashboards."""
    for project in DefinitionParser().load_projects(sorted(SOURCES.glob("*.yaml"))):
        for dashboard in project.get_dashboards():
            yield dashboard.name, grid(dashboard.gen_json())


def text(dashboard: dict[str, Any]) -> str:
    """As it is kept in files."""
    return json.dumps(dashboard, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    for name, dashboard in dashboards():
        (Path(sys.argv[1]) / f"{name}.json").write_text(text(dashboard))
