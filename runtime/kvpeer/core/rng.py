"""The source of randomness that the pure machines take as an argument."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import Any, Protocol, TypeVar

__all__ = ["Rng"]

T = TypeVar("T")


class Rng(Protocol):
    """What `random.Random` offers and the core uses. Seeded by the caller: the same seed replays the same run."""

    def random(self) -> float:
        """A number in [0, 1)."""

    def randrange(self, start: int, /) -> int:
        """A whole number in [0, start)."""

    def shuffle(self, x: MutableSequence[Any], /) -> None:
        """Reorders in place."""

    def sample(self, population: Sequence[T], /, k: int) -> list[T]:
        """k different elements in random order."""
