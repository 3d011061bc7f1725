"""Whatever is written, read, dropped and forgotten in whatever order: the places on the disk agree with a simple model.

The model: a dictionary of the pages that can be read, in the order of their use.
"""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from kvpeer.core.disk import SLOTS_PER_SEGMENT, DiskPage, DiskPages, PageFacts
from kvpeer.core.disk.segments import BLOCK_BYTES
from kvpeer.model import InternalError

SEGMENT_BYTES = 8 * BLOCK_BYTES
N_SEGMENTS = 3
SIZES = (BLOCK_BYTES, 3 * BLOCK_BYTES - 1)
NAMESPACES = (b"a" * 32, b"b" * 32)
KEYS = st.integers(0, 24).map(lambda n: n.to_bytes(16, "big"))


class Places(RuleBasedStateMachine):
    writing = Bundle("writing")

    def __init__(self) -> None:
        super().__init__()
        self.pages = DiskPages(N_SEGMENTS, SEGMENT_BYTES)
        self.model: OrderedDict[bytes, DiskPage] = OrderedDict()
        self.n_writing = 0

    def _take_gone(self) -> None:
        for page in self.pages.take_gone():
            assert self.model.pop(page.facts.key) is page, "what goes was there"
            assert not page.is_wanted

    @rule(target=writing, key=KEYS, length=st.sampled_from(SIZES), namespace=st.sampled_from(NAMESPACES))
    def begin(self, key: bytes, length: int, namespace: bytes) -> DiskPage | None:
        is_known = self.pages.is_known(key)
        before = list(self.model)
        page = self.pages.begin(PageFacts(key, 1, namespace, length, 1))
        assert not (is_known and page is not None), "no page is written twice"
        gone = self.pages.take_gone()
        if gone and not self.n_writing:
            assert before[0] in {each.facts.key for each in gone}, "the coldest page is among those that go"
        for gone_page in gone:
            assert self.model.pop(gone_page.facts.key) is gone_page
        if page is None and not is_known:
            assert self.n_writing, "only what is being written can be in the way"
        self.n_writing += page is not None
        return page

    @rule(page=consumes(writing))
    def stored(self, page: DiskPage | None) -> None:
        if page is not None:
            self.n_writing -= 1
            is_wanted = page.is_wanted
            assert self.pages.stored(page) == is_wanted
            if is_wanted:
                self.model[page.facts.key] = page

    @rule(page=consumes(writing))
    def failed(self, page: DiskPage | None) -> None:
        if page is not None:
            self.n_writing -= 1
            self.pages.failed(page)

    @rule(key=KEYS)
    def use(self, key: bytes) -> None:
        if key in self.model:
            self.pages.use(key)
            self.model.move_to_end(key)

    @rule(key=KEYS)
    def drop(self, key: bytes) -> None:
        page = self.pages.find(key)
        if page is not None:
            self.pages.drop(page)
            self.pages.drop(page)  # a second time is nothing
            self._take_gone()
            assert key not in self.model

    @rule(namespace=st.sampled_from(NAMESPACES))
    def forget(self, namespace: bytes) -> None:
        self.pages.forget(namespace)
        self._take_gone()
        assert not [page for page in self.model.values() if page.facts.namespace == namespace]

    @rule()
    def restart(self) -> None:
        """The same pages are found again where they were."""
        if self.n_writing:
            return
        slot_bytes_of = dict(self.pages.segments.slot_bytes_of)
        self.pages = DiskPages(N_SEGMENTS, SEGMENT_BYTES)
        self.pages.restore(slot_bytes_of, self.model.values())

    @invariant()
    def agree(self) -> None:
        self.pages.check()
        assert [page.facts.key for page in self.pages.all()] == list(self.model)
        assert self.pages.segments.assigned_bytes <= N_SEGMENTS * SEGMENT_BYTES
        for key, page in self.model.items():
            assert self.pages.find(key) is page


Places.TestCase.settings = settings(max_examples=60, stateful_step_count=50)
TestPlaces = Places.TestCase


def facts(number: int, length: int = BLOCK_BYTES) -> PageFacts:
    return PageFacts(number.to_bytes(16, "big"), 0, NAMESPACES[0], length, 1)


def written(pages: DiskPages, number: int, length: int = BLOCK_BYTES) -> DiskPage:
    page = pages.begin(facts(number, length))
    assert page is not None
    assert pages.stored(page)
    return page


def test_the_page_that_was_not_used_for_the_longest_time_goes_first() -> None:
    pages = DiskPages(1, SEGMENT_BYTES)  # four slots
    for number in range(4):
        written(pages, number)
    pages.use((0).to_bytes(16, "big"))
    written(pages, 4)
    assert [page.facts.key for page in pages.take_gone()] == [(1).to_bytes(16, "big")]
    assert pages.n_evicted == 1


def test_what_the_pool_still_has_is_passed_over_unless_it_is_everything() -> None:
    pages = DiskPages(1, SEGMENT_BYTES)  # four slots
    for number in range(4):
        written(pages, number)
    in_pool = {(0).to_bytes(16, "big"), (1).to_bytes(16, "big")}
    pages.is_in_use = in_pool.__contains__
    written(pages, 4)
    assert [page.facts.key for page in pages.take_gone()] == [(2).to_bytes(16, "big")]
    pages.is_in_use = lambda key: True
    written(pages, 5)
    assert len(pages.take_gone()) == 1


def test_another_size_gets_the_whole_segment_around_the_coldest_page() -> None:
    pages = DiskPages(2, SEGMENT_BYTES)
    small = [written(pages, number) for number in range(8)]
    large = written(pages, 8, 3 * BLOCK_BYTES)
    assert set(pages.take_gone()) == set(small[:4])
    assert pages.segments.slot_bytes_of[large.slot // SLOTS_PER_SEGMENT] == 4 * BLOCK_BYTES
    pages.check()


def test_what_is_being_written_is_in_nobodys_way_to_be_overwritten() -> None:
    pages = DiskPages(1, SEGMENT_BYTES)
    writing = [pages.begin(facts(number)) for number in range(4)]
    assert None not in writing
    assert pages.begin(facts(4)) is None
    assert pages.begin(facts(5, 3 * BLOCK_BYTES)) is None, "nor is its segment"


def test_a_page_larger_than_a_segment_is_not_taken() -> None:
    assert DiskPages(1, SEGMENT_BYTES).begin(facts(1, SEGMENT_BYTES)) is None


def test_a_segment_that_was_refused_is_left_out_until_there_may_be_room_again() -> None:
    pages = DiskPages(1, SEGMENT_BYTES)
    assert pages.begin(facts(1)) is not None
    pages.refuse_segment(0)
    assert not pages.is_known(facts(1).key)
    assert pages.begin(facts(1)) is None
    pages.segments.allow_growth()
    assert pages.begin(facts(1)) is not None


def test_slots_are_given_out_side_by_side_so_that_a_batch_is_one_write() -> None:
    pages = DiskPages(1, 16 * BLOCK_BYTES)
    assert [written(pages, number).slot for number in range(8)] == list(range(8))


def test_a_generation_is_never_0_and_differs_between_uses_of_a_slot() -> None:
    pages = DiskPages(1, 2 * BLOCK_BYTES)  # one slot
    seen = [written(pages, number).generation for number in range(5)]
    assert len(set(seen)) == 5
    assert DiskPage(facts(1), 0, 1 << 32).generation == 1


def test_no_more_pages_are_known_than_memory_was_meant_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpeer.core.disk.pages.PAGES_MAX", 3)
    pages = DiskPages(N_SEGMENTS, SEGMENT_BYTES)
    for number in range(4):
        written(pages, number)
    assert len(pages) == 3
    assert [page.facts.key for page in pages.take_gone()] == [(0).to_bytes(16, "big")]
    assert pages.n_evicted == 1


def test_a_segment_in_which_a_page_is_being_written_does_not_change_its_size() -> None:
    pages = DiskPages(2, SEGMENT_BYTES)
    small = [written(pages, number) for number in range(8)]
    pages.drop(small[0])
    assert pages.begin(facts(100)).slot == small[0].slot
    large = written(pages, 8, 3 * BLOCK_BYTES)
    assert large.slot // SLOTS_PER_SEGMENT == 1
    assert set(pages.take_gone()) == {small[0], *small[4:]}


def test_a_slot_lies_at_its_number_times_its_size_in_the_file_of_its_segment() -> None:
    segments = DiskPages(2, SEGMENT_BYTES).segments
    slots = [segments.take(4 * BLOCK_BYTES) for _ in range(4)]
    assert [segments.place(slot) for slot in slots] == [(0, 0), (0, 4 * BLOCK_BYTES), (1, 0), (1, 4 * BLOCK_BYTES)]
    assert segments.take(4 * BLOCK_BYTES) is None
    assert segments.slot_bytes(1) == 2 * BLOCK_BYTES
    assert segments.slot_bytes(BLOCK_BYTES + 1) == 3 * BLOCK_BYTES


@pytest.mark.parametrize("fault", ["slot", "segment", "count"])
def test_the_check_of_the_indices_finds_what_does_not_fit(fault: str) -> None:
    pages = DiskPages(1, SEGMENT_BYTES)
    first, second = written(pages, 1), written(pages, 2)
    if fault == "slot":
        second.slot = first.slot
    elif fault == "segment":
        pages._in_segment[0].discard(first)
    else:
        pages.segments.put_back(3)
    with pytest.raises(InternalError):
        pages.check()


def test_a_segment_with_used_slots_cannot_be_given_up() -> None:
    pages = DiskPages(1, SEGMENT_BYTES)
    written(pages, 1)
    with pytest.raises(InternalError, match="slots of it are in use"):
        pages.segments.release(0)
