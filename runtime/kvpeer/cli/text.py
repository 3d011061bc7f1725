"""Tables and units for terminals: plain text, nothing that a pipe or a screen reader stumbles over."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

__all__ = ["duration", "indented", "size", "table"]

WIDTH = 100
"""Of wrapped text; tables are as wide as they need to be."""


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines with a head, numbers to the right: a column whose cells all begin with a digit, or are empty."""
    widths = [max(len(row[idx]) for row in [columns, *rows]) for idx in range(len(columns))]
    is_number = [all(row[idx][:1].isdigit() or row[idx] in ("", "-") for row in rows) for idx in range(len(columns))]
    lines = [columns, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in lines
    )


def indented(text: str, first: str = "  ", then: str = "  ") -> str:
    """The text in lines of WIDTH characters at most."""
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=then)


def size(n_bytes: float) -> str:
    """Bytes, with three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.3g} {unit}" if n_bytes < 1000 else f"{n_bytes:.0f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.3g} TiB"


def duration(seconds: float) -> str:
    """Seconds, in the unit that people would use."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
