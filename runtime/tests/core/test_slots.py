from __future__ import annotations

import numpy as np
import pytest
from kvpeer.core import extents as extents_module
from kvpeer.core.slot_effects import NoRoom, PageShape, Reservation, ReserveStatus, TouchExtent
from kvpeer.core.slots import ALL_PARTS, PINS_PER_HOLDER_MAX, SlotSettings, SlotTable
from kvpeer.model import CapacityError
from oracles.slot_model import EffectModel, keys_of, partitions_of

PAGE = PageShape(page_bytes=4096, n_parts=1, cohort=1)
EXTENT_BYTES = 8 * 4096
WRITE, PRESENT, NO_ROOM, BUSY = (int(status) for status in ReserveStatus)


class Pool:
    """A slot table with its effects performed at once."""

    def __init__(self, n_extents: int = 1, **settings: float) -> None:
        self.table = SlotTable(SlotSettings(EXTENT_BYTES, n_extents, **settings))
        self.model = EffectModel(EXTENT_BYTES)
        self.perform(self.table.start())

    def perform(self, effects: list) -> None:
        self.model.perform(effects)
        self.model.open_extents(self.table)
        self.table.check()
        stats = self.table.stats()
        assert stats.used_bytes + stats.free_bytes + stats.quarantined_bytes == stats.assigned_bytes

    def reserve(
        self, *numbers: int, now: float, writer: int = 1, part: int = 0, shape: PageShape = PAGE
    ) -> Reservation:
        keys = keys_of(*numbers)
        reservation, effects = self.table.reserve(writer, keys, partitions_of(keys), shape, part, now)
        self.perform(effects)
        return reservation

    def commit(self, reservation: Reservation, now: float, writer: int = 1, part: int = 0) -> list[bool]:
        mine = reservation.statuses == WRITE
        commitment, effects = self.table.commit(
            writer, reservation.slots[mine], reservation.generations[mine], part, now
        )
        self.perform(effects)
        return commitment.accepted.tolist()

    def publish(self, *numbers: int, now: float, shape: PageShape = PAGE) -> Reservation:
        reservation = self.reserve(*numbers, now=now, shape=shape)
        self.commit(reservation, now)
        return reservation

    def resident(self, *numbers: int, now: float) -> list[bool]:
        return self.table.find(keys_of(*numbers), now).resident.tolist()

    def tick(self, now: float) -> None:
        self.perform(self.table.tick(now))


def test_a_page_is_found_after_its_commit_and_not_before() -> None:
    pool = Pool()
    reservation = pool.reserve(1, 2, now=0)
    assert reservation.statuses.tolist() == [WRITE, WRITE]
    assert pool.resident(1, 2, now=0) == [False, False]
    assert pool.commit(reservation, now=0) == [True, True]
    assert pool.resident(1, 2, 3, now=0) == [True, True, False]
    assert pool.reserve(1, now=0).statuses.tolist() == [PRESENT]


def test_two_ranks_write_one_slot_and_the_last_part_publishes_it() -> None:
    pool = Pool()
    shape = PageShape(4096, n_parts=2, cohort=1)
    first = pool.reserve(1, now=0, writer=1, part=0, shape=shape)
    second = pool.reserve(1, now=0, writer=2, part=1, shape=shape)
    assert (first.slots[0], first.generations[0]) == (second.slots[0], second.generations[0])
    assert pool.commit(first, now=0, writer=1, part=0) == [True]
    assert pool.resident(1, now=0) == [False]
    assert pool.commit(second, now=0, writer=2, part=1) == [True]
    assert pool.resident(1, now=0) == [True]


def test_a_part_is_never_written_by_two_at_once() -> None:
    pool = Pool()
    pool.reserve(1, now=0, writer=1)
    assert pool.reserve(1, now=0, writer=2).statuses.tolist() == [BUSY]
    assert pool.reserve(1, now=0, writer=1).statuses.tolist() == [BUSY]
    assert pool.reserve(1, now=0, writer=3, part=ALL_PARTS).statuses.tolist() == [BUSY]


def test_a_commit_of_another_writer_or_generation_is_not_accepted() -> None:
    pool = Pool()
    reservation = pool.reserve(1, now=0, writer=1)
    assert pool.commit(reservation, now=0, writer=2) == [False]
    wrong, _ = pool.table.commit(1, reservation.slots, reservation.generations + 1, 0, 0)
    assert wrong.accepted.tolist() == [False]
    assert pool.commit(reservation, now=0, writer=1) == [True]
    assert pool.commit(reservation, now=0, writer=1) == [False]


def test_the_least_recently_used_page_goes_first_and_its_slot_rests_for_the_lease_time() -> None:
    pool = Pool()
    pages = pool.publish(*range(8), now=0)
    pool.tick(1)
    pool.table.use(pages.slots[1:2], pages.generations[1:2], 1)
    pool.table.find(keys_of(2), 1)
    refused = pool.reserve(8, now=2)
    assert refused.statuses.tolist() == [NO_ROOM]
    assert refused.no_room is NoRoom.QUARANTINED
    assert pool.reserve(8, now=2.049).no_room is NoRoom.QUARANTINED
    pool.publish(8, now=2.051)
    survivors = [number for number in range(9) if pool.resident(number, now=3) == [True]]
    assert {1, 2, 8} <= set(survivors)
    assert 0 not in survivors


def test_offering_a_page_that_is_here_is_a_use() -> None:
    pool = Pool()
    pool.publish(*range(8), now=0)
    assert pool.reserve(0, 1, now=1).statuses.tolist() == [PRESENT, PRESENT]
    assert pool.reserve(8, now=2).statuses.tolist() == [NO_ROOM]
    pool.publish(8, now=2.1)
    assert pool.resident(0, 1, now=3) == [True, True]


def test_a_pinned_page_is_never_evicted_until_its_pin_ends() -> None:
    pool = Pool(pin_ttl_s=5)
    pool.publish(*range(8), now=0)
    pin = pool.table.pin(7, keys_of(*range(8)), 1)
    assert pin.resident.all()
    assert pool.reserve(8, now=1.5).no_room is NoRoom.PINNED
    pool.perform(pool.table.release(8, pin.pin, 2))
    assert pool.reserve(8, now=2).no_room is NoRoom.PINNED, "another client's pin was released"
    assert pool.reserve(8, now=6.1).no_room is NoRoom.QUARANTINED
    assert pool.reserve(8, now=6.2).statuses.tolist() == [WRITE]


def test_a_client_has_a_bounded_number_of_pins_and_no_other_client_feels_it() -> None:
    pool = Pool(pin_ttl_s=5)
    pool.publish(0, 1, now=0)
    pins = [pool.table.pin(7, keys_of(0), 1).pin for _ in range(PINS_PER_HOLDER_MAX)]
    with pytest.raises(CapacityError, match="not released"):
        pool.table.pin(7, keys_of(1), 1)
    assert pool.table.pin(8, keys_of(1), 1).pin
    pool.perform(pool.table.release(7, pins[0], 1))
    assert pool.table.pin(7, keys_of(1), 1).pin
    pool.perform(pool.table.tick(6.1))
    assert pool.table.pin(7, keys_of(1), 6.1).pin, "pins that expired count no more"
    pool.perform(pool.table.gone(7, 6.2))
    assert pool.table.stats().n_pins == 0


def test_a_clients_end_releases_its_pins() -> None:
    pool = Pool()
    pool.publish(*range(8), now=0)
    pool.table.pin(7, keys_of(*range(8)), 1)
    pool.perform(pool.table.gone(7, 1))
    assert pool.reserve(8, now=1).no_room is NoRoom.QUARANTINED


def test_an_expired_reservation_is_not_reused_before_its_writer_speaks() -> None:
    pool = Pool(reserve_deadline_s=1)
    late = pool.reserve(*range(8), now=0)
    pool.tick(100)
    assert pool.reserve(20, now=100, writer=2).no_room is NoRoom.PINNED
    assert pool.commit(late, now=100) == [False] * 8
    again = pool.reserve(20, now=100, writer=2)
    assert again.statuses.tolist() == [WRITE]
    assert again.generations[0] > late.generations[late.slots.tolist().index(again.slots[0])]


def test_abandoned_slots_can_be_used_at_once() -> None:
    pool = Pool()
    given_up = pool.reserve(*range(8), now=0)
    pool.perform(pool.table.abandon(1, given_up.slots, given_up.generations, 0))
    assert pool.reserve(*range(8, 16), now=0).statuses.tolist() == [WRITE] * 8


def test_a_dead_writers_slots_rest_for_the_grace() -> None:
    pool = Pool(death_grace_s=2)
    pool.reserve(*range(8), now=0)
    pool.perform(pool.table.gone(1, 1))
    assert pool.reserve(20, now=2.9, writer=2).statuses.tolist() == [NO_ROOM]
    assert pool.reserve(20, now=3.1, writer=2).statuses.tolist() == [WRITE]


def test_a_dead_writers_slots_rest_for_the_grace_even_when_the_reservation_had_expired() -> None:
    pool = Pool(death_grace_s=2, reserve_deadline_s=1)
    pool.reserve(*range(8), now=0)
    pool.tick(10)
    pool.perform(pool.table.gone(1, 10))
    assert pool.reserve(20, now=11.9, writer=2).statuses.tolist() == [NO_ROOM]
    assert pool.reserve(20, now=12.1, writer=2).statuses.tolist() == [WRITE]


def test_an_extent_with_a_corrupt_slot_at_rest_is_not_taken_over() -> None:
    pool = Pool(n_extents=2)
    large = PageShape(16384, 1, cohort=2)
    first = pool.publish(*range(8), now=0)
    pool.publish(*range(10, 18), now=1)
    pool.perform(pool.table.quarantine(first.slots[7:], first.generations[7:], 2))
    pool.reserve(100, now=3, shape=large)
    assert pool.reserve(100, now=3.1, shape=large).statuses.tolist() == [WRITE], "the other extent was there to take"


def test_asking_again_for_room_that_is_on_its_way_evicts_nothing_more() -> None:
    pool = Pool()
    pool.publish(*range(8), now=0)
    for step in range(4):
        assert pool.reserve(20, 21, now=1 + step / 1000).no_room is NoRoom.QUARANTINED
    assert pool.table.stats().n_evicted == 2


def test_a_page_with_a_dead_and_a_living_writer_waits_for_both() -> None:
    pool = Pool(death_grace_s=2)
    shape = PageShape(4096, n_parts=2, cohort=1)
    pool.reserve(*range(8), now=0, writer=1, part=0, shape=shape)
    living = pool.reserve(*range(8), now=0, writer=2, part=1, shape=shape)
    pool.perform(pool.table.gone(1, 0))
    assert pool.reserve(20, now=50, writer=3, shape=shape).no_room is NoRoom.PINNED
    assert pool.commit(living, now=50, writer=2, part=1) == [False] * 8
    assert pool.reserve(20, now=50, writer=3, shape=shape).statuses.tolist() == [WRITE]


def test_corrupt_slots_rest_longer_and_do_not_stop_eviction() -> None:
    pool = Pool(corrupt_hold_s=60)
    pages = pool.publish(*range(8), now=0)
    pool.perform(pool.table.quarantine(pages.slots[:4], pages.generations[:4], 1))
    assert pool.resident(*range(8), now=1)[:4] == [False] * 4
    pool.reserve(20, 21, now=1)
    again = pool.reserve(20, 21, now=1.1)
    assert again.statuses.tolist() == [WRITE, WRITE]
    assert not set(again.slots.tolist()) & set(pages.slots[:4].tolist())
    assert pool.table.stats().n_corrupt == 4


def test_a_slot_that_is_found_corrupt_again_and_again_rests_ten_times_longer_each_time() -> None:
    pool = Pool(corrupt_hold_s=60)
    only_slot = PageShape(EXTENT_BYTES, n_parts=1, cohort=1)
    now, rests = 0.0, []
    for number in range(5):
        pages = pool.publish(number, now=now, shape=only_slot)
        assert pages.statuses.tolist() == [WRITE]
        pool.perform(pool.table.quarantine(pages.slots, pages.generations, now))
        rests.append(pool.table.next_wakeup() - now)
        now += rests[-1]
    assert rests == pytest.approx([60, 600, 6000, 60000, 60000])
    assert pool.table.stats().n_corrupt == 5


def test_only_a_page_that_can_be_read_there_is_held() -> None:
    pool = Pool()
    pages = pool.publish(1, 2, now=0)
    (slot, other), generation = pages.slots.tolist(), int(pages.generations[0])
    pool.reserve(3, now=0)
    assert pool.table.holds(keys_of(1), slot, generation)
    assert not pool.table.holds(keys_of(2), slot, generation)
    assert not pool.table.holds(keys_of(1), other, generation)
    assert not pool.table.holds(keys_of(1), slot, generation + 1)
    assert not pool.table.holds(keys_of(3), slot, generation)
    pool.perform(pool.table.quarantine(pages.slots[:1], pages.generations[:1], 1))
    assert not pool.table.holds(keys_of(1), slot, generation)


def test_a_reader_that_found_a_slot_corrupt_takes_only_its_own_pages_out() -> None:
    pool = Pool()
    pages = pool.publish(1, 2, 3, now=0)
    pin = pool.table.pin(7, keys_of(1, 2), 1).pin
    pool.perform(pool.table.release(7, pin, 1, corrupt={int(pages.slots[1]), int(pages.slots[2])}))
    assert pool.resident(1, 2, 3, now=1) == [True, False, True]


def test_a_pulled_page_is_written_whole_by_one_writer() -> None:
    pool = Pool()
    shape = PageShape(4096, n_parts=4, cohort=1)
    pulled = pool.reserve(1, now=0, writer=9, part=ALL_PARTS, shape=shape)
    assert pool.reserve(1, now=0, writer=2, part=3, shape=shape).statuses.tolist() == [BUSY]
    assert pool.commit(pulled, now=0, writer=9, part=ALL_PARTS) == [True]
    assert pool.resident(1, now=0) == [True]


def test_withdrawing_a_cohort_takes_its_pages_and_no_others() -> None:
    pool = Pool()
    other = PageShape(4096, 1, cohort=2)
    pool.publish(1, 2, now=0)
    pool.publish(3, now=0, shape=other)
    writing = pool.reserve(4, now=0)
    pool.perform(pool.table.withdraw_cohort(1, 0))
    assert pool.resident(1, 2, 3, now=0) == [False, False, True]
    assert pool.commit(writing, now=0) == [False]
    assert pool.table.n_pages_by_cohort() == {2: 1}


def test_another_page_size_takes_over_an_extent_when_it_has_none() -> None:
    pool = Pool(n_extents=2)
    pool.publish(*range(8), now=0)
    pool.publish(*range(10, 18), now=1)
    large = PageShape(16384, 1, cohort=2)
    assert pool.reserve(100, now=2, shape=large).no_room is NoRoom.QUARANTINED
    assert pool.reserve(100, now=2.1, shape=large).statuses.tolist() == [WRITE]
    assert not any(pool.resident(*range(8), now=3)), "the colder extent had to go"
    assert any(pool.resident(*range(10, 18), now=3))


def test_an_extent_with_a_pinned_page_is_never_taken_over() -> None:
    pool = Pool()
    pool.publish(*range(8), now=0)
    pool.table.pin(7, keys_of(3), 1)
    large = PageShape(16384, 1, cohort=2)
    assert pool.reserve(100, now=2, shape=large).no_room is NoRoom.PINNED
    assert pool.resident(3, now=2) == [True]


def test_a_colder_extent_of_another_size_goes_before_a_warm_page_of_the_own() -> None:
    pool = Pool(n_extents=2)
    large = PageShape(16384, 1, cohort=2)
    pool.publish(100, 101, now=0, shape=large)
    pool.publish(*range(8), now=5)
    pool.reserve(20, now=6)
    assert pool.resident(100, 101, now=6) == [False, False]
    assert all(pool.resident(*range(8), now=6))
    assert pool.reserve(20, now=6.1).statuses.tolist() == [WRITE]


def test_refusals_name_their_reason() -> None:
    pool = Pool()
    assert pool.reserve(1, now=0, shape=PageShape(EXTENT_BYTES + 1, 1, 1)).no_room is NoRoom.PAGE_TOO_LARGE
    table = SlotTable(SlotSettings(EXTENT_BYTES, 1))
    assert table.start() == [TouchExtent(0)]
    early, _ = table.reserve(1, keys_of(1), partitions_of(keys_of(1)), PAGE, 0, 0)
    assert early.no_room is NoRoom.OPENING
    table.extent_refused(0)
    refused, effects = table.reserve(1, keys_of(1), partitions_of(keys_of(1)), PAGE, 0, 0)
    assert refused.no_room is NoRoom.PINNED
    assert effects == []
    assert table.allow_growth() == [TouchExtent(0)]


def test_size_classes_are_limited_and_empty_ones_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents_module, "SIZE_CLASSES_MAX", 2)
    pool = Pool(n_extents=2)
    pool.publish(1, now=0)
    pool.publish(2, now=0, shape=PageShape(8192, 1, 2))
    third = PageShape(12288, 1, 3)
    assert pool.reserve(3, now=0, shape=third).no_room is NoRoom.SIZE_CLASSES_FULL
    pool.perform(pool.table.withdraw_cohort(2, 1))
    pool.tick(2)
    for number in range(20, 60):
        pool.publish(number, now=3 + number)
    assert pool.reserve(3, now=100, shape=third).no_room is not NoRoom.SIZE_CLASSES_FULL


def test_generations_wrap_past_zero() -> None:
    pool = Pool(lease_ttl_s=0)
    pool.publish(1, now=0)
    extent = pool.table._extents.opened[0]
    for idx in range(extent.n_slots):
        extent.generations[idx] = extents_module.GENERATION_MAX
    pool.model.generations.clear()
    assert pool.publish(2, now=1).generations.tolist() == [1]


def test_the_next_wakeup_is_the_earliest_thing_that_expires() -> None:
    pool = Pool(reserve_deadline_s=10, pin_ttl_s=3)
    assert pool.table.next_wakeup() is None
    pool.publish(1, now=0)
    pool.reserve(2, now=1)
    assert pool.table.next_wakeup() == 11
    pool.table.pin(1, keys_of(1), 2)
    assert pool.table.next_wakeup() == 5
    pool.perform(pool.table.withdraw_cohort(1, 3))
    assert pool.table.next_wakeup() == 5, "a pinned page's quarantine does not end before its pin"


def test_keys_twice_in_one_batch_get_one_slot() -> None:
    pool = Pool()
    assert pool.reserve(1, 1, now=0).statuses.tolist() == [WRITE, BUSY]
    columns = np.zeros(0, dtype=np.uint32)
    assert pool.table.abandon(1, columns, columns, 0) == []
