"""docs/status.md has every reason with its advice, as it is said."""

from __future__ import annotations

from pathlib import Path

from kvpeer.core.advice import ADVICE

PAGE = (Path(__file__).parents[3] / "docs" / "status.md").read_text()


def test_the_page_has_every_reason() -> None:
    rows = [f"| `{name}` | {text.meaning} | {text.fix or '-'} |" for name, text in ADVICE.items()]
    assert [row for row in rows if f"\n{row}\n" not in PAGE] == []
