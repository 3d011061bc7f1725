"""The negative cache: remembers exactly what failed, for exactly its time, in bounded memory."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpeer.core.negative import MISS_TTL_S_MAX, NegativeCache
from kvpeer.model import HOLDER_DTYPE, ConfigError, LocalProtocolError

AGENTS = hashlib.sha256(b"agents").digest()  # two ids


def keys_of(*numbers: int) -> bytes:
    return b"".join(hashlib.sha256(number.to_bytes(8, "big")).digest()[:16] for number in numbers)


def holders_of(*rows: tuple[int, int, int]) -> np.ndarray:
    """(agent, slot, generation) of each."""
    return np.array([(agent, slot, generation, 100, 2) for agent, slot, generation in rows], dtype=HOLDER_DTYPE)


def test_a_failed_location_is_remembered_for_its_time():
    cache = NegativeCache(location_ttl_s=5.0)
    keys, holders = keys_of(1, 2), holders_of((0, 7, 1), (1, 8, 1))
    assert not cache.has_locations(keys, holders, AGENTS, 0.0).any()
    cache.add_locations(keys, holders, AGENTS, 0.0)
    assert cache.has_locations(keys, holders, AGENTS, 4.99).all()
    assert not cache.has_locations(keys, holders, AGENTS, 5.0).any()


@pytest.mark.parametrize(
    ("number", "row"),
    [(2, (0, 7, 1)), (1, (1, 7, 1)), (1, (0, 8, 1)), (1, (0, 7, 2))],
    ids=["page", "producer", "slot", "generation"],
)
def test_a_location_that_differs_in_one_thing_is_another(number: int, row: tuple[int, int, int]):
    cache = NegativeCache()
    cache.add_locations(keys_of(1), holders_of((0, 7, 1)), AGENTS, 0.0)
    assert not cache.has_locations(keys_of(number), holders_of(row), AGENTS, 0.0).any()


def test_the_same_producer_is_known_under_another_index():
    cache = NegativeCache()
    cache.add_locations(keys_of(1), holders_of((0, 7, 1)), AGENTS, 0.0)
    assert cache.has_locations(keys_of(1), holders_of((1, 7, 1)), AGENTS[16:] + AGENTS[:16], 0.0).all()


def test_a_miss_is_remembered_for_200_ms_at_most():
    cache = NegativeCache()
    cache.add_misses(keys_of(1, 2), 10.0)
    assert cache.has_misses(keys_of(2, 3, 1), 10.199).tolist() == [True, False, True]
    assert not cache.has_misses(keys_of(1, 2), 10.2).any()
    with pytest.raises(ConfigError, match="miss_ttl_s"):
        NegativeCache(miss_ttl_s=MISS_TTL_S_MAX + 0.001)


def test_misses_and_locations_are_apart():
    cache = NegativeCache()
    cache.add_misses(keys_of(1), 0.0)
    assert not cache.has_locations(keys_of(1), holders_of((0, 0, 0)), AGENTS, 0.0).any()
    cache.add_locations(keys_of(2), holders_of((0, 0, 0)), AGENTS, 0.0)
    assert not cache.has_misses(keys_of(2), 0.0).any()


@settings(deadline=None)
@given(st.sets(st.integers(0, 10**6), max_size=200), st.sets(st.integers(0, 10**6), max_size=200))
def test_a_page_that_was_not_added_is_never_a_miss(added: set[int], asked: set[int]):
    cache = NegativeCache()
    cache.add_misses(keys_of(*added), 0.0)
    found = cache.has_misses(keys_of(*asked), 0.1)
    for number, is_miss in zip(asked, found, strict=True):
        assert not is_miss or number in added


def test_most_of_ten_thousand_misses_are_remembered():
    cache = NegativeCache()
    keys = keys_of(*range(10_000))
    cache.add_misses(keys, 0.0)
    assert cache.has_misses(keys, 0.1).mean() > 0.9


def test_neighbouring_slots_do_not_displace_each_other():
    cache = NegativeCache()
    keys = keys_of(1) * 10_000
    holders = holders_of(*((0, slot, 1) for slot in range(10_000)))
    cache.add_locations(keys, holders, AGENTS, 0.0)
    assert cache.has_locations(keys, holders, AGENTS, 0.1).mean() > 0.9


def test_an_empty_batch_is_fine():
    cache = NegativeCache()
    cache.add_misses(b"", 0.0)
    cache.add_locations(b"", holders_of(), b"", 0.0)
    assert cache.has_locations(b"", holders_of(), b"", 0.0).shape == (0,)


@pytest.mark.parametrize(
    ("keys", "holders", "agents"),
    [
        (b"short", holders_of((0, 0, 0)), AGENTS),
        (keys_of(1, 2), holders_of((0, 0, 0)), AGENTS),
        (keys_of(1), holders_of((2, 0, 0)), AGENTS),
        (keys_of(1), holders_of((0, 0, 0)), AGENTS[:15]),
    ],
    ids=["half a key", "too few holders", "unknown agent", "half an id"],
)
def test_what_does_not_fit_together_is_refused(keys: bytes, holders: np.ndarray, agents: bytes):
    with pytest.raises(LocalProtocolError):
        NegativeCache().add_locations(keys, holders, agents, 0.0)


@pytest.mark.parametrize(
    ("settings", "is_good"),
    [
        ({"location_ttl_s": 0.5}, True),
        ({"location_ttl_s": 0.0}, False),
        ({"location_ttl_s": float("inf")}, False),
        ({"miss_ttl_s": 0.0}, True),
        ({"miss_ttl_s": -0.1}, False),
    ],
)
def test_settings_have_limits(settings: dict[str, float], is_good: bool):
    if is_good:
        NegativeCache(**settings)
    else:
        with pytest.raises(ConfigError):
            NegativeCache(**settings)
