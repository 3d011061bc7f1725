"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

__all__ = ["LeastRecentlyUsed"]


class LeastRecentlyUsed:
    """Evicts the slot that was not used for the longest time. Every operation is O(1)."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def add(self, slot: int) -> None:
        self._order[slot] = None

    def use(self, slot: int) -> None:
        self._order.move_to_end(slot)

    def remove(self, slot: int) -> None:
        del self._order[slot]

    def candidates(self) -> Iterator[int]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)
