"""A full partition is shared fairly, whatever its producers do and in whatever order."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpeer.core.directory_table import ApplyResult, Op
from kvpeer.model import N_PARTITIONS
from kvpeer.native import DirectoryTable
from oracles.directory_oracle import DirectoryOracle

PARTITION = N_PARTITIONS - 1
N_AGENTS = 6

tables = pytest.mark.parametrize(
    "make_table",
    [lambda n: DirectoryTable(n, makes_room=True), lambda n: DirectoryOracle(n)],
    ids=["native", "oracle"],
)
limits = st.integers(1, 20)
"""Places of the partition: also fewer than there are producers."""
orders = st.lists(st.integers(0, N_AGENTS - 1), max_size=120)
"""Who publishes next: a page that nobody else has."""


def put(table, agent: int, number: int) -> ApplyResult:
    column = np.array([number], dtype=np.uint32)
    key = np.frombuffer(hashlib.sha256(number.to_bytes(4, "big")).digest()[:16], dtype=np.uint8).reshape(1, 16)
    one = np.ones(1, dtype=np.uint8)
    places = np.array([PARTITION], dtype=np.uint16)
    return ApplyResult(
        int(table.apply(agent, np.full(1, Op.PUT, dtype=np.uint8), key, places, column, column, column, one)[0])
    )


def slots_of(table, agent: int) -> list[int]:
    return table.dump(agent, PARTITION)[1].tolist()


@tables
@settings(deadline=None)
@given(limit=limits, order=orders)
def test_every_producer_has_its_newest_pages_up_to_an_equal_share(make_table, limit, order):
    table = make_table(limit)
    taken: dict[int, list[int]] = {agent: [] for agent in range(N_AGENTS)}
    for number, agent in enumerate(order):
        if put(table, agent, number) is ApplyResult.APPLIED:
            taken[agent].append(number)
    published = Counter(order)
    assert table.stats().records == min(limit, sum(map(len, taken.values())))
    for agent, numbers in taken.items():
        held = slots_of(table, agent)
        assert len(held) >= min(published[agent], limit // max(1, len(published)))
        assert held == numbers[len(numbers) - len(held) :]


@tables
@settings(deadline=None)
@given(limit=limits, order=orders)
def test_nobody_takes_from_who_would_then_have_less(make_table, limit, order):
    table = make_table(limit)
    for number, agent in enumerate(order):
        before = [len(slots_of(table, other)) for other in range(N_AGENTS)]
        result = put(table, agent, number)
        after = [len(slots_of(table, other)) for other in range(N_AGENTS)]
        assert (result is ApplyResult.FULL) == (sum(before) == limit and before[agent] == 0 and max(before) == 1)
        for other in range(N_AGENTS):
            if after[other] < before[other]:
                assert before[other] == max(before)
                assert after[other] >= after[agent]


@tables
def test_what_a_big_producer_publishes_beyond_its_share_costs_nobody_else(make_table):
    table = make_table(30)
    for number in range(10):
        put(table, 1, number)
        put(table, 2, 1000 + number)
    for number in range(2000, 2500):
        put(table, 0, number)
    assert [slots_of(table, agent) for agent in (0, 1, 2)] == [
        list(range(2490, 2500)),
        list(range(10)),
        list(range(1000, 1010)),
    ]
    assert table.stats().dropped_holders == 490
