"""What every transport takes and gives back: batches of pages as arrays, an outcome for each page.

Contract of `fetch`, whatever the path: a page is HIT only after it was verified; everything else is said in its outcome
and never raised; it blocks until the deadline at most; and when it returns, nothing writes into the destinations.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Event
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvpeer.core.reasons import NotAskedError
from kvpeer.model import KEY_BYTES, PARTS_MAX, KvPeerError, LocalProtocolError, Outcome, PeerUnavailableError
from kvpeer.native import PART_DTYPE, FetchedPages, Keys

__all__ = ["CHUNK_BYTES_MAX", "FetchBatch", "FetchResult", "NoPathError", "NotAskedError", "Transport"]

CHUNK_BYTES_MAX = 8 << 20
"""Page bytes asked for at a time, by each rail where there are several: an aborted fetch waits for no more than these,
a few milliseconds' worth. Larger chunks would not be faster: the pause between two of them is one round trip."""


class NoPathError(PeerUnavailableError):
    """This transport cannot reach the producer; another one may."""


@dataclass(frozen=True, slots=True, eq=False)
class FetchBatch:
    """n pages of one producer, and where they go.

    slots, generations, lengths: u4 [n]. keys: n * 16 bytes, or u1 [n, 16]. destinations: u8 [n], addresses of
    lengths[i] writable bytes each; the caller keeps them in place and unread until the fetch returned.

    Raises:
        LocalProtocolError: the columns have different lengths, or a page has no bytes.
    """

    slots: npt.NDArray[np.uint32]
    generations: npt.NDArray[np.uint32]
    keys: Keys
    lengths: npt.NDArray[np.uint32]
    destinations: npt.NDArray[np.uint64]

    def __post_init__(self) -> None:
        n_key_bytes = len(self.keys) if isinstance(self.keys, bytes) else self.keys.size
        columns = (self.slots, self.generations, self.lengths, self.destinations)
        if any(len(column) != len(self) for column in columns) or n_key_bytes != len(self) * KEY_BYTES:
            sizes = [len(column) for column in columns]
            raise LocalProtocolError(
                f"a batch needs equally many slots, generations, lengths and destinations, not {sizes}, "
                f"and {KEY_BYTES} key bytes for each, not {n_key_bytes} in all"
            )
        if not self.lengths.all():
            raise LocalProtocolError("a batch has pages of 0 bytes: leave them out")

    def __len__(self) -> int:
        return len(self.slots)

    def part(self, start: int, stop: int) -> FetchBatch:
        """Returns pages [start, stop) as a batch of views, or this batch where they are all its pages."""
        if start == 0 and stop == len(self):
            return self
        packed = self.keys if isinstance(self.keys, bytes) else self.keys.reshape(-1)
        return FetchBatch(
            self.slots[start:stop],
            self.generations[start:stop],
            packed[start * KEY_BYTES : stop * KEY_BYTES],
            self.lengths[start:stop],
            self.destinations[start:stop],
        )

    def chunk_stop(self, start: int, pages_max: int, bytes_max: int = CHUNK_BYTES_MAX) -> int:
        """Returns where the chunk from `start` ends: at least one page, at most pages_max and bytes_max."""
        if start == 0 and len(self) <= pages_max and int(self.lengths.sum(dtype=np.int64)) <= bytes_max:
            return len(self)
        ends = np.cumsum(self.lengths[start : start + pages_max], dtype=np.int64)
        return start + max(1, int(np.searchsorted(ends, bytes_max, side="right")))


@dataclass(slots=True, eq=False)
class FetchResult:
    """What became of n pages.

    outcomes: `Outcome` u1 [n]; bytes at the destination count only where it is HIT. n_parts: u2 [n] and parts:
    `PART_DTYPE` [n, 64], the producer's part tables of the pages that hit, where the transport learns them (not shm,
    where n_parts is 0), unspecified elsewhere. error: why pages have no outcome of their own, None if each has one; a
    NotAskedError if the producer was asked for the first n_asked pages only. transport: the name of the one that was
    used, empty if none was.
    """

    outcomes: npt.NDArray[np.uint8]
    n_parts: npt.NDArray[np.uint16]
    parts: npt.NDArray[Any]
    n_asked: int
    error: KvPeerError | None = None
    transport: str = ""

    @classmethod
    def unavailable(cls, n: int) -> FetchResult:
        """Returns the result of a fetch that reached nobody: n misses."""
        return cls(
            np.full(n, Outcome.MISS, dtype=np.uint8),
            np.zeros(n, dtype=np.uint16),
            np.empty((n, PARTS_MAX), dtype=PART_DTYPE),
            n_asked=n,
        )

    @classmethod
    def not_asked(cls, n: int, error: NotAskedError) -> FetchResult:
        """Returns the result of a fetch that was never begun."""
        result = cls.unavailable(n)
        result.end(0, Outcome.TIMEOUT, error)
        return result

    def put(self, start: int, fetched: FetchedPages) -> None:
        """Takes over what became of the pages from `start` on; without a copy where they are all pages."""
        stop = start + len(fetched.outcomes)
        if stop - start == len(self.outcomes):
            self.outcomes, self.n_parts, self.parts = fetched.outcomes, fetched.n_parts, fetched.parts
            return
        self.outcomes[start:stop] = fetched.outcomes
        self.n_parts[start:stop] = fetched.n_parts
        self.parts[start:stop] = fetched.parts

    def end(self, start: int, outcome: Outcome, error: KvPeerError) -> None:
        """Gives all pages from `start` on this outcome, for this reason."""
        self.outcomes[start:] = outcome
        self.error = error
        if isinstance(error, NotAskedError):
            self.n_asked = start


class Transport(Protocol):
    """One way to the pages of one producer. All methods are thread-safe."""

    @property
    def name(self) -> str:
        """The transport's name in metrics (`kvpeer_transport_active`)."""

    def fetch(self, batch: FetchBatch, deadline_ns: int, abort: Event | None = None) -> FetchResult:
        """Fetches the pages, verified. Blocks until deadline_ns (`monotonic_ns`) at most; releases the GIL.

        Once `abort` is set, no further chunk is asked for; the one under way is awaited, and pages that were not asked
        for are misses.

        Raises:
            LocalProtocolError: an array of the batch has another dtype than it should.
        """

    def close(self) -> None:
        """Frees what the transport holds. Fetches under way end soon; later ones miss."""
