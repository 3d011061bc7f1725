"""Pages that wait to be written to the disk: bounded, because a disk is slower than memory.

What waits is only named here, not held: the page stays in its slot of the pool, may be evicted there like any other,
and is then not written. So a slow disk costs the tier pages, and the pool nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvpeer.core.disk.pages import PageFacts

__all__ = ["BATCH_BYTES_MAX", "BATCH_PAGES_MAX", "QUEUE_PAGES_MAX", "Offer", "WriteQueue"]

QUEUE_PAGES_MAX = 4096
"""Pages that wait: what a long prompt publishes at once, some 5 MB of descriptions with 64 parts each. More than the
disk writes in the time that a page stays in the pool would be for nothing."""

BATCH_PAGES_MAX = 256
BATCH_BYTES_MAX = 64 << 20
"""Of one write: it is made durable, and entered into the index, as a whole. Large enough that both cost little, small
enough that a kill loses a fraction of a second."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A committed page of the pool. `address`: of its bytes. `parts`: its part table, packed."""

    facts: PageFacts
    slot: int
    generation: int
    address: int
    parts: bytes


class WriteQueue:
    """First in, first out. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[bytes, Offer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, offer: Offer) -> bool:
        """False if the queue is full. A page that waits already waits in its new place in the pool."""
        if offer.facts.key not in self._waiting and len(self._waiting) >= QUEUE_PAGES_MAX:
            return False
        self._waiting[offer.facts.key] = offer
        return True

    def take_batch(self) -> list[Offer]:
        """The next pages to write, at least one unless nothing waits."""
        batch: list[Offer] = []
        n_bytes = 0
        while self._waiting and len(batch) < BATCH_PAGES_MAX:
            offer = next(iter(self._waiting.values()))
            n_bytes += offer.facts.length
            if batch and n_bytes > BATCH_BYTES_MAX:
                break
            batch.append(offer)
            del self._waiting[offer.facts.key]
        return batch

    def forget(self, namespace: bytes) -> None:
        """Pages of this namespace wait no more."""
        for key in [key for key, offer in self._waiting.items() if offer.facts.namespace == namespace]:
            del self._waiting[key]

    def clear(self) -> int:
        """Nothing waits any more; returns how many pages did."""
        n = len(self._waiting)
        self._waiting.clear()
        return n
