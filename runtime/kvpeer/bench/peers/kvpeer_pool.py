"""The pool that kvpeer serves in this benchmark: every page of a memory, committed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpeer.bench.memory import full_pool
from kvpeer.bench.peers.pages import PAGES_BYTES, PageMemory
from kvpeer.client import EngineLayout
from kvpeer.native import Pool

__all__ = ["Published", "layout_of", "published"]


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    """What a directory tells readers. Columns of n pages: slots and generations u4, offsets u8, keys u1 [n, 16]."""

    run_id: bytes
    slots: npt.NDArray[np.uint32]
    generations: npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.uint64]
    keys: npt.NDArray[np.uint8]


def layout_of(memory: PageMemory) -> EngineLayout:
    """Returns the memory as an engine's whose blocks are its pages."""
    return EngineLayout(
        base=np.array([memory.address], np.uint64),
        stride=np.array([memory.page_bytes], np.uint64),
        length=np.array([memory.page_bytes], np.uint32),
    )


@contextmanager
def published(memory: PageMemory) -> Iterator[tuple[Pool, Published]]:
    """A pool with all pages of the memory, and where they lie."""
    with full_pool(memory.page_bytes, layout_of(memory), PAGES_BYTES) as full:
        yield full.pool, Published(full.pool.run_id, full.slots, full.generations, full.offsets, full.keys)
