"""What is left of an answer of the directory when its pages are pulled a moment later."""

from __future__ import annotations

import numpy as np
import pytest
from kvpeer.core.locate import LocateResult
from kvpeer.core.located import REMEMBERED_MAX, LocatedPages, RecentLocations
from kvpeer.core.negative import NegativeCache
from kvpeer.model import HOLDER_DTYPE, AgentId, LocalProtocolError

KEYS = [bytes([number]) * 16 for number in range(4)]
ALICE, BOB = AgentId(b"a" * 16), AgentId(b"b" * 16)
# Page 10: Alice; page 11: nobody; page 12: Alice and Bob; page 13: Bob.
COUNTS = np.array([1, 0, 2, 1], dtype=np.uint8)
HOLDERS = np.array([(0, 1, 7, 64, 2), (0, 2, 7, 64, 2), (1, 3, 7, 64, 2), (1, 4, 7, 64, 2)], dtype=HOLDER_DTYPE)


def located(expires: float = 10.0) -> LocatedPages:
    result = LocateResult(np.array([2, 0, 2, 2], dtype=np.uint8), COUNTS, HOLDERS, (ALICE, BOB), {}, None)
    return LocatedPages(np.arange(10, 14), b"".join(KEYS), result, expires)


def holding(positions: list[int], unusable: set[AgentId] = frozenset(), negative: NegativeCache | None = None):
    keys = b"".join(KEYS[position - 10] for position in positions)
    return located().holding(
        np.array(positions), keys, lambda agent: agent not in unusable, negative or NegativeCache(), {BOB: 3}, now=0.0
    )


def test_a_holding_has_the_holders_of_the_pages_asked_for_in_their_order():
    held = holding([10, 12, 13])
    assert held.counts.tolist() == [1, 2, 1]
    assert held.holders["slot"].tolist() == [1, 2, 3, 4]
    assert held.in_flight.tolist() == [0, 3]
    assert held.usable.all()
    assert not held.failed.any()


def test_a_page_without_holders_takes_none_of_its_neighbours():
    held = holding([11, 12])
    assert held.counts.tolist() == [0, 2]
    assert held.holders["slot"].tolist() == [2, 3]


def test_only_the_location_that_failed_is_marked_not_the_page_nor_the_producer():
    negative = NegativeCache()
    failed = np.array([(0, 2, 7, 64, 2)], dtype=HOLDER_DTYPE)
    negative.add_locations(KEYS[2], failed, ALICE, now=0.0)
    assert holding([10, 12], negative=negative).failed.tolist() == [False, True, False]


@pytest.mark.parametrize(("unusable", "has_alternatives"), [(set(), True), ({BOB}, False)])
def test_a_page_with_two_usable_holders_has_an_alternative(unusable, has_alternatives):
    assert holding([12, 13], unusable).has_alternatives == has_alternatives


@pytest.mark.parametrize("positions", [[9], [12, 14]])
def test_pages_that_were_not_located_are_refused(positions):
    with pytest.raises(LocalProtocolError, match="not all located"):
        located().holding(np.array(positions), KEYS[0] * len(positions), lambda _: True, NegativeCache(), {}, 0.0)


def test_another_page_at_the_same_place_of_another_prompt_is_not_covered():
    assert located().covers(np.array([10, 11]), KEYS[0] + KEYS[3]) is None


def test_recent_locations_are_recalled_until_they_expire_and_only_for_their_request():
    recent = RecentLocations()
    recent.remember("r", located(expires=10.0))
    positions, keys = np.array([12]), KEYS[2]
    assert recent.recall("r", positions, keys, now=10.0) is not None
    assert recent.recall("r", positions, keys, now=10.1) is None
    assert recent.recall("s", positions, keys, now=0.0) is None


def test_recent_locations_keep_the_latest_requests_only():
    recent = RecentLocations()
    recent.remember("", located())
    for number in range(REMEMBERED_MAX + 1):
        recent.remember(str(number), located())
    assert len(recent) == REMEMBERED_MAX
    assert recent.recall("0", np.array([12]), KEYS[2], now=0.0) is None
    assert recent.recall("1", np.array([12]), KEYS[2], now=0.0) is not None
