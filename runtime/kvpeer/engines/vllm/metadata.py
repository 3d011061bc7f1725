"""What the two sides of the connector say to each other, pickled by vLLM.

Keys travel as a `ChainSlice` (packed bytes) and block ids as packed i64, so a prompt of 800 pages is a handful of
Python objects and not thousands. The classes are registered as vLLM's abstract messages by `connector`; nothing here
imports vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpeer.core.chain import ChainSlice
from kvpeer.engines.vllm.lanes import Lane
from kvpeer.model import ConfigError

__all__ = ["LoadReport", "PageOrder", "RankFacts", "StepOrders", "StepReport", "agreed_facts"]

_BLOCK_ID_BYTES = 8


@dataclass(frozen=True)
class PageOrder:
    """Copy these pages of a request: `chain` names them, `blocks` (packed i64, one a page) says where they lie in the
    engine. What is not copied within `timeout_s` is given up; that time begins with the copying for a load (or when the
    engine's work before it is over, if that is later), with the order for a publish. `lane` and `source` are of loads:
    the producer to ask first for what has to be pulled, or nothing. `n_reloads`: how many of the first pages of a pull
    come out of the own pool."""

    request: str
    chain: ChainSlice
    blocks: bytes
    timeout_s: float
    lane: Lane = Lane.RELOAD
    source: bytes = b""
    n_reloads: int = 0

    @staticmethod
    def build(
        request: str,
        chain: ChainSlice,
        blocks: Iterable[int],
        timeout_s: float,
        lane: Lane = Lane.RELOAD,
        source: bytes = b"",
        n_reloads: int = 0,
    ) -> PageOrder:
        """Returns the order; `blocks` gives one block id for each page of `chain`. See `is_consistent`."""
        return PageOrder(
            request, chain, np.fromiter(blocks, dtype=np.int64).tobytes(), timeout_s, lane, source, n_reloads
        )

    def is_consistent(self) -> bool:
        """Whether there is a block for each page. A load without must not be tried, only be reported as failed."""
        return len(self.blocks) == len(self.chain) * _BLOCK_ID_BYTES

    def block_ids(self) -> npt.NDArray[np.int64]:
        """Returns the block ids, i64 [n], read-only."""
        return np.frombuffer(self.blocks, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.chain)


@dataclass
class StepOrders:
    """Orders of the scheduler side to every rank for one engine step, which has this number."""

    step: int = 0
    loads: list[PageOrder] = field(default_factory=list)
    """Accepted loads: each rank reports each of them finished exactly once, whatever becomes of it."""
    publishes: list[PageOrder] = field(default_factory=list)
    """Pages that are whole after this step, or were before: to be copied after its forward pass."""
    preempted: list[str] = field(default_factory=list)
    """Requests whose blocks are about to be reused: copies from them must not be committed any more."""
    held: list[str] = field(default_factory=list)
    """Finished requests whose blocks wait for their copies: each rank reports each of them once it has none running."""


@dataclass(frozen=True)
class LoadReport:
    """What became of one rank's load: how many of its first pages were loaded, and the time from its order to its
    end; from the end of the engine's work before it, if that is later. Without the time that a pull's reloads took.
    `is_local_fault`: that pages are missing is not the producer's doing: no thread was free in time, the own pool had
    no room or had lost its pages, the producer had no time to spare (refused), or there was an error here."""

    request: str
    n_pages: int
    seconds: float
    is_aborted: bool
    is_local_fault: bool = False


@dataclass
class StepReport:
    """What a rank tells the scheduler side with the output of a step; vLLM adds up those of all ranks."""

    step: int
    loads: list[LoadReport] = field(default_factory=list)

    def aggregate(self, other: StepReport) -> StepReport:
        """Adds another rank's; returns this."""
        self.loads.extend(other.loads)
        return self


@dataclass(frozen=True)
class RankFacts:
    """What a rank knows once its KV cache exists and the scheduler side does not: the namespace's fields and its own
    part."""

    namespace_fields: dict[str, str]
    n_parts: int
    part: int
    part_bytes: int


def agreed_facts(ranks: Sequence[RankFacts]) -> RankFacts:
    """Returns what all ranks of an engine have in common, as the facts of the first one.

    Raises:
        ConfigError: there are none, or they differ in something that decides the bytes of a page.
    """
    if not ranks:
        raise ConfigError("no rank registered a KV cache: kvpeer cannot share pages of this engine")
    first = ranks[0]
    for rank in ranks:
        names = rank.namespace_fields.keys() | first.namespace_fields.keys()
        differing = [name for name in names if rank.namespace_fields.get(name) != first.namespace_fields.get(name)]
        if (rank.n_parts, rank.part_bytes) != (first.n_parts, first.part_bytes):
            differing.append("parts of a page")
        if differing:
            raise ConfigError(
                f"ranks {first.part} and {rank.part} of this engine differ in {', '.join(sorted(differing))}: "
                "run all ranks with the same vLLM, model and environment"
            )
    return first
