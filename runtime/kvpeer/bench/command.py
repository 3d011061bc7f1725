"""What `kvpeer bench local` does around the measuring: progress, the table, the file, the exit status."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from kvpeer import __version__
from kvpeer.bench.local import run
from kvpeer.bench.report import summary, table
from kvpeer.bench.rows import Row, encode_rows
from kvpeer.model import ConfigError
from kvpeer.native import build_info

__all__ = ["bench_local", "exit_status", "machine", "say", "try_to_write"]

EXIT_OVER_BUDGET = 1


def bench_local(json_path: str | None, *, is_quick: bool, is_check: bool) -> int:
    """Measures, prints the table, writes the rows; returns 0, or with is_check 1 if a budget does not hold.

    Raises:
        ConfigError: the file cannot be written, or something is not installed.
    """
    if json_path is not None:
        try_to_write("--json", Path(json_path))
    rows = run(say, is_quick=is_quick)
    sys.stdout.write(f"\n{machine()}\n\n{table(rows)}\n{summary(rows)}\n")
    if json_path is not None:
        Path(json_path).write_bytes(encode_rows(rows))
    return exit_status(rows, is_check=is_check)


def exit_status(rows: Sequence[Row], *, is_check: bool) -> int:
    """Returns 0 when all was measured, whatever holds; with is_check EXIT_OVER_BUDGET if a budget does not hold."""
    return EXIT_OVER_BUDGET if is_check and any(row.holds is False for row in rows) else 0


def say(text: str) -> None:
    """Shows progress."""
    sys.stderr.write(text)
    sys.stderr.flush()


def try_to_write(option: str, path: Path) -> None:
    """Before minutes of work are done for nothing.

    Raises:
        ConfigError: the file cannot be written; names the option.
    """
    try:
        path.touch()
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path}: {error.strerror}") from error


def machine() -> str:
    """Returns what was measured, when and where, in two lines."""
    now = datetime.now(timezone.utc)
    load = ", ".join(f"{average:.1f}" for average in os.getloadavg()[:2])
    return (
        f"kvpeer {__version__} ({build_info()}), Python {platform.python_version()}, {now:%Y-%m-%d %H:%M} UTC\n"
        f"{_processor()}, {len(os.sched_getaffinity(0))} cores, load {load} (1, 5 minutes)"
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
