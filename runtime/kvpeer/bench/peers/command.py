"""What `kvpeer bench peers` does around the measuring: progress, the tables, the files, the exit status."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvpeer.bench.command import exit_status, machine, say, try_to_write
from kvpeer.bench.peers.catalogue import chosen
from kvpeer.bench.peers.compare import run
from kvpeer.bench.peers.plot import draw, require_matplotlib
from kvpeer.bench.peers.report import encode_report, matrix
from kvpeer.bench.report import summary, table
from kvpeer.model import ConfigError

__all__ = ["bench_peers"]


def bench_peers(
    json_path: str | None, plot_path: str | None, only: Sequence[str], *, is_quick: bool, is_check: bool
) -> int:
    """Measures, prints the tables, writes the files; returns 0, or with is_check 1 if a budget does not hold.

    Raises:
        ConfigError: a file cannot be written, a name is no system's, or something is not installed.
    """
    candidates = chosen(only)
    if json_path is not None:
        try_to_write("--json", Path(json_path))
    if plot_path is not None:
        require_matplotlib()
        try_to_write("--plot", Path(plot_path))
    report = run(candidates, say, is_quick=is_quick)
    judged = [row for row in report.rows if row.reference is not None]
    sys.stdout.write(f"\n{machine()}\n\n{matrix(report)}\n{table(judged)}\n{summary(judged)}\n")
    if json_path is not None:
        Path(json_path).write_bytes(encode_report(report))
    if plot_path is not None:
        if not report.rows:
            raise ConfigError("--plot: no system could be measured, so there is nothing to draw")
        draw(report, Path(plot_path))
    return exit_status(report.rows, is_check=is_check)
