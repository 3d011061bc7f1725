"""How much of a prompt can be restored: against a plain reading of the rules."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kvpeer.engines.sglang.hits import leading, stops_with_all_pages, stops_with_trailing_pages

presence = st.lists(st.booleans(), max_size=12)


@given(presence)
def test_leading_pages_end_at_the_first_hole(present: list[bool]) -> None:
    assert leading(np.array(present, bool)) == (present.index(False) if False in present else len(present))


@given(presence)
def test_a_pool_that_needs_every_page_stops_before_its_first_hole(present: list[bool]) -> None:
    stops = stops_with_all_pages(np.array(present, bool))
    assert stops.tolist() == [all(present[:n]) for n in range(len(present) + 1)]


@given(presence, st.integers(0, 5))
def test_a_pool_that_needs_a_window_stops_wherever_the_window_is_whole(present: list[bool], window: int) -> None:
    stops = stops_with_trailing_pages(np.array(present, bool), window)
    expected = [all(present[max(0, n - max(1, window)) : n]) for n in range(len(present) + 1)]
    assert stops.tolist() == expected
