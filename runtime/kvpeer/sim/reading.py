"""Locates and pulls of one simulated agent: performs what the plans of `core.locate` and `core.pull` decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpeer.core.breaker import Breakers
from kvpeer.core.chain import ChainSlice, take_keys
from kvpeer.core.locate import Ask, LocatePlan, LocateQuestion, LocateResult
from kvpeer.core.located import REMEMBERED_S, LocatedPages, RecentLocations
from kvpeer.core.producers import Producers
from kvpeer.core.pull import (
    Commit,
    Effect,
    Fetch,
    GiveBack,
    Locate,
    Promote,
    PullPlan,
    PullQuestion,
    Pulls,
    ReportCorrupt,
    ReportStale,
    Reserve,
    Touched,
)
from kvpeer.core.reasons import MissReason
from kvpeer.core.slots import ALL_PARTS
from kvpeer.model import KvPeerError, Outcome
from kvpeer.sim.directory import Directory
from kvpeer.sim.kernel import Future, Process, Task
from kvpeer.sim.pool import PULL_WRITER, Cohort, Pool
from kvpeer.sim.transfer import Batch, DataPeers
from kvpeer.wire.messages import Holders

__all__ = ["Locator", "Puller", "Services"]

HEDGE_DELAY_S, FAILURE_WAIT_S = 0.02, 0.1


class Locator:
    """Drives one `LocatePlan` a batch. `lookups`: breakers of the owners that are asked."""

    def __init__(self, process: Process, directory: Directory, lookups: Breakers, producers: Producers) -> None:
        self.recent = RecentLocations()
        self._process = process
        self._directory = directory
        self._lookups = lookups
        self._producers = producers

    async def locate(
        self, chain: ChainSlice, indices: NDArray[np.int64], request: str, deadline: float
    ) -> NDArray[np.uint8]:
        """For each page 2 if a pull would ask somebody for it now, 0 if not."""
        located = await self.find(chain, indices, request, deadline)
        holding = self._producers.holding(located, located.positions, located.keys, self._process.clock())
        return np.where(holding.is_obtainable, located.result.statuses, np.uint8(0))

    async def find(self, chain: ChainSlice, indices: NDArray[np.int64], request: str, deadline: float) -> LocatedPages:
        """Where these pages lie at peers. Answers by `deadline`."""
        keys = take_keys(chain.keys, indices)
        result = await self.ask(keys, chain.partitions()[indices], deadline)
        if set(result.reasons) == {MissReason.MISS}:
            self._producers.negative.add_misses(
                take_keys(keys, np.flatnonzero(result.statuses == 0)), self._process.clock()
            )
        located = LocatedPages(chain.first + indices, keys, result, self._process.clock() + REMEMBERED_S)
        self.recent.remember(request, located)
        return located

    async def ask(self, keys: bytes, partitions: NDArray[np.uint16], deadline: float) -> LocateResult:
        """What the directory says of these pages."""
        now = self._process.clock()
        nothing = np.zeros(len(partitions), dtype=np.bool_)
        question = LocateQuestion(keys, partitions, nothing, self._producers.negative.has_misses(keys, now))
        avoided = [member for member in self._producers.view.ring.members if not self._lookups.is_usable(member, now)]
        plan = LocatePlan(question, self._producers.view.rings(now, avoided), deadline, HEDGE_DELAY_S)
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
    """What a pull needs of the rest of the agent. `tell` performs what others are told."""

    process: Process
    pool: Pool
    locator: Locator
    peers: DataPeers
    tell: Callable[[Touched | ReportStale | ReportCorrupt], None]


class Puller:
    """Runs one `PullPlan` a pull, as `agent/puller.py` does."""

    def __init__(self, services: Services, pulls: Pulls) -> None:
        self.pulls = pulls
        self._s = services
        self._ended: dict[PullPlan, Future[None]] = {}

    async def pull(
        self, cohort: Cohort, chain: ChainSlice, indices: NDArray[np.int64], request: str, deadline: float
    ) -> NDArray[np.uint8]:
        """The outcome of each page; a HIT is committed in the own pool. Answers by `deadline`."""
        wanted = self.pulls.ask(PullQuestion(chain, indices, cohort.shape, request, deadline))
        joined = [self._ended[plan] for plan in wanted.joined]
        if wanted.fresh is not None:
            await self._run(wanted.fresh, cohort)
        for ended in joined:
            await self._s.process.wait_any([ended], deadline)
        return wanted.outcomes

    async def _run(self, plan: PullPlan, cohort: Cohort) -> None:
        ended = self._ended[plan] = Future()
        try:
            await self._perform(plan, cohort, plan.start(self._s.process.clock()))
        finally:
            self.pulls.end(plan)
            del self._ended[plan]
            ended.set(None)

    async def _perform(self, plan: PullPlan, cohort: Cohort, effects: Sequence[Effect]) -> None:
        pending, asks = list(effects), []
        while pending:
            effect = pending.pop(0)
            if isinstance(effect, Locate | Promote | Reserve | Fetch):
                asks.append(self._s.process.spawn(self._ask(plan, cohort, effect)))
            elif isinstance(effect, Commit):
                parts = [effect.parts[idx] for idx in effect.indices.tolist()]
                accepted = self._s.pool.commit_pulled(effect.slots, effect.generations, parts)
                pending += plan.committed(effect, accepted, self._s.process.clock())
            elif isinstance(effect, GiveBack):
                self._s.pool.abandon(PULL_WRITER, effect.slots, effect.generations)
            else:
                self._s.tell(effect)
        for task in asks:
            await task

    async def _ask(self, plan: PullPlan, cohort: Cohort, ask: Locate | Promote | Reserve | Fetch) -> None:
        await self._perform(plan, cohort, await self._answer(plan, cohort, ask))

    async def _answer(self, plan: PullPlan, cohort: Cohort, ask: Locate | Promote | Reserve | Fetch) -> list[Effect]:
        clock, question = self._s.process.clock, plan.question
        if isinstance(ask, Locate):
            located = await self._s.locator.find(question.chain, question.indices, question.request, question.deadline)
            return plan.located(ask, located, clock())
        if isinstance(ask, Promote):  # no simulated agent has a disk
            nothing = np.full(len(ask.portion), Outcome.MISS, dtype=np.uint8)
            return plan.promoted(ask, nothing, ask.portion.holders, clock())
        if isinstance(ask, Reserve):
            pages = ask.portion
            reservation = await self._s.pool.reserve(
                PULL_WRITER, pages.keys, pages.partitions, cohort, ALL_PARTS, ask.deadline
            )
            return plan.reserved(ask, reservation, clock())
        holders = ask.portion.holders
        batch = Batch(
            ask.portion.keys,
            np.ascontiguousarray(holders["slot"]),
            np.ascontiguousarray(holders["generation"]),
            np.ascontiguousarray(holders["length"]),
            ask.offsets.tolist(),
        )
        return plan.fetched(ask, await self._s.peers.fetch(ask.portion.producer, batch, ask.deadline), clock())
