"""Bringing pages from the own disk into the own pool: one read for all who want a page, verified first.

A page is read straight into a slot that was reserved for it, and committed there, with a new generation and a new
location. The read goes on when whoever wanted it gives up: others may wait for the same, and the slot cannot be given
back before the disk is done with it. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpeer.agent.pool import PoolService
from kvpeer.agent.tasks import escalate
from kvpeer.core.disk import DiskPage
from kvpeer.core.slot_effects import ReserveStatus
from kvpeer.metrics import Metrics
from kvpeer.model import KEY_BYTES, CapacityError, Outcome, RemoteProtocolError
from kvpeer.storage import DiskStore
from kvpeer.wire.messages import AgentInfo, PeerMessage, Promote, Promoted
from kvpeer.wire.packing import U1, U4, count, pack

__all__ = ["PROMOTE_PAGES_MAX", "Promotions"]

PAGES_MAX = 512
"""Pages being promoted at once: as many as the disk is let read. What comes on top is refused at once: it would wait
for longer than a recompute takes."""

PEERS_PAGES_MAX = 256
"""Of these, for readers in other pods: a rush of theirs leaves the own engine its half."""

PROMOTE_PAGES_MAX = 256
"""Keys of one Promote."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Promotion:
    """A page on its way up, and what all who want it wait for."""

    page: DiskPage
    outcome: asyncio.Future[Outcome]


class Promotions:
    """See the module docstring. `clock` is monotonic seconds."""

    def __init__(self, store: DiskStore, pool: PoolService, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._store = store
        self._pool = pool
        self._clock = clock
        self._promoted = metrics.counter("kvpeer_disk_promoted_pages_total")
        self._failures = metrics.counter("kvpeer_agent_task_failures_total")
        self._under_way: dict[bytes, _Promotion] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def promote(
        self, keys: Sequence[bytes], deadline: float, *, is_own: bool, namespace: bytes | None = None
    ) -> NDArray[np.uint8]:
        """The outcome of each page; a HIT is in the pool, or was a moment ago. Answers by `deadline`.

        `is_own`: asked by an engine of this pod. `namespace`: pages of another one are a MISS.
        """
        outcomes = np.full(len(keys), Outcome.MISS, dtype=np.uint8)
        waiting: dict[int, asyncio.Future[Outcome]] = {}
        fresh: list[_Promotion] = []
        for place, key in enumerate(keys):
            page = self._store.find(key)
            if self._pool.has(key):
                outcomes[place] = Outcome.HIT
            elif page is None or (namespace is not None and page.facts.namespace != namespace):
                continue
            elif key not in self._under_way and len(self._under_way) >= (PAGES_MAX if is_own else PEERS_PAGES_MAX):
                outcomes[place] = Outcome.REFUSED
            else:
                if key not in self._under_way:
                    self._under_way[key] = _Promotion(page, asyncio.get_running_loop().create_future())
                    fresh.append(self._under_way[key])
                waiting[place] = self._under_way[key].outcome
        self._begin(fresh, deadline)
        if waiting:
            await asyncio.wait(waiting.values(), timeout=max(0.0, deadline - self._clock()))
        for place, future in waiting.items():
            outcomes[place] = future.result() if future.done() else Outcome.TIMEOUT
        self._account(outcomes, "own" if is_own else "peer")
        return outcomes

    async def close(self, deadline_s: float) -> bool:
        """Waits for reads that run. False if one still does: the memory of the pool must stay."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=deadline_s)
        return not self._tasks

    # ---- what peers ask

    def handlers(self) -> Mapping[type, Callable[[AgentInfo, PeerMessage], Awaitable[PeerMessage | None]]]:
        """By message type: what readers ask."""
        return {Promote: self._answer}

    async def _answer(self, peer: AgentInfo, message: PeerMessage) -> PeerMessage:
        assert isinstance(message, Promote)  # noqa: S101 - what it is registered for
        n = count(message.keys, KEY_BYTES, "keys")
        if n > PROMOTE_PAGES_MAX:
            raise RemoteProtocolError(f"keys: {n} in one Promote, {PROMOTE_PAGES_MAX} are allowed")
        keys = [message.keys[at : at + KEY_BYTES] for at in range(0, len(message.keys), KEY_BYTES)]
        outcomes = await self.promote(keys, self._clock() + message.wait_ms / 1000, is_own=False)
        found = self._pool.find(message.keys)
        outcomes[(outcomes == Outcome.HIT) & ~found.resident] = Outcome.STALE  # evicted again by now
        return Promoted(pack(outcomes, U1), pack(found.slots, U4), pack(found.generations, U4))

    # ---- inside

    def _begin(self, fresh: list[_Promotion], deadline: float) -> None:
        """Pages of one shape are promoted together."""
        by_shape: dict[tuple[bytes, int, int], list[_Promotion]] = {}
        for each in fresh:
            facts = each.page.facts
            by_shape.setdefault((facts.namespace, facts.length, facts.n_parts), []).append(each)
        for shape, alike in by_shape.items():
            work = self._root(alike, self._promote_alike(shape, alike, deadline))
            task = asyncio.get_running_loop().create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _root(self, alike: list[_Promotion], work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except CapacityError as error:
            _log.debug("pages cannot be promoted: %s", error)
        except Exception as error:  # noqa: BLE001 - the root of this task
            self._failures.labels(task="promote").inc()
            _log.exception("a promotion failed")
            escalate(error)
        finally:
            for each in alike:
                self._settle(each, Outcome.REFUSED)

    async def _promote_alike(self, shape: tuple[bytes, int, int], alike: list[_Promotion], deadline: float) -> None:
        cohort = self._pool.adopt(*shape)
        if (cohort.shape.page_bytes, cohort.shape.n_parts) != shape[1:]:
            return  # what the disk says of these pages is not what their engines say
        keys = b"".join(each.page.facts.key for each in alike)
        partitions = np.array([each.page.facts.partition for each in alike], dtype=np.uint16)
        reservation = await self._pool.reserve_whole(cohort, keys, partitions, deadline)
        payload = self._pool.native.payload_address
        reads = []
        for idx, each in enumerate(alike):
            status = reservation.statuses[idx]
            if status == ReserveStatus.WRITE:
                slot = reservation.slots[idx : idx + 1], reservation.generations[idx : idx + 1]
                reads.append(self._read(each, slot, payload + int(reservation.offsets[idx])))
            elif status != ReserveStatus.NO_ROOM:
                self._settle(each, Outcome.HIT if status == ReserveStatus.PRESENT else Outcome.MISS)
        await asyncio.gather(*reads)

    async def _read(
        self, promotion: _Promotion, slot: tuple[NDArray[np.uint32], NDArray[np.uint32]], address: int
    ) -> None:
        """Reads one page into its slot, and commits it or gives the slot back."""
        try:
            read = await self._store.read(promotion.page, address)
        except Exception:
            self._pool.fail_pull(*slot)  # nothing writes there any more
            raise
        if read.parts is None:
            self._pool.fail_pull(*slot)
            self._settle(promotion, read.outcome)
            return
        (accepted,) = self._pool.commit_pulled(*slot, read.parts[None, :])
        self._settle(promotion, Outcome.HIT if accepted else Outcome.TIMEOUT)

    def _settle(self, promotion: _Promotion, outcome: Outcome) -> None:
        key = promotion.page.facts.key
        if self._under_way.get(key) is promotion:
            del self._under_way[key]
        if not promotion.outcome.done():
            promotion.outcome.set_result(outcome)

    def _account(self, outcomes: NDArray[np.uint8], reader: str) -> None:
        for outcome, n in zip(Outcome, np.bincount(outcomes, minlength=len(Outcome)), strict=True):
            self._promoted.labels(outcome=outcome.name.lower(), reader=reader).inc(int(n))
