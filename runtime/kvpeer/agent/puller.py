"""Brings pages of peers into the own pool: one pull for all who want a page, verified before anybody sees it.

A pull reserves slots, lets a native thread fetch into them, and commits what was verified; a slot whose fetch failed is
given back only after the transport has promised that nothing writes into it any more. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvpeer.agent.cohorts import Cohort
from kvpeer.agent.corruption import CorruptPages
from kvpeer.agent.data_peers import DataPeers
from kvpeer.agent.directory import DirectoryService
from kvpeer.agent.fetch_threads import FETCH_S_MIN, FetchThreads
from kvpeer.agent.locator import PeerLocator
from kvpeer.agent.pool import PoolService
from kvpeer.agent.touches import Touches
from kvpeer.core.breaker import Breakers
from kvpeer.core.chain import ChainSlice, take_keys
from kvpeer.core.located import LocatedPages
from kvpeer.core.negative import NegativeCache
from kvpeer.core.reasons import UnaskedReason
from kvpeer.core.slot_effects import Reservation, ReserveStatus
from kvpeer.core.sources import Holding, Source, choose_sources
from kvpeer.core.view import ClusterView
from kvpeer.metrics import Metrics
from kvpeer.model import KEY_BYTES, AgentId, Outcome
from kvpeer.native import PART_DTYPE
from kvpeer.transport import FetchBatch, FetchResult, NotAskedError
from kvpeer.wire.messages import StaleReport
from kvpeer.wire.packing import U2, U4, pack

__all__ = ["PeerPuller", "Services"]

ROUNDS_MAX = 2
"""Sources for one page: the best one, and another one when that failed. More would cost the time that a recompute
needs."""

FETCH_MARGIN_S = 0.002
"""The native deadline is this much earlier than the request's: to commit and to answer."""

FIRST_SHARE = 0.5
"""Of the time that is left, for sources that others could replace: a silent one must leave them a chance. What arrived
by then is kept."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Services:
    """What a pull needs of the rest of the agent. `fetches`: breakers of the producers that pages are pulled from."""

    pool: PoolService
    locator: PeerLocator
    directory: DirectoryService
    view: ClusterView
    negative: NegativeCache
    fetches: Breakers
    peers: DataPeers
    touches: Touches
    corrupt_pages: CorruptPages
    metrics: Metrics
    clock: Callable[[], float] = time.monotonic


@dataclass(slots=True, eq=False)
class _Pull:
    """Pages that are being pulled. `outcomes` are final when `done` is set. `failed`: producers that gave no answer, or
    a garbled one; they are not asked again."""

    keys: list[bytes]
    outcomes: NDArray[np.uint8]
    failed: set[AgentId] = field(default_factory=set)
    done: asyncio.Event = field(default_factory=asyncio.Event)


class PeerPuller:
    """See `peering.Puller`."""

    def __init__(self, services: Services, threads: FetchThreads) -> None:
        self._s = services
        self._threads = threads
        self._under_way: dict[bytes, tuple[_Pull, int]] = {}
        self._asked = services.metrics.counter("kvpeer_transport_asked_pages_total")
        self._unasked = services.metrics.counter("kvpeer_transport_unasked_pages_total")
        self._pulled_bytes = services.metrics.counter("kvpeer_transport_pulled_bytes_total")

    async def pull(
        self, cohort: Cohort, chain: ChainSlice, indices: NDArray[np.int64], request: str, deadline: float
    ) -> NDArray[np.uint8]:
        """See `peering.Puller.pull`."""
        packed = take_keys(chain.keys, indices)
        keys = [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
        joined = [(place, *self._under_way[key]) for place, key in enumerate(keys) if key in self._under_way]
        fresh = np.array([place for place, key in enumerate(keys) if key not in self._under_way], dtype=np.int64)
        outcomes = np.full(len(keys), Outcome.TIMEOUT, dtype=np.uint8)
        if len(fresh):
            outcomes[fresh] = await self._pull_fresh(
                cohort, chain, indices[fresh], [keys[place] for place in fresh.tolist()], request, deadline
            )
        for place, pull, theirs in joined:
            if await _is_set(pull.done, deadline - self._s.clock()):
                outcomes[place] = pull.outcomes[theirs]
        return outcomes

    def close(self) -> None:
        """Waits for fetches that run; they end by their deadlines. Blocks."""
        self._threads.close()

    # ---- one pull

    async def _pull_fresh(
        self,
        cohort: Cohort,
        chain: ChainSlice,
        indices: NDArray[np.int64],
        keys: list[bytes],
        request: str,
        deadline: float,
    ) -> NDArray[np.uint8]:
        pull = _Pull(keys, np.full(len(keys), Outcome.MISS, dtype=np.uint8))
        for place, key in enumerate(keys):
            self._under_way[key] = (pull, place)
        try:
            await self._rounds(pull, cohort, chain, indices, request, deadline)
        finally:
            pull.done.set()
            for key in keys:
                self._under_way.pop(key, None)
        return pull.outcomes

    async def _rounds(
        self,
        pull: _Pull,
        cohort: Cohort,
        chain: ChainSlice,
        indices: NDArray[np.int64],
        request: str,
        deadline: float,
    ) -> None:
        positions = chain.first + indices
        packed = b"".join(pull.keys)
        located = self._s.locator.recall(request, positions, packed)
        if located is None:
            located = await self._s.locator.find(chain, indices, request, deadline)
        for n in range(ROUNDS_MAX):
            places = np.flatnonzero(pull.outcomes != Outcome.HIT)
            left_s = deadline - self._s.clock()
            if not len(places):
                return
            if left_s < FETCH_S_MIN:
                if n == 0:
                    pull.outcomes[places] = Outcome.TIMEOUT
                    self._not_asked(UnaskedReason.LATE, len(places))
                return
            holding = self._holding(located, positions[places], take_keys(packed, places), pull.failed)
            sources = choose_sources(holding, request)
            if n == 0:
                self._not_asked(UnaskedReason.NO_SOURCE, len(places) - sum(len(each.indices) for each in sources))
            if not sources:
                return
            is_last = n + 1 == ROUNDS_MAX or not holding.has_alternatives
            until = deadline if is_last else deadline - left_s * (1 - FIRST_SHARE)
            await asyncio.gather(
                *(self._pull_from(source, places, pull, cohort, chain, indices, until) for source in sources)
            )

    def _holding(
        self, located: LocatedPages, positions: NDArray[np.int64], keys: bytes, failed_agents: set[AgentId]
    ) -> Holding:
        """Who holds which of these pages and may be asked; pages by indices into `positions`."""
        now = self._s.clock()

        def is_usable(agent: AgentId) -> bool:
            return agent not in failed_agents and self._s.locator.may_ask(agent, now)

        return located.holding(positions, keys, is_usable, self._s.negative, self._threads.in_flight, now)

    # ---- one source

    async def _pull_from(
        self,
        source: Source,
        places: NDArray[np.intp],
        pull: _Pull,
        cohort: Cohort,
        chain: ChainSlice,
        indices: NDArray[np.int64],
        deadline: float,
    ) -> None:
        """Pulls the pages of one source; `source.indices` index `places`, which index the pull."""
        wanted = places[source.indices]
        fits = source.holders["length"] == cohort.shape.page_bytes
        if not fits.all():
            self._refuse_sizes(source, pull, wanted, ~fits)
        wanted, holders = wanted[fits], source.holders[fits]
        if not len(wanted):
            return
        if not self._s.fetches.admit(source.producer, self._s.clock()):
            self._not_asked(UnaskedReason.BREAKER_OPEN, len(wanted))
            return
        reservation = await self._s.pool.reserve_for_pull(cohort, chain, indices[wanted], deadline)
        statuses = reservation.statuses
        pull.outcomes[wanted[statuses == ReserveStatus.PRESENT]] = Outcome.HIT
        pull.outcomes[wanted[statuses == ReserveStatus.NO_ROOM]] = Outcome.REFUSED
        self._not_asked(UnaskedReason.NO_ROOM, int((statuses == ReserveStatus.NO_ROOM).sum()))
        self._not_asked(UnaskedReason.WRITING, int((statuses == ReserveStatus.BUSY).sum()))
        given = np.flatnonzero(statuses == ReserveStatus.WRITE)
        if not len(given):
            self._s.fetches.not_sent(source.producer)
            return
        pull.outcomes[wanted[given]], is_answered = await self._fetch(
            source.producer,
            b"".join(pull.keys[place] for place in wanted[given].tolist()),
            chain.partitions()[indices[wanted[given]]],
            holders[given],
            reservation,
            given,
            cohort,
            deadline,
        )
        if not is_answered:
            pull.failed.add(source.producer)

    async def _fetch(
        self,
        producer: AgentId,
        keys: bytes,
        partitions: NDArray[np.uint16],
        holders: NDArray[np.void],
        reservation: Reservation,
        given: NDArray[np.intp],
        cohort: Cohort,
        deadline: float,
    ) -> tuple[NDArray[np.uint8], bool]:
        """The outcomes, and whether the producer answered for all pages. Settles the reservation."""
        slots, generations = reservation.slots[given], reservation.generations[given]
        try:
            batch = FetchBatch(
                slots=np.ascontiguousarray(holders["slot"]),
                generations=np.ascontiguousarray(holders["generation"]),
                keys=keys,
                lengths=np.ascontiguousarray(holders["length"]),
                destinations=reservation.offsets[given] + np.uint64(self._s.pool.native.payload_address),
            )
            fetched = await self._threads.fetch(producer, batch, deadline - FETCH_MARGIN_S)
        except Exception:
            # No thread writes any more. (One may where this is cancelled instead: then the slots stay as they are.)
            self._s.fetches.not_sent(producer)
            self._s.pool.fail_pull(slots, generations)
            raise
        outcomes = fetched.outcomes
        outcomes[(outcomes == Outcome.HIT) & (fetched.n_parts != cohort.shape.n_parts)] = Outcome.STALE
        hit = outcomes == Outcome.HIT
        self._settle(slots, generations, hit, fetched.parts[:, : cohort.shape.n_parts], outcomes)
        self._judge(producer, fetched)
        n_asked = fetched.n_asked
        self._account(
            producer,
            keys[: n_asked * KEY_BYTES],
            partitions[:n_asked],
            holders[:n_asked],
            outcomes[:n_asked],
            cohort.shape.page_bytes,
        )
        return outcomes, fetched.error is None

    def _refuse_sizes(self, source: Source, pull: _Pull, wanted: NDArray[np.intp], refused: NDArray[np.bool_]) -> None:
        """What is of another size is not pulled, and for a while not located there either."""
        keys = b"".join(pull.keys[place] for place in wanted[refused].tolist())
        pull.outcomes[wanted[refused]] = Outcome.STALE
        self._not_asked(UnaskedReason.OTHER_SIZE, int(refused.sum()))
        self._remember_failed(source.producer, keys, source.holders[refused])

    def _judge(self, producer: AgentId, fetched: FetchResult) -> None:
        """Tells the producer's breaker what the fetch says about it: nothing, where the fault is on this side."""
        if isinstance(fetched.error, NotAskedError):
            self._not_asked(fetched.error.reason, len(fetched.outcomes) - fetched.n_asked)
            if not fetched.n_asked:
                self._s.fetches.not_sent(producer)
                return
        elif fetched.error is not None:
            if self._s.view.info(producer) is not None:  # an agent that ended has no breaker any more
                self._s.fetches.failed(producer, self._s.clock())
            return
        self._s.fetches.succeeded(producer)

    def _settle(
        self,
        slots: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        hit: NDArray[np.bool_],
        parts: NDArray[np.void],
        outcomes: NDArray[np.uint8],
    ) -> None:
        if hit.any():
            accepted = self._s.pool.commit_pulled(
                slots[hit], generations[hit], np.ascontiguousarray(parts[hit], dtype=PART_DTYPE)
            )
            outcomes[np.flatnonzero(hit)[~accepted]] = Outcome.TIMEOUT
        if not hit.all():
            self._s.pool.fail_pull(slots[~hit], generations[~hit])

    def _account(
        self,
        producer: AgentId,
        keys: bytes,
        partitions: NDArray[np.uint16],
        holders: NDArray[np.void],
        outcomes: NDArray[np.uint8],
        page_bytes: int,
    ) -> None:
        """Remembers what failed, tells the owners what is stale and the producer what was used or came corrupt."""
        hit, corrupt = outcomes == Outcome.HIT, outcomes == Outcome.CORRUPT
        if corrupt.any():
            _log.error("%d pages of producer %s have wrong bytes", int(corrupt.sum()), producer.hex())
            rotten = holders[corrupt]
            self._s.corrupt_pages.report(
                producer, take_keys(keys, np.flatnonzero(corrupt)), rotten["slot"].copy(), rotten["generation"].copy()
            )
        self._s.touches.add(producer, holders["slot"][hit], holders["generation"][hit])
        transport = self._s.peers.transport
        for outcome, n in zip(Outcome, np.bincount(outcomes, minlength=len(Outcome)), strict=True):
            self._asked.labels(outcome=outcome.name.lower(), transport=transport).inc(int(n))
        self._pulled_bytes.labels(transport=transport).inc(int(hit.sum()) * page_bytes)
        bad = np.flatnonzero((outcomes == Outcome.STALE) | corrupt | (outcomes == Outcome.REFUSED))
        if len(bad):
            self._remember_failed(producer, take_keys(keys, bad), holders[bad])
        stale = np.flatnonzero(outcomes == Outcome.STALE)
        if len(stale):
            self._report_stale(producer, take_keys(keys, stale), partitions[stale], holders[stale])

    def _remember_failed(self, producer: AgentId, keys: bytes, holders: NDArray[np.void]) -> None:
        locations = holders.copy()
        locations["agent"] = 0
        self._s.negative.add_locations(keys, locations, producer, self._s.clock())

    def _not_asked(self, reason: UnaskedReason, n_pages: int) -> None:
        if n_pages:
            self._unasked.labels(reason=reason.value).inc(n_pages)

    def _report_stale(
        self, producer: AgentId, keys: bytes, partitions: NDArray[np.uint16], holders: NDArray[np.void]
    ) -> None:
        ring = self._s.view.ring
        owners = ring.owners(partitions)
        for idx in np.unique(owners[owners >= 0]).tolist():
            theirs = np.flatnonzero((owners == idx).any(axis=1))
            report = StaleReport(
                producer,
                take_keys(keys, theirs),
                pack(partitions[theirs], U2),
                pack(np.ascontiguousarray(holders["slot"][theirs]), U4),
                pack(np.ascontiguousarray(holders["generation"][theirs]), U4),
            )
            self._s.directory.report_stale(ring.members[idx], report)


async def _is_set(event: asyncio.Event, timeout_s: float) -> bool:
    if event.is_set():
        return True
    try:
        await asyncio.wait_for(event.wait(), max(0.0, timeout_s))
    except asyncio.TimeoutError:
        return False
    return True
