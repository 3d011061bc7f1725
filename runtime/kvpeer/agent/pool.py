"""The agent's pool: the slot table's decisions, performed on the shared memory.

`PoolService` belongs to one event loop: every method is called there and none blocks it; memory is faulted in on a
thread. Each answer is given after its effects were performed, so whoever gets a slot finds its header in the state
that the answer says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from kvpeer.agent.cohorts import Cohort, Cohorts, CohortStatus
from kvpeer.agent.memory import available_bytes
from kvpeer.agent.peering import NO_LOWER_TIER, CommittedPages, Locator, LowerTier, NoPeers, PoolHooks, Puller
from kvpeer.core.chain import ChainSlice, take_keys
from kvpeer.core.slot_effects import (
    AssignExtent,
    Effect,
    Found,
    MarkCommitted,
    MarkWithdrawn,
    MarkWriting,
    NoRoom,
    Published,
    Reservation,
    ReserveStatus,
    SlotStats,
    TouchExtent,
    Withdrawn,
)
from kvpeer.core.slots import ALL_PARTS, SlotTable
from kvpeer.model import InternalError, KvPeerError
from kvpeer.native import PART_DTYPE, Pool
from kvpeer.wire.messages import ClientHello

__all__ = ["CohortStatus", "Locator", "NoPeers", "PoolHooks", "PoolService", "Puller"]

PULL_WRITER = 0
"""Writer number of the agent itself, for pages pulled from peers; clients count from 1."""

HEADROOM_BYTES = 256 << 20
"""Memory that growing leaves to everybody else in the container: the agent's own heap, the engine's next allocation."""

GROWTH_RETRY_S = 5.0
"""After growing was refused for lack of memory, it is tried again this much later: other processes' memory comes and
goes slowly."""

ROOM_WAIT_S = 0.5
"""A reservation waits at most this long for room that is on its way: ten leases, or the opening of an extent.
Publishing is off the engine's critical path, but its copy threads must not pile up; a pull has its own deadline too."""

ROOM_POLL_S = 0.01
"""How soon a waiting reservation looks again; a fifth of the default lease."""

TICK_S_MIN = 0.01
"""Expiries closer together than this are handled at once."""

_log = logging.getLogger(__name__)


class PoolService:
    """See the module docstring. `clock` is monotonic seconds; deadlines are absolute on it. `extent_opened` is told on
    the opener's thread of each extent that was faulted in."""

    def __init__(
        self,
        pool: Pool,
        table: SlotTable,
        clock: Callable[[], float],
        hooks: PoolHooks,
        memory_available: Callable[[], int | None] = available_bytes,
        lower: LowerTier = NO_LOWER_TIER,
        extent_opened: Callable[[int], None] = lambda extent: None,
    ) -> None:
        self.native = pool
        self._table = table
        self._clock = clock
        self._hooks = hooks
        self._memory_available = memory_available
        self._lower = lower
        self._extent_opened = extent_opened
        self._cohorts = Cohorts(table.settings.extent_bytes)
        self._part_tables: dict[int, NDArray[np.void]] = {}  # by slot: checksums of a page whose parts are not all in
        self._committed_parts: NDArray[np.void] = np.zeros((0, 1), dtype=PART_DTYPE)  # of the last pages marked so
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="kvpeer-extents")
        self._opening: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._is_closed = False

    # ---- life

    def start(self) -> None:
        """Begins to open the first extent; the pool can be used at once and has room soon."""
        self._perform(self._table.start())

    async def ready(self) -> None:
        """Returns when no extent is being opened any more."""
        while self._opening:
            await asyncio.wait(self._opening)

    async def close(self) -> None:
        """Stops the timer and waits for an extent that is being opened. The native pool stays the caller's."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        await self.ready()
        self._opener.shutdown()

    # ---- cohorts

    def join(self, hello: ClientHello) -> Cohort:
        """Takes in a client. Raises as `Cohorts.join`."""
        cohort, dropped = self._cohorts.join(hello)
        if dropped is not None:
            self._perform(self._table.withdraw_cohort(dropped.number, self._clock()))
        return cohort

    def leave(self, client: int, cohort: Cohort) -> None:
        """A client's socket closed: its pins end, and what it was writing leaves after a grace."""
        self._cohorts.leave(cohort)
        self._perform(self._table.gone(client, self._clock()))

    def adopt(self, namespace: bytes, page_bytes: int, n_parts: int) -> Cohort:
        """The cohort of pages that a lower tier holds, whether clients know of it or not. Raises as `Cohorts.adopt`."""
        cohort, dropped = self._cohorts.adopt(namespace, page_bytes, n_parts)
        if dropped is not None:
            self._perform(self._table.withdraw_cohort(dropped.number, self._clock()))
        return cohort

    async def reset(self, cohort: Cohort, reason: str, deadline: float) -> None:
        """Withdraws all pages of the cohort, here at once; returns when the lower tier has, or at the deadline."""
        _log.info("withdrawing all pages of namespace %s: %s", cohort.namespace.hex()[:16], reason)
        self._lower.forget(cohort.namespace)
        self._perform(self._table.withdraw_cohort(cohort.number, self._clock()))
        await self._lower.forgotten(cohort.namespace, deadline)

    def cohorts(self) -> list[CohortStatus]:
        """All namespaces known here. O(pages)."""
        return self._cohorts.statuses(self._table.n_pages_by_cohort())

    @property
    def n_cohorts(self) -> int:
        """Namespaces known here, as in `cohorts` but cheap."""
        return len(self._cohorts)

    def slot_bytes(self, cohort: Cohort) -> int:
        """What a page of the cohort takes in the pool."""
        return self._table.slot_bytes(cohort.shape.page_bytes)

    def stats(self) -> SlotStats:
        return self._table.stats()

    # ---- writing

    async def reserve(self, client: int, cohort: Cohort, part: int, chain: ChainSlice, deadline: float) -> Reservation:
        """Slots for the client's part of these pages. Waits a little for room that is on its way, never beyond the
        deadline."""
        return await self._reserve_soon(client, chain.keys, chain.partitions(), cohort, part, deadline)

    def commit(
        self,
        client: int,
        cohort: Cohort,
        part: int,
        slots: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        checksums: NDArray[np.uint64],
    ) -> NDArray[np.bool_]:
        """Takes in the client's part of these slots; True where it counts. Pages that are complete are published."""
        commitment, effects = self._table.commit(client, slots, generations, part, self._clock())
        offset, length = cohort.parts[part]
        for idx in np.flatnonzero(commitment.accepted).tolist():
            table = self._part_tables.get(int(slots[idx]))
            if table is None:
                table = self._part_tables[int(slots[idx])] = np.zeros(cohort.shape.n_parts, dtype=PART_DTYPE)
            table[part] = (offset, length, checksums[idx])
        self._perform(effects)
        return commitment.accepted

    def abandon(self, client: int, slots: NDArray[np.uint32], generations: NDArray[np.uint32]) -> None:
        """The client does not write into these slots and will not."""
        self._perform(self._table.abandon(client, slots, generations, self._clock()))

    # ---- pulling

    async def reserve_for_pull(
        self, cohort: Cohort, chain: ChainSlice, indices: NDArray[np.int64], deadline: float
    ) -> Reservation:
        """Slots for whole pages of peers, one entry a page of `indices`. Waits for room as `reserve`. PRESENT and BUSY
        need no pull: the page is here, or is being written by somebody else. What was given must be settled by
        `commit_pulled` or `fail_pull`, the latter only when nothing can write into the slot any more."""
        keys, partitions = take_keys(chain.keys, indices), chain.partitions()[indices]
        return await self.reserve_whole(cohort, keys, partitions, deadline)

    async def reserve_whole(
        self, cohort: Cohort, keys: bytes, partitions: NDArray[np.uint16], deadline: float
    ) -> Reservation:
        """As `reserve_for_pull`, for pages whose chain is not known."""
        return await self._reserve_soon(PULL_WRITER, keys, partitions, cohort, ALL_PARTS, deadline)

    def commit_pulled(
        self, slots: NDArray[np.uint32], generations: NDArray[np.uint32], parts: NDArray[np.void]
    ) -> NDArray[np.bool_]:
        """The pages lie verified in these slots; `parts` is their part table, PART_DTYPE [n, n_parts]. True where
        they are published: not where the reservation had expired."""
        for idx, slot in enumerate(slots.tolist()):
            self._part_tables[slot] = parts[idx]
        commitment, effects = self._table.commit(PULL_WRITER, slots, generations, ALL_PARTS, self._clock())
        self._perform(effects)
        for slot in slots[~commitment.accepted].tolist():
            self._part_tables.pop(slot, None)
        return commitment.accepted

    def fail_pull(self, slots: NDArray[np.uint32], generations: NDArray[np.uint32]) -> None:
        """The pages did not arrive, and nothing writes into the slots any more."""
        self._perform(self._table.abandon(PULL_WRITER, slots, generations, self._clock()))

    # ---- reading

    def find(self, keys: bytes) -> Found:
        """Which of these pages are here."""
        return self._table.find(keys, self._clock())

    def pin(self, client: int, keys: bytes) -> Found:
        """Which of these pages are here, kept for the client until `release` or the pin's expiry. Raises CapacityError
        as `SlotTable.pin`."""
        found = self._table.pin(client, keys, self._clock())
        self._set_timer()
        return found

    @property
    def pin_ttl_s(self) -> float:
        return self._table.settings.pin_ttl_s

    def release(self, client: int, pin: int, corrupt: frozenset[int] = frozenset()) -> None:
        """Ends a pin; pages in `corrupt` slots among its own are withdrawn and their slots kept out of use."""
        self._perform(self._table.release(client, pin, self._clock(), corrupt))

    def use(self, slots: NDArray[np.uint32], generations: NDArray[np.uint32]) -> None:
        """Remote readers used these slots."""
        self._table.use(slots, generations, self._clock())

    def address(self, slot: int) -> int:
        """Where the payload of a slot lies in this process."""
        return self.native.slot_address(slot)

    def has(self, key: bytes) -> bool:
        """Whether this page is here. No use of it."""
        return self._table.has(key)

    def holds(self, key: bytes, slot: int, generation: int) -> bool:
        """Whether this page can be read in this use of this slot."""
        return self._table.holds(key, slot, generation)

    def quarantine(self, slots: NDArray[np.uint32], generations: NDArray[np.uint32]) -> None:
        """These pages were found corrupt."""
        self._perform(self._table.quarantine(slots, generations, self._clock()))

    # ---- effects

    async def _reserve_soon(
        self, writer: int, keys: bytes, partitions: NDArray[np.uint16], cohort: Cohort, part: int, deadline: float
    ) -> Reservation:
        gives_up_at = min(deadline, self._clock() + ROOM_WAIT_S)
        reservation = self._reserve(writer, keys, partitions, cohort, part)
        while reservation.no_room in (NoRoom.OPENING, NoRoom.QUARANTINED) and self._clock() + ROOM_POLL_S < gives_up_at:
            await asyncio.sleep(ROOM_POLL_S)
            refused = np.flatnonzero(reservation.statuses == ReserveStatus.NO_ROOM)
            again = self._reserve(writer, take_keys(keys, refused), partitions[refused], cohort, part)
            reservation = _merged(reservation, refused, again)
        return reservation

    def _reserve(
        self, writer: int, keys: bytes, partitions: NDArray[np.uint16], cohort: Cohort, part: int
    ) -> Reservation:
        reservation, effects = self._table.reserve(writer, keys, partitions, cohort.shape, part, self._clock())
        self._perform(effects)
        return reservation

    def _perform(self, effects: list[Effect]) -> None:
        """Raises InternalError if an effect fails: the table has changed, and the pool has not."""
        with _no_way_back():
            for effect in effects:
                self._perform_one(effect)
        self._set_timer()

    def _perform_one(self, effect: Effect) -> None:
        if isinstance(effect, MarkWriting):
            self.native.mark_writing(effect.slots, effect.generations)
        elif isinstance(effect, MarkCommitted):
            self._mark_committed(effect)
        elif isinstance(effect, MarkWithdrawn):
            self.native.mark_withdrawn(effect.slots, effect.generations)
            for slot in effect.slots.tolist():
                self._part_tables.pop(slot, None)
        elif isinstance(effect, Published):
            self._hooks.published(effect.keys, effect.partitions, effect.slots, effect.generations, effect.lengths)
            self._pass_on(effect)
        elif isinstance(effect, Withdrawn):
            self._hooks.withdrawn(effect.keys, effect.partitions, effect.slots, effect.generations)
        elif isinstance(effect, AssignExtent):
            self.native.assign_extent(effect.extent, effect.slot_bytes)
        else:
            self._open(effect)

    def _mark_committed(self, effect: MarkCommitted) -> None:
        tables = [self._part_tables.pop(slot) for slot in effect.slots.tolist()]
        # Not np.stack: with records it works out the common type of all tables, which takes longer than all the rest.
        parts = np.empty((len(tables), len(tables[0])), dtype=PART_DTYPE)
        for row, table in zip(parts, tables, strict=True):
            row[:] = table
        keys = np.frombuffer(effect.keys, dtype=np.uint8)
        self.native.mark_committed(effect.slots, effect.generations, keys, parts)
        self._committed_parts = parts

    def _pass_on(self, effect: Published) -> None:
        cohort = self._cohorts.numbered(effect.cohort)
        if cohort is not None:
            self._lower.committed(
                CommittedPages(
                    cohort.namespace, cohort.shape.page_bytes, effect.keys, effect.partitions, effect.slots,
                    effect.generations, self._committed_parts,
                )
            )  # fmt: skip

    def _open(self, effect: TouchExtent) -> None:
        task = asyncio.get_running_loop().create_task(self._open_extent(effect.extent))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open_extent(self, extent: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            is_open = await loop.run_in_executor(self._opener, self._touch, extent)
        except KvPeerError:
            _log.exception("extent %d could not be opened: the pool does not grow for now", extent)
            is_open = False
        if is_open:
            self._table.extent_opened(extent)
            return
        self._table.extent_refused(extent)
        loop.call_later(GROWTH_RETRY_S, self._grow_again)

    def _touch(self, extent: int) -> bool:
        """On the opener's thread: faults the extent in, unless that would leave too little memory."""
        available = self._memory_available()
        if available is not None and available < self._table.settings.extent_bytes + HEADROOM_BYTES:
            _log.warning("the pool stops growing: %d MiB of memory are left", available >> 20)
            return False
        self.native.touch_extent(extent)
        self._extent_opened(extent)
        return True

    def _grow_again(self) -> None:
        if not self._is_closed:
            self._perform(self._table.allow_growth())

    # ---- time

    def _set_timer(self) -> None:
        wakeup = self._table.next_wakeup()
        if wakeup is None or self._is_closed:
            return
        if self._timer is not None:
            if self._timer_at <= wakeup + TICK_S_MIN:
                return
            self._timer.cancel()
        self._timer_at = max(wakeup, self._clock() + TICK_S_MIN)
        self._timer = asyncio.get_running_loop().call_later(self._timer_at - self._clock(), self._tick)

    def _tick(self) -> None:
        self._timer = None
        with _no_way_back():
            self._perform(self._table.tick(self._clock()))


@contextlib.contextmanager
def _no_way_back() -> Iterator[None]:
    """Turns every error into an InternalError, which stops the agent: half of a change was made."""
    try:
        yield
    except InternalError:
        raise
    except Exception as error:
        raise InternalError(f"the pool and its slot table disagree: {error!r}") from error


def _merged(first: Reservation, refused: NDArray[np.int64], again: Reservation) -> Reservation:
    for name in ("statuses", "slots", "generations", "offsets"):
        getattr(first, name)[refused] = getattr(again, name)
    return Reservation(first.statuses, first.slots, first.generations, first.offsets, again.no_room)
