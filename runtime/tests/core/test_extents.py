"""Extents and size classes against a model that counts by hand."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvpeer.core.eviction import LeastRecentlyUsed
from kvpeer.core.extents import GENERATION_MAX, SIZE_CLASSES_MAX, SLOT_ALIGNMENT_BYTES, SLOTS_PER_EXTENT, Extents
from kvpeer.core.resident import EffectBatch
from kvpeer.core.slot_effects import AssignExtent, TouchExtent
from kvpeer.model import InternalError

EXTENT_BYTES = 64 << 10
N_EXTENTS = 5
PAGE_BYTES = [4096, 12_000, 30_000]


class ExtentsMachine(RuleBasedStateMachine):
    """The model: which extent has which slot size, which slots are taken, how often each was."""

    def __init__(self) -> None:
        super().__init__()
        self.effects = EffectBatch()
        self.extents = Extents(N_EXTENTS, EXTENT_BYTES, LeastRecentlyUsed, self.effects)
        self.touching: set[int] = set()
        self.sizes: dict[int, int] = {}
        self.taken: set[int] = set()
        self.uses: dict[int, int] = {}
        self.successors: dict[int, int] = {}

    def perform(self) -> None:
        for effect in self.effects.drain():
            if isinstance(effect, TouchExtent):
                assert effect.extent not in self.touching | self.sizes.keys()
                self.touching.add(effect.extent)
            else:
                assert isinstance(effect, AssignExtent)
                assert not [slot for slot in self.taken if slot // SLOTS_PER_EXTENT == effect.extent]
                assert self.successors.pop(effect.extent, effect.slot_bytes) == effect.slot_bytes
                self.sizes[effect.extent] = effect.slot_bytes

    @initialize(n=st.integers(0, 3), page_bytes=st.sampled_from(PAGE_BYTES))
    def begin(self, n: int, page_bytes: int) -> None:
        """With some extents of a class, so that the rest is about how they change hands."""
        self.open_ahead(n)
        while self.touching:
            self.opening_ends(True)
            self.assign_spare(page_bytes)

    @rule(n=st.integers(0, 3))
    def open_ahead(self, n: int) -> None:
        waiting = len(self.touching) + len(self.extents.spare)
        left = len(self.extents.unopened)
        self.extents.open_ahead(n)
        self.perform()
        expected = max(waiting, min(n, waiting + left)) if self.extents.may_grow else waiting
        assert len(self.touching) + len(self.extents.spare) == expected

    @precondition(lambda self: self.touching)
    @rule(is_opened=st.booleans())
    def opening_ends(self, is_opened: bool) -> None:
        extent = min(self.touching)
        self.touching.remove(extent)
        if is_opened:
            self.extents.opened_extent(extent)
        else:
            self.extents.refused_extent(extent)
            assert not self.extents.may_grow
            self.extents.open_ahead(N_EXTENTS)
            assert self.effects.drain() == []
            self.extents.may_grow = True

    @rule(page_bytes=st.sampled_from(PAGE_BYTES))
    def assign_spare(self, page_bytes: int) -> None:
        size_class = self.extents.size_class(page_bytes)
        assert size_class is not None
        had_spare = bool(self.extents.spare)
        assert self.extents.assign_spare(size_class) == had_spare
        self.perform()

    @rule(page_bytes=st.sampled_from(PAGE_BYTES))
    def take(self, page_bytes: int) -> None:
        size_class = self.extents.size_class(page_bytes)
        assert size_class is not None
        free = self.free_slots(size_class.slot_bytes)
        got = self.extents.take(size_class)
        assert (got is not None) == bool(free)
        if got is not None:
            slot, generation = got
            assert slot in free
            self.uses[slot] = self.uses.get(slot, 0) + 1
            assert generation == self.uses[slot]
            self.taken.add(slot)

    @precondition(lambda self: self.taken)
    @rule(choice=st.randoms(use_true_random=False))
    def put_back(self, choice: object) -> None:
        slot = choice.choice(sorted(self.taken))  # type: ignore[attr-defined]
        self.taken.remove(slot)
        self.extents.put_back(slot)
        self.perform()

    @rule(choice=st.randoms(use_true_random=False), page_bytes=st.sampled_from(PAGE_BYTES))
    def retire(self, choice: object, page_bytes: int) -> None:
        successor = self.extents.size_class(page_bytes)
        assert successor is not None
        candidates = [extent for extent in self.extents.opened.values() if extent.is_assigned_to_other(successor)]
        assert {extent.number for extent in candidates} == {
            number
            for number, slot_bytes in self.sizes.items()
            if number not in self.successors and slot_bytes != successor.slot_bytes
        }
        if candidates:
            extent = choice.choice(candidates)  # type: ignore[attr-defined]
            self.successors[extent.number] = successor.slot_bytes
            self.extents.retire(extent, successor)
            self.perform()

    def slots_of(self, extent: int) -> list[int]:
        first = extent * SLOTS_PER_EXTENT
        return list(range(first, first + EXTENT_BYTES // self.sizes[extent]))

    def free_slots(self, slot_bytes: int) -> set[int]:
        extents = [e for e, size in self.sizes.items() if size == slot_bytes and e not in self.successors]
        return {slot for extent in extents for slot in self.slots_of(extent)} - self.taken

    @invariant()
    def the_books_are_those_of_the_model(self) -> None:
        self.extents.check()
        for slot_bytes, size_class in self.extents.classes.items():
            assert set(size_class.free) == self.free_slots(slot_bytes)
            assert size_class.n_incoming == sum(size == slot_bytes for size in self.successors.values())
            staying = [e for e, size in self.sizes.items() if size == slot_bytes and e not in self.successors]
            assert size_class.n_slots == sum(len(self.slots_of(extent)) for extent in staying)
        for number, extent in self.extents.opened.items():
            assert extent.n_busy == sum(slot // SLOTS_PER_EXTENT == number for slot in self.taken)
            assert extent.slot_bytes == self.sizes.get(number, 0)

    @invariant()
    def no_two_slots_share_a_byte(self) -> None:
        places = sorted((self.extents.offset(slot), slot) for slot in self.taken)
        ends = [offset + self.sizes[slot // SLOTS_PER_EXTENT] for offset, slot in places]
        assert all(end <= offset for end, (offset, _) in zip(ends, places[1:], strict=False))
        for offset, slot in places:
            assert offset // EXTENT_BYTES == slot // SLOTS_PER_EXTENT
            assert (offset + self.sizes[slot // SLOTS_PER_EXTENT] - 1) // EXTENT_BYTES == slot // SLOTS_PER_EXTENT


TestExtents = ExtentsMachine.TestCase
TestExtents.settings = settings(max_examples=min(60, settings().max_examples), stateful_step_count=40)


def one_extent(extent_bytes: int = EXTENT_BYTES) -> Extents:
    extents = Extents(1, extent_bytes, LeastRecentlyUsed, EffectBatch())
    extents.open_ahead(1)
    extents.opened_extent(0)
    return extents


def test_after_the_last_generation_comes_one_because_zero_means_never_used() -> None:
    extents = one_extent()
    size_class = extents.size_class(EXTENT_BYTES)
    assert size_class is not None
    extents.assign_spare(size_class)
    extents.opened[0].generations[0] = GENERATION_MAX - 1
    generations = []
    for _ in range(3):
        taken = extents.take(size_class)
        assert taken is not None
        generations.append(taken[1])
        extents.put_back(taken[0])
    assert generations == [GENERATION_MAX, 1, 2]


@pytest.mark.parametrize(
    ("page_bytes", "extent_bytes", "slot_bytes"),
    [
        (1, EXTENT_BYTES, SLOT_ALIGNMENT_BYTES),
        (4096, EXTENT_BYTES, 4096),
        (4097, EXTENT_BYTES, 8192),
        (4096, 1 << 30, 65536),
    ],
    ids=["a byte", "exact", "a byte more", "as many as slot ids can number"],
)
def test_slot_sizes_are_whole_memory_pages_and_can_be_numbered(
    page_bytes: int, extent_bytes: int, slot_bytes: int
) -> None:
    assert one_extent(extent_bytes).slot_bytes(page_bytes) == slot_bytes


def test_a_class_without_extents_gives_its_place_to_another_only_when_places_run_out() -> None:
    extents = one_extent()
    classes = [extents.size_class(number * 4096) for number in range(1, SIZE_CLASSES_MAX + 1)]
    first = classes[0]
    assert first is not None
    assert extents.size_class(4096) is first
    extents.assign_spare(first)
    assert extents.size_class(17 * 4096) is not None, "fifteen of them hold nothing"
    assert extents.size_class(4096) is first
    assert len(extents.classes) == 2


def test_a_class_that_an_extent_is_on_its_way_to_is_not_forgotten() -> None:
    extents = one_extent()
    first, second = extents.size_class(4096), extents.size_class(8192)
    assert first is not None
    assert second is not None
    extents.assign_spare(first)
    taken = extents.take(first)
    assert taken is not None
    extents.retire(extents.opened[0], second)
    for number in range(3, SIZE_CLASSES_MAX + 3):
        extents.size_class(number * 4096)
    assert extents.size_class(8192) is second
    extents.put_back(taken[0])
    assert extents.take(second) is not None


def test_a_slot_of_no_class_is_a_broken_invariant() -> None:
    with pytest.raises(InternalError, match="slot 3 is in an extent of no class"):
        one_extent().class_of(3)
