"""What the disk tier is told, and what it needs of the agent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvpeer.core.disk import DiskPage

__all__ = ["DiskEvents", "DiskSettings", "PoolPages"]


class DiskEvents(Protocol):
    """Who wants to know which pages can be read from the disk. Must not block."""

    def stored(self, pages: list[DiskPage]) -> None:
        """These can be found from now on."""

    def gone(self, pages: list[DiskPage]) -> None:
        """These cannot be found any more; some may never have been told to be."""


class PoolPages(Protocol):
    """The pool that pages are written from."""

    def has(self, key: bytes) -> bool:
        """Whether this page can be read there."""

    def holds(self, key: bytes, slot: int, generation: int) -> bool:
        """Whether this page lies, complete and unchanged, in this use of this slot."""


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """slow_s: one operation may take this long; then the disk is given up for a while."""

    path: Path
    size_bytes: int
    segment_bytes: int
    read_threads: int = 4
    slow_s: float = 30.0

    @property
    def n_segments(self) -> int:
        return self.size_bytes // self.segment_bytes
