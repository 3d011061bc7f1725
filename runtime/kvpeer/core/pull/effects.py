"""What a pull wants done. The first five are answered, each once, with the event that its docstring names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvpeer.core.chain import take_keys
from kvpeer.model import AgentId, KvPeerError
from kvpeer.wire.messages import StaleReport

__all__ = [
    "Ask",
    "Commit",
    "Effect",
    "Fetch",
    "FetchAnswer",
    "GiveBack",
    "Locate",
    "Portion",
    "Promote",
    "ReportCorrupt",
    "ReportStale",
    "Reserve",
    "Touched",
]

Indices = npt.NDArray[np.intp]
Numbers = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class Portion:
    """Pages of a pull that one producer is asked for: `places` [n] in the pull, packed keys, partitions u16 [n], and
    where the producer has them, HOLDER_DTYPE [n]."""

    producer: AgentId
    places: Indices
    keys: bytes
    partitions: npt.NDArray[np.uint16]
    holders: npt.NDArray[np.void]

    def __len__(self) -> int:
        return len(self.places)

    def at(self, indices: Indices) -> Portion:
        """These pages of it alone."""
        return Portion(
            self.producer,
            self.places[indices],
            take_keys(self.keys, indices),
            self.partitions[indices],
            self.holders[indices],
        )


class FetchAnswer(Protocol):
    """What became of n fetched pages; see `transport.FetchResult`. `parts` is handed on to `Commit` as it is."""

    @property
    def outcomes(self) -> npt.NDArray[np.uint8]: ...
    @property
    def n_parts(self) -> npt.NDArray[np.uint16]: ...
    @property
    def parts(self) -> Any: ...
    @property
    def n_asked(self) -> int: ...
    @property
    def error(self) -> KvPeerError | None: ...


# ---- what takes time


@dataclass(frozen=True, slots=True, eq=False)
class Locate:
    """Find where the pages of the pull lie, by its deadline: `located`."""


@dataclass(frozen=True, slots=True, eq=False)
class Promote:
    """Have the producer bring these pages from its disk into its pool, by `deadline`: `promoted`. They are read from
    there until `read_until`."""

    portion: Portion
    deadline: float
    read_until: float


@dataclass(frozen=True, slots=True, eq=False)
class Reserve:
    """Get slots in the own pool for these pages, by `deadline`: `reserved`."""

    portion: Portion
    deadline: float


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """Get the pages into these slots of the own pool, verified, by `deadline`: `fetched`, once nothing writes into the
    slots any more."""

    portion: Portion
    slots: Numbers
    generations: Numbers
    offsets: npt.NDArray[np.uint64]
    deadline: float


@dataclass(frozen=True, slots=True, eq=False)
class Commit:
    """The pages at `indices` of the fetch are what they should be: make them readable, `committed`. `parts` is that of
    the whole fetch."""

    fetch: Fetch
    indices: Indices
    parts: Any

    @property
    def slots(self) -> Numbers:
        return self.fetch.slots[self.indices]

    @property
    def generations(self) -> Numbers:
        return self.fetch.generations[self.indices]


# ---- what is done at once


@dataclass(frozen=True, slots=True, eq=False)
class GiveBack:
    """Nothing came into these slots of the own pool that counts, and nothing will."""

    slots: Numbers
    generations: Numbers


@dataclass(frozen=True, slots=True, eq=False)
class Touched:
    """These slots of the producer were read."""

    producer: AgentId
    slots: Numbers
    generations: Numbers


@dataclass(frozen=True, slots=True, eq=False)
class ReportStale:
    """Tell the owner that locations hold other pages by now."""

    owner: AgentId
    report: StaleReport


@dataclass(frozen=True, slots=True, eq=False)
class ReportCorrupt:
    """Tell the producer that these pages of its had wrong bytes."""

    producer: AgentId
    keys: bytes
    slots: Numbers
    generations: Numbers


Ask = Locate | Promote | Reserve | Fetch
Effect = Ask | Commit | GiveBack | Touched | ReportStale | ReportCorrupt
