"""The table that a stranger reads: what was measured, against what, and whether the budget holds. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvpeer.bench.rows import Row

__all__ = ["summary", "table"]

_HEAD = ("what", "value", "reference", "ratio", "quartiles", "budget", "holds")
_JUDGED = {True: "yes", False: "NO", None: ""}


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as aligned columns; numbers with the digits that mean something."""
    cells = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]]) + "\n"


def summary(rows: Sequence[Row]) -> str:
    """Returns one line: how many budgets hold, and which do not."""
    judged = [row for row in rows if row.holds is not None]
    broken = [what(row) for row in judged if not row.holds]
    text = f"{len(judged) - len(broken)} of {len(judged)} budgets hold"
    return f"{text}; not: {', '.join(broken)}" if broken else text


def what(row: Row) -> str:
    """Returns the row's name with page size and threads."""
    parts = [row.name]
    if row.page_bytes is not None:
        parts.append(_size(row.page_bytes))
    if row.threads is not None:
        parts.append(f"{row.threads} thread{'s' if row.threads > 1 else ''}")
    return " ".join(parts)


def _cells(row: Row) -> tuple[str, ...]:
    has_reference = row.reference is not None
    return (
        what(row),
        f"{_number(row.value)} {row.unit}",
        f"{_number(row.reference)} {row.reference_name}" if row.reference is not None else "",
        f"{row.ratio:.2f}" if row.ratio is not None else "",
        f"{row.spread[0]:.2f}-{row.spread[1]:.2f}" if has_reference else "-".join(map(_number, row.spread)),
        row.budget or "",
        _JUDGED[row.holds],
    )


def _number(number: float) -> str:
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"


def _size(n_bytes: int) -> str:
    return f"{n_bytes >> 20} MiB" if n_bytes >= 1 << 20 else f"{n_bytes >> 10} KiB"
