"""Pulls for tests: producers that are known, pages that they hold, and answers by hand."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kvpeer.core.breaker import Breakers
from kvpeer.core.chain import Chain, ChainSlice
from kvpeer.core.locate import LocateResult
from kvpeer.core.located import LocatedPages, RecentLocations
from kvpeer.core.negative import NegativeCache
from kvpeer.core.producers import Producers
from kvpeer.core.pull import PullQuestion
from kvpeer.core.ring import Ring
from kvpeer.core.slot_effects import NoRoom, PageShape, Reservation, ReserveStatus
from kvpeer.core.view import ClusterView
from kvpeer.model import HOLDER_DTYPE, AgentId, KvPeerError, Outcome, Tier
from kvpeer.wire.messages import AgentInfo

PAGE_BYTES, N_PARTS = 64, 2
SHAPE = PageShape(PAGE_BYTES, N_PARTS, cohort=1)
DEADLINE = 1.0
GENERATION = 7


def agent(number: int) -> AgentId:
    return AgentId(hashlib.sha256(f"agent {number}".encode()).digest()[:16])


SELF = agent(0)


def info(number: int) -> AgentInfo:
    return AgentInfo(agent(number), f"agent-{number}", "10.0.0.1", 7000, 7001)


def chain_slice(n: int, first: int = 0) -> ChainSlice:
    chain = Chain(b"n" * 32)
    chain.extend(hashlib.sha256(page.to_bytes(4, "big")).digest() for page in range(first + n))
    return chain.slice(first, first + n)


def question_of(chain: ChainSlice, *, request: str = "r", deadline: float = DEADLINE) -> PullQuestion:
    return PullQuestion(chain, np.arange(len(chain)), SHAPE, request, deadline)


def located_of(
    question: PullQuestion, held: list[set[int]], *, length: int = PAGE_BYTES, on_disk: Collection[int] = ()
) -> LocatedPages:
    """held[i]: which producers hold page i of the question. The slot of a page is its position in the chain. `on_disk`:
    positions of pages that lie on their producers' disks."""
    positions = question.chain.first + question.indices
    numbers = sorted(set().union(*held)) if held else []
    rows = [
        (numbers.index(producer), position, GENERATION, length, Tier.DISK if position in on_disk else Tier.HOST)
        for position, producers in zip(positions.tolist(), held, strict=True)
        for producer in sorted(producers)
    ]
    counts = np.array([len(producers) for producers in held], dtype=np.uint8)
    result = LocateResult(
        np.where(counts > 0, np.uint8(2), np.uint8(0)), counts, np.array(rows, dtype=HOLDER_DTYPE),
        tuple(agent(number) for number in numbers), {}, None,
    )  # fmt: skip
    return LocatedPages(positions, question.keys, result, expires=100.0)


@dataclass
class Cluster:
    """What an agent with this many peers knows; its own number is 0 unless told otherwise."""

    n_peers: int = 4
    number: int = 0
    in_flight: Counter[AgentId] = field(default_factory=Counter)
    breakers: Breakers = field(default_factory=Breakers)
    negative: NegativeCache = field(default_factory=NegativeCache)
    recent: RecentLocations = field(default_factory=RecentLocations)

    def __post_init__(self) -> None:
        self.view = ClusterView(info(self.number), lambda members: Ring.build(list(members)))
        self.alive(*range(1, self.n_peers + 1))
        self.producers = Producers(self.view, self.breakers, self.negative, self.in_flight)

    def alive(self, *numbers: int) -> None:
        self.view.update([info(number) for number in (self.number, *numbers)], [], 0.0)


@dataclass
class Answer:
    """A `FetchAnswer`; `parts` is the number of each page in the fetch."""

    outcomes: np.ndarray
    n_parts: np.ndarray
    n_asked: int
    error: KvPeerError | None = None

    @property
    def parts(self) -> Any:
        return list(range(len(self.outcomes)))


def answer(*outcomes: Outcome, error: KvPeerError | None = None, n_asked: int | None = None) -> Answer:
    n = len(outcomes)
    return Answer(
        np.array(outcomes, dtype=np.uint8), np.full(n, N_PARTS, dtype=np.uint16), n if n_asked is None else n_asked,
        error,
    )  # fmt: skip


def slots_for(*statuses: ReserveStatus, first: int = 100) -> Reservation:
    """Slots `first` and on, in generation 1, for one page each."""
    n = len(statuses)
    slots = np.arange(first, first + n, dtype=np.uint32)
    no_room = NoRoom.PINNED if ReserveStatus.NO_ROOM in statuses else None
    return Reservation(
        np.array(statuses, dtype=np.uint8), slots, np.ones(n, dtype=np.uint32), slots.astype(np.uint64) * 64, no_room
    )
