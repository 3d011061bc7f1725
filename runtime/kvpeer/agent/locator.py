"""Finds pages at peers: drives one `LocatePlan` a batch, and remembers for a while what it found.

Belongs to one event loop. What was found is kept under the request's id, because the fetch of the same pages follows
within milliseconds, from each rank.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from kvpeer.agent.directory import DirectoryService
from kvpeer.agent.peering import Whereabouts
from kvpeer.core.breaker import Breakers
from kvpeer.core.chain import ChainSlice, take_keys
from kvpeer.core.locate import Ask, LocatePlan, LocateQuestion, LocateResult
from kvpeer.core.located import REMEMBERED_S, LocatedPages, RecentLocations
from kvpeer.core.producers import Producers
from kvpeer.core.reasons import MissReason
from kvpeer.core.sources import offers
from kvpeer.metrics import Metrics
from kvpeer.model import AgentId, KvPeerError
from kvpeer.wire.messages import Holders

__all__ = ["PeerLocator"]

HEDGE_DELAY_S = 0.02
"""An owner that has not answered by then is late, and the replica is asked too: far above a round trip (0.1 ms), far
below what a request would notice."""

FAILURE_WAIT_S = 0.1
"""An owner that left a question open for this long failed, whoever answered in its place."""


class PeerLocator:
    """See `peering.Locator`. `lookups`: breakers of the owners that are asked; `producers`: from whom pages would be
    pulled. `clock` is monotonic seconds. `recent`: what was found, for the pulls that follow."""

    def __init__(
        self,
        directory: DirectoryService,
        lookups: Breakers,
        producers: Producers,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.recent = RecentLocations()
        self._directory = directory
        self._lookups = lookups
        self._producers = producers
        self._metrics = metrics
        self._clock = clock

    async def locate(self, chain: ChainSlice, indices: NDArray[np.int64], request: str, deadline: float) -> Whereabouts:
        """See `peering.Locator.locate`. A page counts as found only if a pull would ask somebody for it now."""
        located = await self.find(chain, indices, request, deadline)
        holding = self._producers.holding(located, located.positions, located.keys, self._clock())
        statuses = np.where(holding.is_obtainable, located.result.statuses, np.uint8(0))
        lost = np.flatnonzero(statuses != located.result.statuses)
        if len(lost):
            misses = self._metrics.counter("kvpeer_locate_misses_total")
            misses.labels(reason=MissReason.NO_HOLDER.value).inc(len(lost))
        first_miss = located.result.first_miss
        if len(lost) and not (located.result.statuses[: lost[0]] == 0).any():
            first_miss = MissReason.NO_HOLDER
        return Whereabouts(statuses, first_miss.value if first_miss else "", offers(holding))

    async def find(self, chain: ChainSlice, indices: NDArray[np.int64], request: str, deadline: float) -> LocatedPages:
        """Where these pages lie at peers; asks their owners. Answers by `deadline`."""
        now = self._clock()
        keys = take_keys(chain.keys, indices)
        nothing_resident = np.zeros(len(indices), dtype=np.bool_)
        negative = self._producers.negative.has_misses(keys, now)
        question = LocateQuestion(keys, chain.partitions()[indices], nothing_resident, negative)
        plan = LocatePlan(question, self._producers.view.rings(now, self._avoided(now)), deadline, HEDGE_DELAY_S)
        await self._run(plan, deadline)
        result = plan.result
        self._metrics.counter("kvpeer_locate_hedges_total").inc(plan.n_hedged)
        self._account(keys, result)
        located = LocatedPages(chain.first + indices, keys, result, self._clock() + REMEMBERED_S)
        self.recent.remember(request, located)
        return located

    # ---- inside

    async def _run(self, plan: LocatePlan, deadline: float) -> None:
        waiting: dict[asyncio.Task[Holders], tuple[Ask, float]] = {}
        asks = plan.start(self._clock())
        try:
            while True:
                while asks:
                    asks = self._ask(plan, asks, waiting, deadline)
                if plan.done:
                    return
                pause_s = max(0.0, plan.next_wakeup - self._clock())
                done: Iterable[asyncio.Task[Holders]] = ()
                if waiting:
                    done, _ = await asyncio.wait(waiting, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(pause_s)
                for task in done:
                    ask, _ = waiting.pop(task)
                    asks = asks + self._take(plan, ask, task)
                if not plan.done:
                    asks = asks + plan.tick(self._clock())
        finally:
            now = self._clock()
            for task, (ask, asked_at) in waiting.items():
                task.cancel()
                if now - asked_at >= FAILURE_WAIT_S:
                    self._lookups.failed(ask.owner, now)

    def _ask(
        self,
        plan: LocatePlan,
        asks: list[Ask],
        waiting: dict[asyncio.Task[Holders], tuple[Ask, float]],
        deadline: float,
    ) -> list[Ask]:
        """Sends the asks; those to the own shard are answered at once, and what follows from that is returned."""
        more: list[Ask] = []
        for ask in asks:
            now = self._clock()
            if ask.owner == self._directory.own_id:
                more += plan.answered(ask, self._directory.shard.lookup(ask.message), now)
            else:
                lookup = self._directory.lookup(ask.owner, ask.message, max(0.001, deadline - now))
                waiting[asyncio.get_running_loop().create_task(lookup)] = (ask, now)
        return more

    def _take(self, plan: LocatePlan, ask: Ask, task: asyncio.Task[Holders]) -> list[Ask]:
        now = self._clock()
        try:
            answer = task.result()
        except KvPeerError:
            self._lookups.failed(ask.owner, now)
            return plan.failed(ask, now)
        self._lookups.succeeded(ask.owner)
        return plan.answered(ask, answer, now)

    def _avoided(self, now: float) -> list[AgentId]:
        return [
            agent_id for agent_id in self._producers.view.ring.members if not self._lookups.is_usable(agent_id, now)
        ]

    def _account(self, keys: bytes, result: LocateResult) -> None:
        misses = self._metrics.counter("kvpeer_locate_misses_total")
        for reason, n in result.reasons.items():
            misses.labels(reason=reason.value).inc(n)
        # Only what was asked for just now: remembering a remembered miss again would prolong it for ever.
        if set(result.reasons) == {MissReason.MISS}:
            missing = np.flatnonzero(result.statuses == 0)
            self._producers.negative.add_misses(take_keys(keys, missing), self._clock())
