"""Memory of a record in the directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvpeer.bench.rounds import Comparison, Experiment
from kvpeer.core.directory_table import Op
from kvpeer.model import KEY_BYTES, N_PARTITIONS, Tier
from kvpeer.native import DirectoryTable

__all__ = ["directory_records"]

CHUNK = 1 << 16


@contextmanager
def directory_records(n_records: int) -> Iterator[Experiment]:
    """Resident bytes of a record with one holder, all in, against what the table itself counts. A table that was freed
    would lend its memory to the next one unseen: tables are kept until the end, so use few rounds."""
    tables: list[DirectoryTable] = []
    counted: list[float] = []

    def resident() -> float:
        before = _resident_bytes()
        tables.append(_table(n_records))
        counted.append(tables[-1].stats().bytes / n_records)
        return (_resident_bytes() - before) / n_records

    yield Experiment(
        {"resident": resident, "counted": lambda: counted[-1]},
        [Comparison("directory.record", "bytes", "resident", "counted", "the table's own count", budget="value <= 96")],
    )
    for table in tables:
        table.close()


def _table(n_records: int) -> DirectoryTable:
    table = DirectoryTable(partition_records_max=1 << 20, makes_room=True)
    rng = np.random.default_rng(len(str(n_records)))
    for start in range(0, n_records, CHUNK):
        n = min(CHUNK, n_records - start)
        keys = rng.integers(0, 256, (n, KEY_BYTES), np.uint8)
        table.apply(
            0,
            np.full(n, Op.PUT, np.uint8),
            keys,
            (keys[:, :2].copy().view(">u2")[:, 0] % N_PARTITIONS).astype(np.uint16),
            np.arange(start, start + n, dtype=np.uint32),
            np.ones(n, np.uint32),
            np.full(n, 1 << 20, np.uint32),
            np.full(n, Tier.HOST, np.uint8),
        )
    return table


def _resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0
