"""docs/topology.md has every problem as it is; rows are made by hand from what this test prints."""

from __future__ import annotations

from pathlib import Path

from kvpeer.core.topology import FIXES

PAGE = (Path(__file__).parents[3] / "docs" / "topology.md").read_text()


def test_the_page_has_every_problem_as_it_is_and_no_other() -> None:
    rows = [f"| `{name.value}` | {fix.severity.value} | {fix.meaning} | {fix.fix} |" for name, fix in FIXES.items()]
    table = PAGE.partition("| name | kind |")[2].splitlines()[2:]
    assert table == rows
