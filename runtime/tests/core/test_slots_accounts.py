"""What the slot table counts, when exactly things end, and what it tells of each key of a batch."""

from __future__ import annotations

import numpy as np
import pytest
from kvpeer.core.slot_effects import (
    MarkCommitted,
    NoRoom,
    PageShape,
    Published,
    Reservation,
    ReserveStatus,
    Withdrawn,
)
from kvpeer.core.slots import SlotSettings, SlotTable
from kvpeer.model import KEY_BYTES
from oracles.slot_model import EffectModel, keys_of, partitions_of

EXTENT_BYTES = 64 << 10
SLOTS = 4
ONE_PART = PageShape(EXTENT_BYTES // SLOTS, 1, 1)
TWO_PARTS = PageShape(EXTENT_BYTES // SLOTS, 2, 1)
WRITE, PRESENT, NO_ROOM, BUSY = (int(status) for status in ReserveStatus)
LEASE_S, RESERVE_S, PIN_S = 0.05, 10.0, 30.0


class Pool:
    """One extent of four slots, and its effects performed on the model."""

    def __init__(self) -> None:
        self.table = SlotTable(SlotSettings(EXTENT_BYTES, 1, LEASE_S, RESERVE_S, PIN_S, 1.0, 60.0))
        self.model = EffectModel(EXTENT_BYTES)
        self.model.perform(self.table.start())
        self.model.open_extents(self.table)

    def reserve(
        self, *numbers: int, now: float, writer: int = 1, part: int = 0, shape: PageShape = ONE_PART
    ) -> Reservation:
        keys = keys_of(*numbers)
        reservation, effects = self.table.reserve(writer, keys, partitions_of(keys), shape, part, now)
        self.model.perform(effects)
        self.table.check()
        return reservation

    def commit(self, reservation: Reservation, now: float, writer: int = 1, part: int = 0) -> list[bool]:
        """Commits what may be written; returns which pages are complete by that."""
        mine = reservation.statuses == WRITE
        slots, generations = reservation.slots[mine], reservation.generations[mine]
        commitment, effects = self.table.commit(writer, slots, generations, part, now)
        self.model.perform(effects)
        self.table.check()
        assert commitment.accepted.all()
        return commitment.complete.tolist()

    def publish(self, *numbers: int, now: float) -> Reservation:
        reservation = self.reserve(*numbers, now=now)
        assert all(self.commit(reservation, now))
        return reservation

    def tick(self, now: float) -> None:
        self.model.perform(self.table.tick(now))
        self.table.check()


def test_a_page_is_complete_with_its_last_part_and_not_before() -> None:
    pool = Pool()
    zero = pool.reserve(1, 2, now=0.0, shape=TWO_PARTS)
    one = pool.reserve(1, 2, now=0.0, writer=2, part=1, shape=TWO_PARTS)
    assert zero.slots.tolist() == one.slots.tolist()
    assert pool.commit(zero, 1.0) == [False, False]
    assert pool.commit(one, 1.0, writer=2, part=1) == [True, True]
    zero = pool.reserve(3, now=2.0, shape=TWO_PARTS)
    one = pool.reserve(3, now=2.0, writer=2, part=1, shape=TWO_PARTS)
    assert pool.commit(one, 3.0, writer=2, part=1) == [False], "in whatever order"
    assert pool.commit(zero, 3.0) == [True]


def test_a_part_has_one_writer_also_after_other_parts_were_joined() -> None:
    pool = Pool()
    pool.reserve(1, now=0.0, shape=TWO_PARTS)
    pool.reserve(1, now=0.0, writer=2, part=1, shape=TWO_PARTS)
    for writer, part in ((3, 0), (3, 1), (1, 1)):
        assert pool.reserve(1, now=0.0, writer=writer, part=part, shape=TWO_PARTS).statuses.tolist() == [BUSY]


def test_the_directory_hears_all_of_a_page_when_it_comes_and_when_it_goes() -> None:
    pool = Pool()
    keys = keys_of(1, 2)
    partitions = np.array([5, 4095], dtype=np.uint16)
    reservation, effects = pool.table.reserve(1, keys, partitions, PageShape(9999, 1, 3), 0, 0.0)
    pool.model.perform(effects)
    columns = reservation.slots, reservation.generations
    _, (marked, published) = pool.table.commit(1, *columns, 0, 1.0)
    assert isinstance(marked, MarkCommitted)
    assert isinstance(published, Published)
    assert (marked.keys, published.keys) == (keys, keys)
    assert published.partitions.tolist() == [5, 4095]
    assert published.lengths.tolist() == [9999, 9999]
    _, withdrawn = pool.table.withdraw_cohort(3, 2.0)
    assert isinstance(withdrawn, Withdrawn)
    assert (withdrawn.keys, withdrawn.partitions.tolist()) == (keys, [5, 4095])
    for told in (published, withdrawn):
        assert [told.slots.tolist(), told.generations.tolist()] == [column.tolist() for column in columns]
        assert (told.slots.dtype, told.generations.dtype) == (np.uint32, np.uint32)


def test_each_key_of_a_batch_has_its_own_answer_whatever_came_before_it() -> None:
    pool = Pool()
    pool.publish(1, 2, 3, 4, now=0.0)
    pin = pool.table.pin(9, keys_of(1, 2, 3, 4), 0.0)
    reservation = pool.reserve(5, 2, 6, 4, now=1.0)
    assert reservation.statuses.tolist() == [NO_ROOM, PRESENT, NO_ROOM, PRESENT]
    assert reservation.no_room is NoRoom.PINNED
    assert (reservation.slots.dtype, reservation.generations.dtype) == (np.uint32, np.uint32)
    assert (reservation.statuses.dtype, reservation.offsets.dtype) == (np.uint8, np.uint64)
    assert pin.pin > 0


def test_reservations_expire_at_their_deadline_and_are_counted() -> None:
    pool = Pool()
    pool.reserve(1, 2, now=0.0)
    pool.reserve(3, now=1.0)
    assert pool.table.next_wakeup() == RESERVE_S
    pool.tick(RESERVE_S - 0.001)
    assert (pool.table.stats().n_expired, pool.table.stats().n_writing) == (0, 3)
    pool.tick(RESERVE_S)
    assert (pool.table.stats().n_expired, pool.table.stats().n_writing) == (2, 1)
    pool.tick(RESERVE_S + 1.0)
    assert (pool.table.stats().n_expired, pool.table.stats().n_writing) == (3, 0)


def test_a_quarantine_ends_with_its_lease_and_wakes_the_owner() -> None:
    pool = Pool()
    pool.publish(1, 2, 3, 4, now=0.0)
    assert pool.table.next_wakeup() is None
    pool.model.perform(pool.table.withdraw_cohort(1, 1.0))
    assert pool.table.next_wakeup() == 1.0 + LEASE_S
    assert pool.table.stats().quarantined_bytes == EXTENT_BYTES
    assert pool.reserve(5, now=1.0 + LEASE_S / 2).no_room is NoRoom.QUARANTINED
    assert pool.reserve(5, now=1.0 + LEASE_S).statuses.tolist() == [WRITE]
    assert pool.table.stats().quarantined_bytes == 0


def test_after_the_leases_ended_a_full_pool_of_pins_says_so() -> None:
    """Slots that were on their way to free once are not waited for again."""
    pool = Pool()
    pool.publish(1, 2, 3, 4, now=0.0)
    pool.model.perform(pool.table.withdraw_cohort(1, 1.0))
    pool.tick(2.0)
    pool.publish(5, 6, 7, 8, now=2.0)
    pool.table.pin(9, keys_of(5, 6, 7, 8), 2.0)
    assert pool.reserve(1, now=3.0).no_room is NoRoom.PINNED


def test_a_page_is_held_until_its_last_pin_ends() -> None:
    pool = Pool()
    reservation = pool.publish(1, now=0.0)
    first = pool.table.pin(1, keys_of(1, 2), 1.0)
    second = pool.table.pin(2, keys_of(1), 2.0)
    assert (first.resident.tolist(), pool.table.stats().n_pins) == ([True, False], 2)
    pool.model.perform(pool.table.withdraw_cohort(1, 3.0))
    pool.model.perform(pool.table.release(1, first.pin, 4.0))
    pool.table.check()
    assert pool.table.next_wakeup() == 2.0 + PIN_S, "nothing is in quarantine yet"
    others = pool.reserve(2, 3, 4, 5, now=4.2)
    assert others.statuses.tolist() == [WRITE, WRITE, WRITE, NO_ROOM], "its slot is nobody else's"
    pool.model.perform(pool.table.release(1, second.pin, 4.5))
    assert pool.table.stats().n_pins == 1, "it is not the holder's"
    pool.model.perform(pool.table.release(2, second.pin, 5.0))
    assert pool.table.stats().n_pins == 0
    again = pool.reserve(5, now=6.0)
    assert again.statuses.tolist() == [WRITE]
    assert (again.slots.tolist(), again.generations.tolist()) == (reservation.slots.tolist(), [2])


def test_each_page_is_found_where_it_lies() -> None:
    pool = Pool()
    for number in (1, 2, 3):
        pool.model.perform(pool.table.withdraw_cohort(1, number * 1.0))
        pool.tick(number + 0.5)
        reservation = pool.publish(1, 2, 3, now=number + 0.6)
    found = pool.table.find(keys_of(3, 9, 2), 5.0)
    assert found.resident.tolist() == [True, False, True]
    for column, expected in ((found.slots, reservation.slots), (found.generations, reservation.generations)):
        assert column.tolist() == [expected[2], 0, expected[1]]
    assert found.offsets.tolist() == [reservation.offsets[2], 0, reservation.offsets[1]]
    assert len({*reservation.slots.tolist(), *reservation.generations.tolist()}) > 3, "no column stands for another"


def test_what_is_not_here_is_not_pinned() -> None:
    pool = Pool()
    found = pool.table.pin(1, keys_of(7), 0.0)
    assert (found.pin, found.resident.tolist(), found.slots.tolist()) == (0, [False], [0])
    assert pool.table.find(b"", 0.0).resident.tolist() == []
    assert (found.slots.dtype, found.generations.dtype, found.offsets.dtype) == (np.uint32, np.uint32, np.uint64)


def test_pins_end_at_their_deadline() -> None:
    pool = Pool()
    pool.publish(1, now=0.0)
    pool.table.pin(1, keys_of(1), 1.0)
    assert pool.table.next_wakeup() == 1.0 + PIN_S
    pool.tick(1.0 + PIN_S - 0.001)
    assert pool.table.stats().n_pins == 1
    pool.tick(1.0 + PIN_S)
    assert pool.table.stats().n_pins == 0


@pytest.mark.parametrize("how", ["find", "pin", "use"])
def test_whatever_was_used_last_is_evicted_last(how: str) -> None:
    pool = Pool()
    reservation = pool.publish(1, 2, 3, 4, now=0.0)
    if how == "use":
        pool.table.use(reservation.slots[:1], reservation.generations[:1], 1.0)
    elif how == "find":
        pool.table.find(keys_of(1), 1.0)
    else:
        pool.table.release(1, pool.table.pin(1, keys_of(1), 1.0).pin, 1.0)
    assert pool.reserve(5, now=2.0).no_room is NoRoom.QUARANTINED
    assert pool.reserve(5, now=2.0 + LEASE_S).statuses.tolist() == [WRITE]
    assert pool.table.find(keys_of(1, 2), 3.0).resident.tolist() == [True, False]


def test_a_full_pool_makes_room_for_what_is_asked_and_no_more() -> None:
    pool = Pool()
    pool.publish(1, 2, 3, 4, now=0.0)
    assert pool.reserve(5, 6, now=1.0).no_room is NoRoom.QUARANTINED
    assert pool.table.stats().n_evicted == 2
    assert pool.table.find(keys_of(1, 2, 3, 4), 1.0).resident.tolist() == [False, False, True, True]


def test_columns_of_different_lengths_are_a_mistake_of_the_caller() -> None:
    pool = Pool()
    reservation = pool.publish(1, 2, now=0.0)
    with pytest.raises(ValueError, match="argument 2"):
        pool.table.quarantine(reservation.slots, reservation.generations[:1], 1.0)


def test_stats_name_every_byte_of_the_pool() -> None:
    pool = Pool()
    assert pool.table.stats().spare_bytes == EXTENT_BYTES
    pool.publish(1, now=0.0)
    pool.reserve(2, now=0.0)
    stats = pool.table.stats()
    slot_bytes = ONE_PART.page_bytes
    assert (stats.used_bytes, stats.free_bytes, stats.quarantined_bytes) == (2 * slot_bytes, 2 * slot_bytes, 0)
    assert (stats.assigned_bytes, stats.spare_bytes, stats.unopened_bytes) == (EXTENT_BYTES, 0, 0)
    assert (stats.n_committed, stats.n_writing, stats.n_corrupt) == (1, 1, 0)
    assert len(keys_of(1)) == KEY_BYTES
