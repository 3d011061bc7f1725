"""What an eviction policy has to offer the slot table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

__all__ = ["EvictionPolicy"]


class EvictionPolicy(Protocol):
    """An order over the committed slots of one size class.

    The caller guarantees that a slot is added once before it is used or removed. Not safe for concurrent access.
    """

    def add(self, slot: int) -> None:
        """Takes in a slot whose page was just committed."""

    def use(self, slot: int) -> None:
        """Notes a use of the slot, by a local client or by a remote reader."""

    def remove(self, slot: int) -> None:
        """Forgets the slot."""

    def candidates(self) -> Iterator[int]:
        """Every slot, the one to evict first leading. The policy must not be changed while this runs."""

    def __len__(self) -> int: ...
