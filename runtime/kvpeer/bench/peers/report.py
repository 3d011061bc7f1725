"""What a reader gets: the file, and a table with a line for each system. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from kvpeer.bench.rows import Row

__all__ = ["Cell", "NotRun", "Report", "bandwidths", "cell_name", "encode_report", "matrix", "system_of"]


class NotRun(msgspec.Struct, frozen=True):
    """A system that could not be measured."""

    name: str
    reason: str


class Report(msgspec.Struct):
    """What was measured, as in every benchmark's file, and what was not."""

    rows: list[Row]
    not_run: list[NotRun]


def encode_report(report: Report) -> bytes:
    """Returns the report as JSON, indented for people."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


Cell = tuple[int, int, int]
"""Page bytes, processes, threads in each."""

_BANDWIDTH = re.compile(r"peers\.(?P<system>[a-z_.]+?)(?:\.(?P<n_processes>\d+)_processes)?")
"""The name of a row that is a system's own bandwidth."""


def system_of(row: Row) -> str:
    """Returns whose bandwidth the row tells: the system's that it is named after."""
    name = row.name.partition(".beside.")[0].removesuffix(".together")
    match = _BANDWIDTH.fullmatch(name)
    return match["system"] if match else ""


def bandwidths(rows: Sequence[Row]) -> dict[str, dict[Cell, Row]]:
    """Returns the rows that are a system's own bandwidth, by system."""
    by_system: dict[str, dict[Cell, Row]] = {}
    for row in rows:
        match = _BANDWIDTH.fullmatch(row.name)
        if row.reference is None and match is not None and row.page_bytes is not None and row.threads is not None:
            cell = row.page_bytes, int(match["n_processes"] or 1), row.threads
            by_system.setdefault(match["system"], {})[cell] = row
    return by_system


def matrix(report: Report) -> str:
    """Returns a Markdown table: median (quartiles) in GB/s, a line for each system; the systems that did not run below
    it, each with its reason."""
    by_system = bandwidths(report.rows)
    cells = sorted({cell for system in by_system.values() for cell in system})
    lines = [["GB/s", *map(cell_name, cells)], ["---"] * (1 + len(cells))]
    for name, measured in by_system.items():
        lines.append([name, *(_text(measured.get(cell)) for cell in cells)])
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return text + "".join(f"\n- {system.name}: not run: {system.reason}" for system in report.not_run) + "\n"


def cell_name(cell: Cell) -> str:
    """Returns the cell in words."""
    page_bytes, n_processes, n_threads = cell
    size = f"{page_bytes >> 20} MiB" if page_bytes >= 1 << 20 else f"{page_bytes >> 10} KiB"
    if n_processes > 1:
        return f"{size}, {n_processes} processes"
    return f"{size}, {n_threads} thread{'s' if n_threads > 1 else ''}"


def _text(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row.value:.2f} ({row.spread[0]:.2f}-{row.spread[1]:.2f})"
