"""Brings pages of peers into the own pool: performs what `core.pull` decides.

Slots are reserved in the pool, native threads fetch into them, what was verified is committed. Belongs to one event
loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpeer.agent.cohorts import Cohort
from kvpeer.agent.corruption import CorruptPages
from kvpeer.agent.directory import DirectoryService
from kvpeer.agent.fetch_threads import FetchThreads
from kvpeer.agent.locator import PeerLocator
from kvpeer.agent.pool import PoolService
from kvpeer.agent.remote_disk import RemoteDisks
from kvpeer.agent.touches import Touches
from kvpeer.core.chain import ChainSlice
from kvpeer.core.pairs import PairLedger
from kvpeer.core.pull import (
    Ask,
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
from kvpeer.core.traces import TraceRing
from kvpeer.metrics import Metrics
from kvpeer.model import AgentId, Outcome
from kvpeer.native import PART_DTYPE
from kvpeer.transport import FetchBatch, FetchResult
from kvpeer.waits import is_set_within

__all__ = ["PeerPuller", "Services"]

ERROR_CHARS_MAX = 200
"""Of a fetch's error, in a trace."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Services:
    """What a pull needs of the rest of the agent. `transport`: what the threads fetch by, for metrics."""

    pool: PoolService
    locator: PeerLocator
    directory: DirectoryService
    touches: Touches
    corrupt_pages: CorruptPages
    disks: RemoteDisks
    metrics: Metrics
    transport: str
    traces: TraceRing
    pairs: PairLedger
    clock: Callable[[], float] = time.monotonic


class PeerPuller:
    """See `peering.Puller`."""

    def __init__(self, services: Services, pulls: Pulls, threads: FetchThreads) -> None:
        self._s = services
        self._pulls = pulls
        self._threads = threads
        self._ended: dict[PullPlan, asyncio.Event] = {}
        self._transports: dict[PullPlan, str] = {}
        self._asked = services.metrics.counter("kvpeer_transport_asked_pages_total")
        self._unasked = services.metrics.counter("kvpeer_transport_unasked_pages_total")
        self._pulled_bytes = services.metrics.counter("kvpeer_transport_pulled_bytes_total")

    async def pull(
        self,
        cohort: Cohort,
        chain: ChainSlice,
        indices: NDArray[np.int64],
        request: str,
        deadline: float,
        source: AgentId | None = None,
    ) -> NDArray[np.uint8]:
        """See `peering.Puller.pull`."""
        wanted = self._pulls.ask(PullQuestion(chain, indices, cohort.shape, request, deadline, source))
        joined = [self._ended[plan] for plan in wanted.joined]
        if wanted.fresh is not None:
            await self._run(wanted.fresh, cohort)
        for ended in joined:
            await is_set_within(ended, deadline - self._s.clock())
        return wanted.outcomes

    def close(self) -> None:
        """Waits for fetches that run; they end by their deadlines. Blocks."""
        self._threads.close()

    # ---- one pull

    async def _run(self, plan: PullPlan, cohort: Cohort) -> None:
        ended = self._ended[plan] = asyncio.Event()
        try:
            await self._perform(plan, cohort, plan.start(self._s.clock()))
        finally:
            self._pulls.end(plan)
            del self._ended[plan]
            ended.set()
            self._count(plan, cohort)

    async def _perform(self, plan: PullPlan, cohort: Cohort, effects: Sequence[Effect]) -> None:
        """Does what can be done at once, then asks what takes time, all side by side, and does what follows."""
        pending, asks = list(effects), []
        while pending:
            effect = pending.pop(0)
            if isinstance(effect, Ask):
                asks.append(self._ask(plan, cohort, effect))
            elif isinstance(effect, Commit):
                parts = np.ascontiguousarray(effect.parts[effect.indices, : cohort.shape.n_parts], dtype=PART_DTYPE)
                accepted = self._s.pool.commit_pulled(effect.slots, effect.generations, parts)
                pending += plan.committed(effect, accepted, self._s.clock())
            else:
                self._do(effect)
        await asyncio.gather(*asks)

    async def _ask(self, plan: PullPlan, cohort: Cohort, ask: Ask) -> None:
        try:
            effects = await self._answer(plan, cohort, ask)
        except Exception:
            # A fetch that raised writes no more. (It may where it is cancelled instead: its slots stay as they are.)
            await self._perform(plan, cohort, plan.broke(ask, self._s.clock()))
            raise
        await self._perform(plan, cohort, effects)

    async def _answer(self, plan: PullPlan, cohort: Cohort, ask: Ask) -> list[Effect]:
        question = plan.question
        if isinstance(ask, Locate):
            located = await self._s.locator.find(question.chain, question.indices, question.request, question.deadline)
            return plan.located(ask, located, self._s.clock())
        if isinstance(ask, Promote):
            producer, pages, left_s = ask.portion.producer, ask.portion, ask.deadline - self._s.clock()
            promoted = await self._s.disks.promote(producer, pages.keys, pages.holders, left_s)
            return plan.promoted(ask, *promoted, self._s.clock())
        if isinstance(ask, Reserve):
            indices = question.indices[ask.portion.places]
            reservation = await self._s.pool.reserve_for_pull(cohort, question.chain, indices, ask.deadline)
            return plan.reserved(ask, reservation, self._s.clock())
        began_at = self._s.clock()
        fetched = await self._threads.fetch(ask.portion.producer, self._batch(ask), ask.deadline)
        self._transports[plan] = fetched.transport or self._s.transport
        self._note(plan, cohort, ask, fetched, began_at)
        return plan.fetched(ask, fetched, self._s.clock())

    def _note(self, plan: PullPlan, cohort: Cohort, ask: Fetch, fetched: FetchResult, began_at: float) -> None:
        """For people who ask later what moved. What was not asked of the producer says nothing about it."""
        if not fetched.n_asked:
            return
        now, producer, question = self._s.clock(), ask.portion.producer, plan.question
        counts = np.bincount(fetched.outcomes[: fetched.n_asked], minlength=len(Outcome)).tolist()
        n_bytes, transport = counts[Outcome.HIT] * cohort.shape.page_bytes, self._transports[plan]
        error = "" if fetched.error is None else str(fetched.error)[:ERROR_CHARS_MAX]
        self._s.traces.moved(
            question.request, cohort.namespace, question.chain.keys, producer, transport, counts, n_bytes, error,
            began_at, now,
        )  # fmt: skip
        self._s.pairs.fetched(producer, transport, counts, n_bytes, error, now - began_at, now)

    def _batch(self, fetch: Fetch) -> FetchBatch:
        holders = fetch.portion.holders
        return FetchBatch(
            slots=np.ascontiguousarray(holders["slot"]),
            generations=np.ascontiguousarray(holders["generation"]),
            keys=fetch.portion.keys,
            lengths=np.ascontiguousarray(holders["length"]),
            destinations=fetch.offsets + np.uint64(self._s.pool.native.payload_address),
        )

    def _do(self, effect: GiveBack | Touched | ReportStale | ReportCorrupt) -> None:
        if isinstance(effect, GiveBack):
            self._s.pool.fail_pull(effect.slots, effect.generations)
        elif isinstance(effect, Touched):
            self._s.touches.add(effect.producer, effect.slots, effect.generations)
        elif isinstance(effect, ReportStale):
            self._s.directory.report_stale(effect.owner, effect.report)
        else:
            _log.error("%d pages of producer %s have wrong bytes", len(effect.slots), effect.producer.hex())
            self._s.corrupt_pages.report(effect.producer, effect.keys, effect.slots, effect.generations)

    def _count(self, plan: PullPlan, cohort: Cohort) -> None:
        """By the transport of the pull's last fetch: nearly always that of all."""
        transport = self._transports.pop(plan, self._s.transport)
        for outcome, n in plan.asked.items():
            self._asked.labels(outcome=outcome.name.lower(), transport=transport).inc(n)
        for reason, n in plan.unasked.items():
            self._unasked.labels(reason=reason.value).inc(n)
        if plan.unasked:
            unasked = [(reason.value, n) for reason, n in plan.unasked.items()]
            question = plan.question
            self._s.traces.unasked(question.request, cohort.namespace, question.chain.keys, unasked, self._s.clock())
        self._pulled_bytes.labels(transport=transport).inc(plan.asked[Outcome.HIT] * plan.question.shape.page_bytes)
