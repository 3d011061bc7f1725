"""From whom to pull the pages that were located.

One producer for as long a prefix as possible, because a prefix is what the engine can use and one request moves it.
Among those within a page of the longest one, a choice with weight 1 / (1 + requests in flight), so that readers of a
popular prefix spread over its holders; the choice is a function of the request's id, so that all ranks and retries of a
request agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvpeer.core.policy import PREFIX_BAND_PAGES, lot
from kvpeer.model import AgentId, LocalProtocolError, Tier

__all__ = ["OFFERS_MAX", "SOURCES_MAX", "Holding", "Offer", "Source", "choose_sources", "offers", "offers_within"]

SOURCES_MAX = 16
"""Producers that one request pulls from: each costs a round trip and a share of the deadline. What only others hold is
left out, which the reader counts as a miss."""

OFFERS_MAX = 16
"""Producers that are named for one prompt: as many as a record has holders."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """Who holds what, as a LocateResult says: counts u8 [n], holders HOLDER_DTYPE [sum of counts], agents.

    `usable`: which agents are alive and not avoided, bool [agents]. `failed`: which holders are known to fail (negative
    cache), bool [holders]. `in_flight`: requests that each agent has in flight, [agents].

    Raises:
        LocalProtocolError: the lengths do not fit together.
    """

    counts: npt.NDArray[np.uint8]
    holders: npt.NDArray[np.void]
    agents: Sequence[AgentId]
    usable: Mask
    failed: Mask
    in_flight: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        n_holders = int(self.counts.sum(dtype=np.int64))
        if self.holders.shape != (n_holders,) or self.failed.shape != (n_holders,):
            raise LocalProtocolError(f"{n_holders} holders expected, not {self.holders.shape} and {self.failed.shape}")
        if self.usable.shape != (len(self.agents),) or self.in_flight.shape != (len(self.agents),):
            raise LocalProtocolError(f"{len(self.agents)} agents need as many entries in usable and in_flight")

    @property
    def is_obtainable(self) -> Mask:
        """Whether each page has a holder that may be asked for it, bool [n]."""
        return self._n_offers > 0

    @property
    def has_alternatives(self) -> bool:
        """Whether some page could be had from more than one agent."""
        return bool((self._n_offers > 1).any())

    @property
    def _n_offers(self) -> npt.NDArray[np.int64]:
        may_be_asked = self.usable[self.holders["agent"]] & ~self.failed
        pages = np.arange(len(self.counts)).repeat(self.counts)[may_be_asked]
        return np.bincount(pages, minlength=len(self.counts))


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Pull these pages from this producer: `indices` u32 [k] into the batch, ascending, and their holders [k]."""

    producer: AgentId
    indices: npt.NDArray[np.uint32]
    holders: npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Offer:
    """A prompt's first `n_pages` pages can be had from this producer, which has `n_in_flight` fetches under way."""

    producer: AgentId
    n_pages: int
    n_in_flight: int


def offers(holding: Holding) -> list[Offer]:
    """Who has the first page, and how many pages from there on: at most OFFERS_MAX, the longest first. One that must
    read its disk first is left out where another one has as many in its pool: it would be named for nothing."""
    all_pages = np.arange(len(holding.counts))
    found, in_pools = [], 0
    for agent, (pages, holders) in _offers(holding).items():
        n_pages = _prefix_pages(pages, all_pages)
        is_in_pool = not _has_to_promote(holders[:n_pages])
        in_pools = max(in_pools, n_pages) if is_in_pool else in_pools
        found.append((is_in_pool, Offer(holding.agents[agent], n_pages, int(holding.in_flight[agent]))))
    named = [offer for is_in_pool, offer in found if is_in_pool or offer.n_pages > in_pools + PREFIX_BAND_PAGES]
    return sorted((each for each in named if each.n_pages), key=lambda each: -each.n_pages)[:OFFERS_MAX]


def offers_within(offered: Sequence[Offer], places: npt.NDArray[np.int64], n_pages: int) -> list[Offer]:
    """The same offers, for pages that are these places of `n_pages` others, all of which but these are at hand."""
    ends = [*places.tolist(), n_pages]
    return [Offer(offer.producer, ends[offer.n_pages], offer.n_in_flight) for offer in offered]


def choose_sources(holding: Holding, request: str, preferred: AgentId | None = None) -> list[Source]:
    """At most SOURCES_MAX sources, each page in at most one of them; a page that a usable producer holds is left out
    only when that many sources did not suffice. preferred: the first one, if it has the first page, and need not read
    its disk for what others have in their pools."""
    offered = _offers(holding)
    is_open = np.zeros(len(holding.counts), dtype=np.bool_)
    for pages, _ in offered.values():
        is_open[pages] = True
    sources: list[Source] = []
    while len(sources) < SOURCES_MAX and is_open.any():
        agent = _choose(offered, is_open, holding, request, None if sources else preferred)
        pages, holders = offered.pop(agent)
        wanted = is_open[pages]
        sources.append(Source(holding.agents[agent], pages[wanted], holders[wanted]))
        is_open[pages] = False
    return sources


def _offers(holding: Holding) -> dict[int, tuple[npt.NDArray[np.uint32], npt.NDArray[np.void]]]:
    """Per usable agent: the pages it holds, ascending, and one holder for each, of the fastest tier."""
    pages = np.arange(len(holding.counts), dtype=np.uint32).repeat(holding.counts)
    usable = holding.usable[holding.holders["agent"]] & ~holding.failed
    pages, holders = pages[usable], holding.holders[usable]
    order = np.lexsort((holders["tier"], pages, holders["agent"]))
    pages, holders = pages[order], holders[order]
    is_first = np.ones(len(pages), dtype=np.bool_)
    is_first[1:] = (pages[1:] != pages[:-1]) | (holders["agent"][1:] != holders["agent"][:-1])
    pages, holders = pages[is_first], holders[is_first]
    agents, starts = np.unique(holders["agent"], return_index=True)
    bounds = pairwise([*starts.tolist(), len(pages)])
    return {
        int(agent): (pages[start:stop], holders[start:stop])
        for agent, (start, stop) in zip(agents, bounds, strict=True)
    }


def _choose(
    offers: dict[int, tuple[npt.NDArray[np.uint32], npt.NDArray[np.void]]],
    is_open: Mask,
    holding: Holding,
    request: str,
    preferred: AgentId | None,
) -> int:
    """The agent to pull from next: the preferred one, or one of those with the longest prefix of the open pages; rather
    one that has them in its pool than one that must read its disk first."""
    open_pages = np.flatnonzero(is_open)
    prefixes = {agent: _prefix_pages(pages[is_open[pages]], open_pages) for agent, (pages, _) in offers.items()}

    def rank(agent: int) -> tuple[bool, bool, float]:
        pages, holders = offers[agent]
        has_to_promote = _has_to_promote(holders[is_open[pages]])
        is_wanted = holding.agents[agent] == preferred
        return has_to_promote, not is_wanted, lot(request, holding.agents[agent], int(holding.in_flight[agent]))

    wanted = [n_pages for agent, n_pages in prefixes.items() if n_pages and holding.agents[agent] == preferred]
    enough = max(1, (wanted[0] if wanted else max(prefixes.values())) - PREFIX_BAND_PAGES)
    return min((agent for agent, n_pages in prefixes.items() if n_pages >= enough), key=rank)


def _has_to_promote(holders: npt.NDArray[np.void]) -> bool:
    """Whether some of these pages are on the disk only."""
    return bool((holders["tier"] == Tier.DISK).any())


def _prefix_pages(pages: npt.NDArray[np.uint32], open_pages: npt.NDArray[np.intp]) -> int:
    """How many of the first open pages are all among `pages` (ascending, all of them open)."""
    differs = pages != open_pages[: len(pages)]
    return int(differs.argmax()) if differs.any() else len(pages)
