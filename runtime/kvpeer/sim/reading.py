"""Locates and pulls of one simulated agent: `agent/locator.py` and `agent/puller.py` over the same pure machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvpeer.core.breaker import Breakers
from kvpeer.core.chain import ChainSlice, take_keys
from kvpeer.core.locate import Ask, LocatePlan, LocateQuestion, LocateResult
from kvpeer.core.located import REMEMBERED_S, LocatedPages, RecentLocations
from kvpeer.core.negative import NegativeCache
from kvpeer.core.reasons import MissReason
from kvpeer.core.slot_effects import ReserveStatus
from kvpeer.core.slots import ALL_PARTS
from kvpeer.core.sources import Source, choose_sources
from kvpeer.core.view import ClusterView
from kvpeer.model import KEY_BYTES, AgentId, KvPeerError, Outcome
from kvpeer.sim.directory import Directory
from kvpeer.sim.kernel import Future, Process, Task
from kvpeer.sim.pool import PULL_WRITER, Cohort, Pool
from kvpeer.sim.transfer import Batch, DataPeers, Fetched
from kvpeer.wire.messages import Holders, StaleReport
from kvpeer.wire.packing import U2, U4, pack

__all__ = ["Locator", "Puller", "Services"]

HEDGE_DELAY_S, FAILURE_WAIT_S = 0.02, 0.1
ROUNDS_MAX, FETCH_MARGIN_S, FETCH_S_MIN, FIRST_SHARE = 2, 0.002, 0.001, 0.5


class Locator:
    """Drives one `LocatePlan` a batch. Breakers: of owners that are asked, of producers that pages are pulled from."""

    def __init__(
        self,
        process: Process,
        directory: Directory,
        view: ClusterView,
        negative: NegativeCache,
        lookups: Breakers,
        fetches: Breakers,
    ) -> None:
        self.recent = RecentLocations()
        self._process = process
        self._directory = directory
        self._view = view
        self._negative = negative
        self._lookups = lookups
        self._fetches = fetches

    async def locate(
        self, chain: ChainSlice, indices: NDArray[np.int64], request: str, deadline: float
    ) -> NDArray[np.uint8]:
        """For each page 2 if a pull would ask somebody for it now, 0 if not."""
        located = await self.find(chain, indices, request, deadline)
        now = self._process.clock()
        holding = located.holding(
            located.positions, located.keys, lambda agent: self.may_ask(agent, now), self._negative, {}, now
        )
        return np.where(holding.is_obtainable, located.result.statuses, np.uint8(0))

    def may_ask(self, producer: AgentId, now: float) -> bool:
        """Whether pages may be pulled from this agent."""
        return self._view.info(producer) is not None and self._fetches.is_usable(producer, now)

    async def find(self, chain: ChainSlice, indices: NDArray[np.int64], request: str, deadline: float) -> LocatedPages:
        """Where these pages lie at peers. Answers by `deadline`."""
        keys = take_keys(chain.keys, indices)
        result = await self.ask(keys, chain.partitions()[indices], deadline)
        if set(result.reasons) == {MissReason.MISS}:
            self._negative.add_misses(take_keys(keys, np.flatnonzero(result.statuses == 0)), self._process.clock())
        located = LocatedPages(chain.first + indices, keys, result, self._process.clock() + REMEMBERED_S)
        self.recent.remember(request, located)
        return located

    async def ask(self, keys: bytes, partitions: NDArray[np.uint16], deadline: float) -> LocateResult:
        """What the directory says of these pages."""
        now = self._process.clock()
        nothing = np.zeros(len(partitions), dtype=np.bool_)
        question = LocateQuestion(keys, partitions, nothing, self._negative.has_misses(keys, now))
        avoided = [member for member in self._view.ring.members if not self._lookups.is_usable(member, now)]
        plan = LocatePlan(question, self._view.rings(now, avoided), deadline, HEDGE_DELAY_S)
        waiting: dict[Task[Holders], tuple[Ask, float]] = {}
        asks = plan.start(now)
        while True:
            while asks:
                asks = self._send(plan, asks, waiting, deadline)
            if plan.done:
                break
            await self._process.wait_any(waiting, plan.next_wakeup)
            for task in [task for task in waiting if task.is_done]:
                ask, _ = waiting.pop(task)
                asks = asks + self._take(plan, ask, task)
            asks = asks + plan.tick(self._process.clock())
        now = self._process.clock()
        for ask, asked_at in waiting.values():
            if now - asked_at >= FAILURE_WAIT_S:
                self._lookups.failed(ask.owner, now)
        return plan.result

    def _send(
        self, plan: LocatePlan, asks: list[Ask], waiting: dict[Task[Holders], tuple[Ask, float]], deadline: float
    ) -> list[Ask]:
        more: list[Ask] = []
        for ask in asks:
            now = self._process.clock()
            if ask.owner == self._directory.own_id:
                more += plan.answered(ask, self._directory.shard.lookup(ask.message), now)
            else:
                lookup = self._directory.lookup(ask.owner, ask.message, max(0.001, deadline - now))
                waiting[self._process.spawn(lookup)] = (ask, now)
        return more

    def _take(self, plan: LocatePlan, ask: Ask, task: Task[Holders]) -> list[Ask]:
        now = self._process.clock()
        try:
            answer = task.result()
        except KvPeerError:
            self._lookups.failed(ask.owner, now)
            return plan.failed(ask, now)
        self._lookups.succeeded(ask.owner)
        return plan.answered(ask, answer, now)


@dataclass(frozen=True, slots=True, eq=False)
class Services:
    """What a pull needs of the rest of the agent. `touched` hears which slots of a producer were read."""

    process: Process
    pool: Pool
    locator: Locator
    directory: Directory
    view: ClusterView
    negative: NegativeCache
    fetches: Breakers
    peers: DataPeers
    touched: Callable[[AgentId, NDArray[np.uint32], NDArray[np.uint32]], None]
    corrupt: Callable[[AgentId, Batch, NDArray[np.uint8]], None]


@dataclass(slots=True, eq=False)
class _Pull:
    cohort: Cohort
    chain: ChainSlice
    indices: NDArray[np.int64]
    keys: list[bytes]
    outcomes: NDArray[np.uint8]
    failed: set[AgentId] = field(default_factory=set)
    done: Future[None] = field(default_factory=Future)


class Puller:
    """One pull for all who want a page, verified before anybody sees it."""

    def __init__(self, services: Services) -> None:
        self._s = services
        self.under_way: dict[bytes, tuple[_Pull, int]] = {}
        self.in_flight: Counter[AgentId] = Counter()

    async def pull(
        self, cohort: Cohort, chain: ChainSlice, indices: NDArray[np.int64], request: str, deadline: float
    ) -> NDArray[np.uint8]:
        """The outcome of each page; a HIT is committed in the own pool. Answers by `deadline`."""
        packed = take_keys(chain.keys, indices)
        keys = [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
        joined = [(place, *self.under_way[key]) for place, key in enumerate(keys) if key in self.under_way]
        fresh = np.array([place for place, key in enumerate(keys) if key not in self.under_way], dtype=np.int64)
        outcomes = np.full(len(keys), Outcome.TIMEOUT, dtype=np.uint8)
        if len(fresh):
            chosen = [keys[place] for place in fresh.tolist()]
            misses = np.full(len(fresh), Outcome.MISS, dtype=np.uint8)
            outcomes[fresh] = await self._pull_fresh(
                _Pull(cohort, chain, indices[fresh], chosen, misses), request, deadline
            )
        for place, pull, theirs in joined:
            await self._s.process.wait_any([pull.done], deadline)
            if pull.done.is_done:
                outcomes[place] = pull.outcomes[theirs]
        return outcomes

    async def _pull_fresh(self, pull: _Pull, request: str, deadline: float) -> NDArray[np.uint8]:
        for place, key in enumerate(pull.keys):
            self.under_way[key] = (pull, place)
        try:
            await self._rounds(pull, request, deadline)
        finally:
            pull.done.set(None)
            for key in pull.keys:
                self.under_way.pop(key, None)
        return pull.outcomes

    async def _rounds(self, pull: _Pull, request: str, deadline: float) -> None:
        clock = self._s.process.clock
        positions = pull.chain.first + pull.indices
        packed = b"".join(pull.keys)
        located = self._s.locator.recent.recall(request, positions, packed, clock())
        if located is None:
            located = await self._s.locator.find(pull.chain, pull.indices, request, deadline)
        for n in range(ROUNDS_MAX):
            places = np.flatnonzero(pull.outcomes != Outcome.HIT)
            now = clock()
            left_s = deadline - now
            if not len(places) or left_s < FETCH_S_MIN:
                return

            def is_usable(agent: AgentId, now: float = now) -> bool:
                return agent not in pull.failed and self._s.locator.may_ask(agent, now)

            holding = located.holding(
                positions[places], take_keys(packed, places), is_usable, self._s.negative, self.in_flight, now
            )
            sources = choose_sources(holding, request)
            if not sources:
                return
            is_last = n + 1 == ROUNDS_MAX or not holding.has_alternatives
            until = deadline if is_last else deadline - left_s * (1 - FIRST_SHARE)
            for task in [self._s.process.spawn(self._pull_from(source, places, pull, until)) for source in sources]:
                await task

    async def _pull_from(self, source: Source, places: NDArray[np.intp], pull: _Pull, deadline: float) -> None:
        wanted = places[source.indices]
        fits = source.holders["length"] == pull.cohort.shape.page_bytes
        pull.outcomes[wanted[~fits]] = Outcome.STALE
        wanted, holders = wanted[fits], source.holders[fits]
        if not len(wanted) or not self._s.fetches.admit(source.producer, self._s.process.clock()):
            return
        indices = pull.indices[wanted]
        keys, partitions = take_keys(pull.chain.keys, indices), pull.chain.partitions()[indices]
        reservation = await self._s.pool.reserve(PULL_WRITER, keys, partitions, pull.cohort, ALL_PARTS, deadline)
        pull.outcomes[wanted[reservation.statuses == ReserveStatus.PRESENT]] = Outcome.HIT
        pull.outcomes[wanted[reservation.statuses == ReserveStatus.NO_ROOM]] = Outcome.REFUSED
        given = np.flatnonzero(reservation.statuses == ReserveStatus.WRITE)
        if not len(given):
            self._s.fetches.not_sent(source.producer)
            return
        batch = Batch(
            take_keys(keys, given),
            np.ascontiguousarray(holders["slot"][given]),
            np.ascontiguousarray(holders["generation"][given]),
            np.ascontiguousarray(holders["length"][given]),
            reservation.offsets[given].tolist(),
        )
        fetched = await self._fetch(source.producer, batch, deadline)
        self._settle(pull.cohort, reservation.slots[given], reservation.generations[given], fetched)
        pull.outcomes[wanted[given]] = fetched.outcomes
        self._account(source.producer, batch, partitions[given], holders[given], fetched.outcomes)
        if fetched.error is not None:
            pull.failed.add(source.producer)

    async def _fetch(self, producer: AgentId, batch: Batch, deadline: float) -> Fetched:
        self.in_flight[producer] += 1
        try:
            fetched = await self._s.peers.fetch(producer, batch, deadline - FETCH_MARGIN_S)
        finally:
            self.in_flight[producer] -= 1
            if not self.in_flight[producer]:
                del self.in_flight[producer]
        if fetched.error is None:
            self._s.fetches.succeeded(producer)
        else:
            self._s.fetches.failed(producer, self._s.process.clock())
        return fetched

    def _settle(
        self, cohort: Cohort, slots: NDArray[np.uint32], generations: NDArray[np.uint32], fetched: Fetched
    ) -> None:
        outcomes = fetched.outcomes
        for idx in np.flatnonzero(outcomes == Outcome.HIT).tolist():
            if len(fetched.parts[idx]) != cohort.shape.n_parts:
                outcomes[idx] = Outcome.STALE
        hit = outcomes == Outcome.HIT
        if hit.any():
            parts = [fetched.parts[idx] for idx in np.flatnonzero(hit).tolist()]
            accepted = self._s.pool.commit_pulled(slots[hit], generations[hit], parts)
            outcomes[np.flatnonzero(hit)[~accepted]] = Outcome.TIMEOUT
        if not hit.all():
            self._s.pool.abandon(PULL_WRITER, slots[~hit], generations[~hit])

    def _account(
        self,
        producer: AgentId,
        batch: Batch,
        partitions: NDArray[np.uint16],
        holders: NDArray[np.void],
        outcomes: NDArray[np.uint8],
    ) -> None:
        now = self._s.process.clock()
        hit, corrupt = outcomes == Outcome.HIT, outcomes == Outcome.CORRUPT
        if hit.any():
            self._s.touched(producer, batch.slots[hit], batch.generations[hit])
        if corrupt.any():
            self._s.corrupt(producer, batch, outcomes)
        bad = np.flatnonzero((outcomes == Outcome.STALE) | corrupt | (outcomes == Outcome.REFUSED))
        if len(bad):
            bad_holders = holders[bad].copy()
            bad_holders["agent"] = 0
            self._s.negative.add_locations(take_keys(batch.keys, bad), bad_holders, producer, now)
        stale = np.flatnonzero(outcomes == Outcome.STALE)
        if len(stale):
            self._report_stale(producer, batch, partitions, stale)

    def _report_stale(
        self, producer: AgentId, batch: Batch, partitions: NDArray[np.uint16], stale: NDArray[np.intp]
    ) -> None:
        ring = self._s.view.ring
        owners = ring.owners(partitions[stale])
        for idx in np.unique(owners[owners >= 0]).tolist():
            theirs = stale[(owners == idx).any(axis=1)]
            report = StaleReport(
                producer,
                take_keys(batch.keys, theirs),
                pack(partitions[theirs], U2),
                pack(batch.slots[theirs], U4),
                pack(batch.generations[theirs], U4),
            )
            self._s.directory.report_stale(ring.members[idx], report)
