"""The report as a picture, by matplotlib (`pip install 'kvpeer[bench]'`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpeer.bench.peers.report import Cell, Report, bandwidths, cell_name
from kvpeer.bench.rows import Row
from kvpeer.model import ConfigError

__all__ = ["draw", "require_matplotlib"]

OWN, OTHER, BARE = "#1f6fb2", "#6f767d", "#c9821b"
"""kvpeer, other systems, and what is under them all."""


def require_matplotlib() -> None:
    """Before minutes of work are done for nothing.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError("--plot needs matplotlib: run  pip install 'kvpeer[bench]'") from error


def draw(report: Report, path: Path) -> None:
    """Writes the picture: a panel for each page size and shape, a line for each system, its median as a dot, its
    quartiles as a whisker. The axis is logarithmic, so that equal distances are equal ratios."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    by_system = bandwidths(report.rows)
    cells = sorted({cell for system in by_system.values() for cell in system})
    sizes = sorted({cell[0] for cell in cells})
    names = list(by_system)
    n_columns = max(sum(cell[0] == size for cell in cells) for size in sizes)
    figure = Figure(figsize=(4.0 * n_columns, 0.8 + (0.5 + 0.27 * len(names)) * len(sizes)), layout="constrained")
    panels = figure.subplots(len(sizes), n_columns, squeeze=False, sharex=True, sharey=True)
    for size, line in zip(sizes, panels, strict=True):
        for cell, panel in zip([cell for cell in cells if cell[0] == size], line, strict=False):
            _draw_panel(panel, cell, {name: by_system[name].get(cell) for name in names})
    first = panels[0, 0]  # the axes are shared
    first.set_ylim(len(names) - 0.4, -0.6)
    first.set_yticks(range(len(names)), names)
    first.set_xscale("log")
    first.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    first.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    first.xaxis.set_minor_formatter(NullFormatter())
    low, high = first.get_xlim()
    first.set_xlim(low * 0.85, high * 1.5)  # room for the first dot and the last number
    not_run = ", ".join(system.name for system in report.not_run)
    note = "GB/s, logarithmic. Dots: medians; whiskers: quartiles."
    figure.supxlabel(f"{note} Not run here: {not_run}." if not_run else note, fontsize=9, x=0.01, ha="left")
    figure.savefig(path, dpi=90, metadata={"Software": None})


def _draw_panel(panel: Any, cell: Cell, rows: dict[str, Row | None]) -> None:
    for place, (name, row) in enumerate(rows.items()):
        if row is None:
            continue
        color = OWN if name.startswith("kvpeer") else BARE if "." not in name else OTHER
        low, high = row.spread
        panel.plot([low, high], [place, place], color=color, lw=2.5, alpha=0.6, solid_capstyle="butt")
        panel.plot([row.value], [place], "o", color=color, ms=6)
        panel.annotate(
            f"{row.value:.2f}", (max(row.value, high), place), (6, 0), textcoords="offset points", va="center", size=8.5
        )
    panel.set_title(cell_name(cell), fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color="#e8e8e8")
    panel.set_axisbelow(True)
