"""The pool of one simulated agent: the real slot table, performed on modelled memory.

Mirrors `agent/pool.py`: effects in order, part tables until the last part is in, reservations that wait a little for
room, extents opened elsewhere, one timer for all that expires.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpeer.core.chain import take_keys
from kvpeer.core.slot_effects import (
    AssignExtent,
    Effect,
    Found,
    MarkCommitted,
    MarkWithdrawn,
    MarkWriting,
    NoRoom,
    PageShape,
    Published,
    Reservation,
    ReserveStatus,
    TouchExtent,
    Withdrawn,
)
from kvpeer.core.slots import ALL_PARTS, SlotSettings, SlotTable
from kvpeer.model import KEY_BYTES, AgentId
from kvpeer.sim.kernel import Process
from kvpeer.sim.memory import Part, PoolMemory, SlotState

__all__ = ["PULL_WRITER", "Cohort", "Pool", "PoolHooks"]

EXTENT_BYTES = 64 << 10
PULL_WRITER = 0
ROOM_WAIT_S, ROOM_POLL_S = 0.5, 0.01
TICK_S_MIN = 0.01
GROWTH_RETRY_S = 1.0
"""Less than the agent's, so that a run sees a pool grow again."""
SETTINGS = SlotSettings(EXTENT_BYTES, 1, pin_ttl_s=3.0, reserve_deadline_s=2.0, corrupt_hold_s=5.0)
"""Shorter times than the defaults where a run would not see their end; the lease and the grace are the real ones."""


@dataclass(frozen=True, slots=True)
class Cohort:
    """Pages of one namespace: `part_bytes` long parts, one for each rank."""

    namespace: bytes
    shape: PageShape
    part_bytes: int


class PoolHooks(Protocol):
    """Who hears which pages can be read here."""

    def published(self, effect: Published) -> None: ...
    def withdrawn(self, effect: Withdrawn) -> None: ...


class Pool:
    """Slot table and memory of one agent. `is_short`: there is no memory for another extent now."""

    def __init__(self, run_id: AgentId, n_extents: int, process: Process, hooks: PoolHooks, rng: random.Random) -> None:
        settings = SlotSettings(
            EXTENT_BYTES, n_extents, SETTINGS.lease_ttl_s, SETTINGS.reserve_deadline_s, SETTINGS.pin_ttl_s,
            SETTINGS.death_grace_s, SETTINGS.corrupt_hold_s,
        )  # fmt: skip
        self.table = SlotTable(settings)
        self.memory = PoolMemory(run_id, n_extents, EXTENT_BYTES)
        self.is_short = False
        self._process = process
        self._hooks = hooks
        self._rng = rng
        self._part_tables: dict[int, list[Part | None]] = {}
        self._timer_at = float("inf")

    def start(self) -> None:
        self._perform(self.table.start())

    # ---- writing

    async def reserve(
        self, writer: int, keys: bytes, partitions: NDArray[np.uint16], cohort: Cohort, part: int, deadline: float
    ) -> Reservation:
        """As `PoolService.reserve` and `reserve_for_pull`."""
        gives_up_at = min(deadline, self._process.clock() + ROOM_WAIT_S)
        reservation = self._reserve(writer, keys, partitions, cohort, part)
        while (
            reservation.no_room in (NoRoom.OPENING, NoRoom.QUARANTINED)
            and self._process.clock() + ROOM_POLL_S < gives_up_at
        ):
            await self._process.sleep(ROOM_POLL_S)
            refused = np.flatnonzero(reservation.statuses == ReserveStatus.NO_ROOM)
            again = self._reserve(writer, take_keys(keys, refused), partitions[refused], cohort, part)
            for name in ("statuses", "slots", "generations", "offsets"):
                getattr(reservation, name)[refused] = getattr(again, name)
            reservation = Reservation(
                reservation.statuses, reservation.slots, reservation.generations, reservation.offsets, again.no_room
            )
        return reservation

    def commit(
        self,
        writer: int,
        cohort: Cohort,
        part: int,
        slots: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        checksums: NDArray[np.uint64],
    ) -> NDArray[np.bool_]:
        """Takes in one rank's part; True where it counts."""
        commitment, effects = self.table.commit(writer, slots, generations, part, self._process.clock())
        for idx in np.flatnonzero(commitment.accepted).tolist():
            table = self._part_tables.setdefault(int(slots[idx]), [None] * cohort.shape.n_parts)
            table[part] = Part(part * cohort.part_bytes, cohort.part_bytes, int(checksums[idx]))
        self._perform(effects)
        return commitment.accepted

    def commit_pulled(
        self, slots: NDArray[np.uint32], generations: NDArray[np.uint32], parts: list[tuple[Part, ...]]
    ) -> NDArray[np.bool_]:
        """Takes in whole pages that lie verified in these slots."""
        for slot, table in zip(slots.tolist(), parts, strict=True):
            self._part_tables[slot] = list(table)
        commitment, effects = self.table.commit(PULL_WRITER, slots, generations, ALL_PARTS, self._process.clock())
        self._perform(effects)
        for slot in slots[~commitment.accepted].tolist():
            self._part_tables.pop(slot, None)
        return commitment.accepted

    def abandon(self, writer: int, slots: NDArray[np.uint32], generations: NDArray[np.uint32]) -> None:
        self._perform(self.table.abandon(writer, slots, generations, self._process.clock()))

    # ---- reading and leaving

    def find(self, keys: bytes) -> Found:
        return self.table.find(keys, self._process.clock())

    def pin(self, holder: int, keys: bytes) -> Found:
        found = self.table.pin(holder, keys, self._process.clock())
        self._set_timer()
        return found

    def release(self, holder: int, pin: int, corrupt: frozenset[int] = frozenset()) -> None:
        self._perform(self.table.release(holder, pin, self._process.clock(), corrupt))

    def use(self, slots: NDArray[np.uint32], generations: NDArray[np.uint32]) -> None:
        self.table.use(slots, generations, self._process.clock())

    def gone(self, client: int) -> None:
        self._perform(self.table.gone(client, self._process.clock()))

    def reset(self, cohort: Cohort) -> None:
        self._perform(self.table.withdraw_cohort(cohort.shape.cohort, self._process.clock()))

    # ---- effects

    def _reserve(
        self, writer: int, keys: bytes, partitions: NDArray[np.uint16], cohort: Cohort, part: int
    ) -> Reservation:
        now = self._process.clock()
        reservation, effects = self.table.reserve(writer, keys, partitions, cohort.shape, part, now)
        self._perform(effects)
        return reservation

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, MarkWriting):
                self.memory.mark(effect.slots, effect.generations, SlotState.WRITING)
            elif isinstance(effect, MarkCommitted):
                self._mark_committed(effect)
            elif isinstance(effect, MarkWithdrawn):
                self.memory.mark(effect.slots, effect.generations, SlotState.WITHDRAWN)
                for slot in effect.slots.tolist():
                    self._part_tables.pop(slot, None)
            elif isinstance(effect, Published):
                self._hooks.published(effect)
            elif isinstance(effect, Withdrawn):
                self._hooks.withdrawn(effect)
            elif isinstance(effect, AssignExtent):
                self.memory.assign_extent(effect.extent, effect.slot_bytes)
            else:
                self._process.spawn(self._open(effect))
        self._set_timer()

    def _mark_committed(self, effect: MarkCommitted) -> None:
        for idx, (slot, generation) in enumerate(zip(effect.slots.tolist(), effect.generations.tolist(), strict=True)):
            parts = tuple(part for part in self._part_tables.pop(slot) if part is not None)
            self.memory.commit(slot, generation, effect.keys[idx * KEY_BYTES : (idx + 1) * KEY_BYTES], parts)

    async def _open(self, effect: TouchExtent) -> None:
        await self._process.sleep(0.005 + 0.02 * self._rng.random())
        if not self.is_short:
            self.table.extent_opened(effect.extent)
            return
        self.table.extent_refused(effect.extent)
        await self._process.sleep(GROWTH_RETRY_S)
        self._perform(self.table.allow_growth())

    # ---- time

    def _set_timer(self) -> None:
        wakeup = self.table.next_wakeup()
        if wakeup is None or self._timer_at <= wakeup + TICK_S_MIN:
            return
        at = self._timer_at = max(wakeup, self._process.clock() + TICK_S_MIN)

        def tick() -> None:
            if at == self._timer_at:
                self._timer_at = float("inf")
                self._perform(self.table.tick(self._process.clock()))

        self._process.call_at(at, tick)
