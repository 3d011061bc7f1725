"""Reports of corrupt pages: bounded, in turns, each page once, and remembered against who was wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpeer.core import rechecks
from kvpeer.core.rechecks import CHECK_PAUSE_S_MIN, CHECK_SHARE, RIGHT_S, Rechecks, SlotPage
from kvpeer.model import AgentId

ALPHA, BETA, GAMMA = (AgentId(bytes([number]) * 16) for number in (1, 2, 3))


def page(number: int, generation: int = 1) -> SlotPage:
    return SlotPage(number.to_bytes(16, "big"), number, generation)


def pages(*numbers: int) -> list[SlotPage]:
    return [page(number) for number in numbers]


def take_all(waiting: Rechecks, is_right: bool = False, now: float = 0.0) -> list[tuple[AgentId, int]]:
    taken = []
    while (recheck := waiting.take()) is not None:
        waiting.checked(recheck, is_right=is_right, took_s=0.0, now=now)
        taken.append((recheck.reader, recheck.page.slot))
    return taken


def test_readers_take_turns():
    waiting = Rechecks()
    assert waiting.report(ALPHA, pages(1, 2, 3), 0.0) == 0
    assert waiting.report(BETA, pages(10), 0.0) == 0
    assert waiting.report(GAMMA, pages(20, 21), 0.0) == 0
    assert take_all(waiting) == [(ALPHA, 1), (BETA, 10), (GAMMA, 20), (ALPHA, 2), (GAMMA, 21), (ALPHA, 3)]


def test_a_page_that_waits_or_is_being_checked_is_not_queued_again():
    waiting = Rechecks()
    waiting.report(ALPHA, pages(1, 1, 2), 0.0)
    first = waiting.take()
    waiting.report(BETA, pages(1, 2), 0.0)
    waiting.checked(first, is_right=False, took_s=0.0, now=0.0)
    assert take_all(waiting) == [(ALPHA, 2)]
    waiting.report(BETA, pages(1), 0.0)
    assert take_all(waiting) == [(BETA, 1)]


def test_a_page_that_was_right_is_checked_again_only_after_a_while():
    waiting = Rechecks()
    waiting.report(ALPHA, pages(1), 0.0)
    take_all(waiting, is_right=True, now=5.0)
    assert waiting.report(BETA, [page(1), page(1, generation=2)], 5.0 + RIGHT_S - 0.1) == 0
    assert take_all(waiting) == [(BETA, 1)], "the next use of the slot is another page"
    waiting.report(BETA, pages(1), 5.0 + RIGHT_S)
    assert take_all(waiting) == [(BETA, 1)]


def test_who_reports_right_pages_is_known_by_it_until_it_ends():
    waiting = Rechecks()
    waiting.report(ALPHA, pages(1, 2), 0.0)
    waiting.report(BETA, pages(3), 0.0)
    take_all(waiting, is_right=True)
    assert waiting.n_false == {ALPHA: 2, BETA: 1}
    waiting.report(ALPHA, pages(4), 0.0)
    waiting.forget(ALPHA)
    waiting.forget(GAMMA)
    assert waiting.n_false == {BETA: 1}
    assert waiting.take() is None
    assert waiting.report(BETA, pages(4), 0.0) == 0
    assert take_all(waiting) == [(BETA, 4)]


def test_a_reader_that_ended_during_its_check_is_forgotten_too():
    waiting = Rechecks()
    waiting.report(ALPHA, pages(1), 0.0)
    recheck = waiting.take()
    waiting.forget(ALPHA)
    waiting.checked(recheck, is_right=True, took_s=0.0, now=0.0)
    assert not waiting.n_false
    waiting.report(BETA, pages(1), 0.0)
    assert waiting.take() is None, "it was right a moment ago, whoever asked"


@pytest.mark.parametrize("took_s", [0.0, 1e-6, 0.0001, 0.01, 2.0])
def test_checks_take_a_bounded_part_of_the_time(took_s):
    waiting = Rechecks()
    waiting.report(ALPHA, pages(1), 0.0)
    pause_s = waiting.checked(waiting.take(), is_right=True, took_s=took_s, now=0.0)
    assert pause_s >= CHECK_PAUSE_S_MIN
    assert took_s <= CHECK_SHARE * (took_s + pause_s) * 1.000001


@given(st.lists(st.tuples(st.sampled_from([ALPHA, BETA, GAMMA]), st.lists(st.integers(0, 30), max_size=12))))
def test_what_waits_is_bounded_and_what_has_no_room_is_counted(reports):
    limits = pytest.MonkeyPatch()
    limits.setattr(rechecks, "READER_PAGES_MAX", 5)
    limits.setattr(rechecks, "WAITING_PAGES_MAX", 8)
    waiting = Rechecks()
    expected: list[tuple[AgentId, int]] = []
    for reader, numbers in reports:
        fresh = [number for number in dict.fromkeys(numbers) if number not in {slot for _, slot in expected}]
        room = min(5 - sum(other == reader for other, _ in expected), 8 - len(expected))
        assert waiting.report(reader, pages(*numbers), 0.0) == len(fresh) - min(len(fresh), room)
        expected += [(reader, number) for number in fresh[:room]]
    limits.undo()
    taken = take_all(waiting)
    for one in (ALPHA, BETA, GAMMA):
        assert [row for row in taken if row[0] == one] == [row for row in expected if row[0] == one]
    assert take_all(waiting) == []
