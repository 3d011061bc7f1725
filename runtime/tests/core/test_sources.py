"""Choosing sources: one producer for the longest prefix, spread by load, stable per request, nothing unusable."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpeer.core.policy import PREFIX_BAND_PAGES
from kvpeer.core.sources import OFFERS_MAX, SOURCES_MAX, Holding, Offer, choose_sources, offers
from kvpeer.model import HOLDER_DTYPE, AgentId, LocalProtocolError, Tier


def agent(number: int) -> AgentId:
    return AgentId(hashlib.sha256(f"agent {number}".encode()).digest()[:16])


def holding_of(
    pages: list[set[int]],
    n_agents: int,
    *,
    unusable: tuple[int, ...] = (),
    failed: tuple[tuple[int, int], ...] = (),
    in_flight: dict[int, int] | None = None,
) -> Holding:
    """pages[i]: who holds page i. failed: (page, agent)."""
    rows = [(page, holder) for page, holders in enumerate(pages) for holder in sorted(holders)]
    holders = np.zeros(len(rows), dtype=HOLDER_DTYPE)
    for idx, (page, holder) in enumerate(rows):
        holders[idx] = (holder, page * 100 + holder, 1, 10, 2)
    busy = np.zeros(n_agents, dtype=np.int64)
    for number, n_requests in (in_flight or {}).items():
        busy[number] = n_requests
    usable = np.array([number not in unusable for number in range(n_agents)], dtype=np.bool_)
    return Holding(
        np.array([len(holders) for holders in pages], dtype=np.uint8),
        holders,
        [agent(number) for number in range(n_agents)],
        usable,
        np.array([row in failed for row in rows], dtype=np.bool_),
        busy,
    )


def chosen(holding: Holding, request: str = "r") -> list[tuple[int, list[int]]]:
    numbers = {agent_id: number for number, agent_id in enumerate(holding.agents)}
    return [(numbers[source.producer], source.indices.tolist()) for source in choose_sources(holding, request)]


def test_the_producer_of_the_longest_prefix_serves_all_that_it_has():
    pages = [{0, 1}, {0, 1}, {1}, {1}, {0}, {1}]
    assert chosen(holding_of(pages, 2)) == [(1, [0, 1, 2, 3, 5]), (0, [4])]


def test_a_long_piece_in_the_middle_does_not_beat_a_prefix():
    pages = [{0}, {0}, {0}, {1}, {1}, {1}, {1}, {1}]
    assert chosen(holding_of(pages, 2)) == [(0, [0, 1, 2]), (1, [3, 4, 5, 6, 7])]


def test_pages_that_nobody_holds_are_left_out_and_do_not_cut_the_prefix():
    pages = [{0}, set(), {0}, {1}]
    assert chosen(holding_of(pages, 2)) == [(0, [0, 2]), (1, [3])]


def test_dead_or_avoided_producers_and_failed_locations_are_not_used():
    pages = [{0, 1, 2}] * 4
    assert chosen(holding_of(pages, 3, unusable=(0, 2))) == [(1, [0, 1, 2, 3])]
    assert chosen(holding_of(pages, 3, unusable=(0, 2), failed=((1, 1),))) == [(1, [0, 2, 3])]
    assert chosen(holding_of(pages, 3, unusable=(0, 1, 2))) == []


def test_a_producer_that_would_have_to_read_its_disk_is_asked_only_for_what_no_other_has_as_far():
    holding = holding_of([{0, 1}, {0, 1}, {0}], 2)
    holding.holders["tier"][holding.holders["agent"] == 0] = Tier.DISK
    assert [chosen(holding, f"r{n}") for n in range(20)] == [[(1, [0, 1]), (0, [2])]] * 20
    longer = holding_of([{0, 1}, {0}, {0}], 2)
    longer.holders["tier"][longer.holders["agent"] == 0] = Tier.DISK
    assert chosen(longer) == [(0, [0, 1, 2])]


def test_host_memory_is_preferred_to_disk_of_the_same_producer():
    holders = np.array([(0, 1, 1, 10, 4), (0, 2, 1, 10, 2)], dtype=HOLDER_DTYPE)
    free = np.zeros(2, dtype=np.bool_)
    holding = Holding(
        np.array([2], dtype=np.uint8), holders, [agent(0)], np.ones(1, np.bool_), free, np.zeros(1, np.int64)
    )
    (source,) = choose_sources(holding, "r")
    assert source.holders["slot"].tolist() == [2]


def test_equal_producers_share_the_requests_by_what_they_have_in_flight():
    pages = [{0, 1}] * 4
    even = Counter(chosen(holding_of(pages, 2), f"r{number}")[0][0] for number in range(2000))
    assert 900 < even[0] < 1100
    busy = Counter(chosen(holding_of(pages, 2, in_flight={0: 3}), f"r{number}")[0][0] for number in range(2000))
    assert 320 < busy[0] < 480, "weight 1/4 against 1: a fifth"


def test_a_prefix_shorter_by_the_band_is_as_good_and_a_shorter_one_is_not():
    band = [{0, 1}] * 5 + [{0}] * PREFIX_BAND_PAGES
    firsts = Counter(chosen(holding_of(band, 2), f"r{number}")[0][0] for number in range(400))
    assert 120 < firsts[1] < 280
    shorter = [{0, 1}] * 5 + [{0}] * (PREFIX_BAND_PAGES + 1)
    assert {chosen(holding_of(shorter, 2), f"r{number}")[0][0] for number in range(400)} == {0}


def test_the_choice_is_the_same_for_every_rank_of_a_request():
    """The digest is part of what ranks and agents of one version agree on."""
    pages = [set(range(8))] * 4
    assert len({str(chosen(holding_of(pages, 8), "request-1")) for _ in range(5)}) == 1
    assert [chosen(holding_of(pages, 8), f"request-{number}")[0][0] for number in range(8)] == [6, 6, 3, 2, 6, 6, 5, 7]


def test_a_request_has_a_limited_number_of_sources():
    pages = [{number} for number in range(SOURCES_MAX + 5)]
    assert chosen(holding_of(pages, SOURCES_MAX + 5)) == [(number, [number]) for number in range(SOURCES_MAX)]


@settings(deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 7), max_size=4), max_size=40),
    st.sets(st.integers(0, 7)),
    st.sets(st.tuples(st.integers(0, 39), st.integers(0, 7))),
    st.text(max_size=5),
)
def test_every_page_with_a_usable_holder_has_exactly_one_source_that_holds_it(pages, unusable, failed, request_id):
    holding = holding_of(pages, 8, unusable=tuple(unusable), failed=tuple(failed))
    good = [{h for h in holders if h not in unusable and (page, h) not in failed} for page, holders in enumerate(pages)]
    sources = chosen(holding, request_id)
    assert sorted(page for _, of_one in sources for page in of_one) == [page for page, h in enumerate(good) if h]
    assert all(producer in good[page] for producer, of_one in sources for page in of_one)
    assert len({producer for producer, _ in sources}) == len(sources)
    for source in choose_sources(holding, request_id):
        assert (source.holders["slot"] // 100 == source.indices).all()
        assert (np.diff(source.indices.astype(np.int64)) > 0).all()


@pytest.mark.parametrize("part", ["holders", "usable", "failed", "in_flight"])
def test_arrays_that_do_not_fit_are_refused(part: str):
    good = holding_of([{0}, {1}], 2)
    arrays = {name: getattr(good, name) for name in ("counts", "holders", "agents", "usable", "failed", "in_flight")}
    with pytest.raises(LocalProtocolError):
        Holding(**{**arrays, part: arrays[part][:-1]})


def test_a_preferred_producer_is_asked_first_as_long_as_it_has_the_first_page():
    pages = [{0, 1}, {0, 1}, {0}]
    for preferred in (0, 1):
        first, *_ = choose_sources(holding_of(pages, 2), "r", agent(preferred))
        assert first.producer == agent(preferred)
        assert first.indices.tolist() == [[0, 1, 2], [0, 1]][preferred]
    only_later = [{0}, {0, 1}]
    assert choose_sources(holding_of(only_later, 2), "r", agent(1))[0].producer == agent(0)
    assert choose_sources(holding_of(pages, 2, unusable=(1,)), "r", agent(1))[0].producer == agent(0)
    assert choose_sources(holding_of(pages, 2), "r", agent(9)) != []


def test_an_offer_says_how_far_one_producer_alone_reaches_and_how_busy_it_is():
    pages = [{0, 1, 3}, {0, 1}, {0, 2}, {1}, {0}]
    assert offers(holding_of(pages, 4, in_flight={1: 3})) == [
        Offer(agent(0), 3, 0),
        Offer(agent(1), 2, 3),
        Offer(agent(3), 1, 0),
    ]
    assert offers(holding_of(pages, 4, unusable=(0,), failed=((1, 1),))) == [
        Offer(agent(1), 1, 0),
        Offer(agent(3), 1, 0),
    ]
    assert offers(holding_of([], 0)) == []


def test_only_so_many_producers_are_offered_and_the_longest_prefixes_are():
    n_agents = OFFERS_MAX + 4
    pages = [{holder for holder in range(n_agents) if holder >= page} for page in range(n_agents)]
    assert [offer.n_pages for offer in offers(holding_of(pages, n_agents))] == list(range(n_agents, 4, -1))


def on_disk(pages: list[set[int]], n_agents: int, *agents: int) -> Holding:
    """The pages of these agents are on their disks."""
    holding = holding_of(pages, n_agents)
    holding.holders["tier"][np.isin(holding.holders["agent"], agents)] = Tier.DISK
    return holding


def test_a_producer_that_would_have_to_read_its_disk_is_offered_only_where_none_has_as_much_in_its_pool():
    both = [{0, 1}, {0, 1}, {0, 1}]
    assert [offer.producer for offer in offers(on_disk(both, 2, 0))] == [agent(1)]
    assert {offer.producer for offer in offers(on_disk(both, 2, 0, 1))} == {agent(0), agent(1)}
    longer = [*both, {0}, {0}]
    assert [offer.n_pages for offer in offers(on_disk(longer, 2, 0))] == [5, 3]
    a_page_longer = [*both, {0}]
    assert [offer.producer for offer in offers(on_disk(a_page_longer, 2, 0))] == [agent(1)]
    assert len(offers(on_disk([{0, 1}, {0, 1}, {0}], 2, 1))) == 1, "shorter, and on the disk"


def test_a_named_producer_is_asked_first_unless_it_has_to_read_its_disk_and_another_one_need_not():
    both = [{0, 1}] * 4
    for holding, first in (
        (holding_of(both, 2), 0),
        (on_disk(both, 2, 0), 1),
        (on_disk(both, 2, 0, 1), 0),
        (on_disk([{0, 1}, {0, 1}, {0}, {0}], 2, 0), 0),
        (holding_of([{0, 1}, {1}, {1}, {1}], 2), 0),
    ):
        firsts = {choose_sources(holding, f"r{n}", agent(0))[0].producer for n in range(50)}
        assert firsts == {agent(first)}, holding.holders
