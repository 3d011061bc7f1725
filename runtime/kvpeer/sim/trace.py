"""What happened, as a digest that two runs can be compared by, and as the last lines for people to read."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from typing import Any

__all__ = ["LINES_MAX", "Trace"]

LINES_MAX = 4000
"""Lines kept of one run: some seconds of a cluster of 16."""


class Trace:
    """Notes events in order. `counts` has how many of each kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._digest = hashlib.blake2b(digest_size=16)
        self._lines: deque[tuple[float, str, tuple[Any, ...]]] = deque(maxlen=LINES_MAX)

    def add(self, now: float, kind: str, *details: Any) -> None:
        """`details` are numbers and texts: their repr must be the same in every process."""
        self.counts[kind] += 1
        line = (now, kind, details)
        self._digest.update(repr(line).encode())
        self._lines.append(line)

    def digest(self) -> str:
        """32 hexadecimal digits that are equal exactly when the same events came in the same order."""
        return self._digest.hexdigest()

    def lines(self, n_max: int = LINES_MAX) -> list[str]:
        """The last lines, oldest first."""
        chosen = list(self._lines)[-n_max:] if n_max else []
        return [f"{now:10.4f} {kind:<12} {' '.join(map(str, details))}" for now, kind, details in chosen]
