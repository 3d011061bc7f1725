"""The backend alone, on SGLang's real host pools: what its answers must mean."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from kvpeer.engines.sglang.contract.caches import Caches, until
from kvpeer.engines.sglang.contract.kinds import KINDS

POOLS = pytest.mark.parametrize(("kind", "pool"), [("full", "kv"), ("swa", "swa"), ("mamba", "mamba")])
INTERFACES = pytest.mark.parametrize("is_v1", [True, False], ids=["v1", "copying"])


def page_hashes(n: int) -> list[str]:
    """As SGLang makes them: 64 hex digits."""
    return [uuid.uuid4().hex * 2 for _ in range(n)]


@INTERFACES
@POOLS
def test_a_page_is_read_as_it_was_stored_and_one_that_was_not_is_missing(
    caches: Caches, kind: str, pool: str, is_v1: bool
) -> None:
    a, b = caches.open("a", kind, is_v1=is_v1), caches.open("b", kind, is_v1=is_v1)
    keys, unknown = page_hashes(4), page_hashes(2)
    assert a.put_pages(pool, keys) == [True] * 4
    mixed = [keys[2], unknown[0], keys[0], keys[3], unknown[1]]
    expected = ["right", "missing", "right", "right", "missing"]
    until(lambda: b.take_pages(pool, mixed) == expected or "wrong" in b.take_pages(pool, mixed), "b reads the pages")
    assert b.take_pages(pool, mixed) == expected


@INTERFACES
def test_storing_again_what_is_there_is_success(caches: Caches, is_v1: bool) -> None:
    a = caches.open("a", is_v1=is_v1)
    keys = page_hashes(3)
    assert a.put_pages("kv", keys) == [True] * 3
    assert a.put_pages("kv", keys) == [True] * 3
    assert a.take_pages("kv", keys) == ["right"] * 3


def test_a_page_that_was_stored_with_success_can_be_read_at_once(caches: Caches) -> None:
    a = caches.open("a")
    for _ in range(10):
        keys = page_hashes(2)
        assert a.put_pages("kv", keys) == [True] * 2
        assert a.n_existing(keys) == 2
        assert a.take_pages("kv", keys) == ["right"] * 2


@INTERFACES
def test_existing_pages_are_counted_to_the_first_hole(caches: Caches, is_v1: bool) -> None:
    a = caches.open("a", is_v1=is_v1)
    keys = page_hashes(6)
    a.put_pages("kv", [keys[0], keys[1], keys[3], keys[4]])
    assert a.n_existing(keys) == 2
    assert a.n_existing(keys[3:]) == 2
    assert a.n_existing(keys[2:]) == 0
    assert a.n_existing([]) == 0


def test_thousands_of_pages_may_be_asked_for_at_once(caches: Caches) -> None:
    a = caches.open("a")
    keys = page_hashes(10)
    a.put_pages("kv", keys)
    assert a.n_existing(keys + page_hashes(5000)) == 10


@pytest.mark.parametrize("kind", ["swa", "mamba"])
@pytest.mark.parametrize("window", [1, 2])
def test_every_legal_stop_of_a_trailing_pool_is_named(caches: Caches, kind: str, window: int) -> None:
    """The keys of the transfer are placeholders: what exists is asked by the keys of the prompt."""
    a, side_pool = caches.open("a", kind), KINDS[kind].side_pool
    keys = page_hashes(6)
    in_kv, in_side = [0, 1, 2, 3, 4], [0, 2, 3, 5]
    a.put_pages("kv", [keys[n] for n in in_kv])
    a.put_pages(side_pool, [keys[n] for n in in_side])
    legal = {1: [1, 3, 4], 2: [1, 4]}[window]
    n_pages, hits, stops = a.stops(keys, "trailing_pages", window)
    assert (n_pages, stops) == (legal[-1], legal)
    assert hits == {"kv": 5, side_pool: legal[-1]}


@pytest.mark.parametrize("kind", ["swa", "mamba"])
def test_a_pool_that_needs_all_pages_ends_the_prompt_at_its_first_hole(caches: Caches, kind: str) -> None:
    a, side_pool = caches.open("a", kind), KINDS[kind].side_pool
    keys = page_hashes(5)
    a.put_pages("kv", keys)
    a.put_pages(side_pool, [keys[0], keys[1], keys[3]])
    n_pages, hits, stops = a.stops(keys, "all_pages", None)
    assert (n_pages, stops, hits) == (2, [1, 2], {"kv": 5, side_pool: 2})


@pytest.mark.parametrize("kind", ["swa", "mamba"])
@pytest.mark.parametrize("policy", ["all_pages", "trailing_pages"])
def test_a_side_pool_without_pages_leaves_nothing_to_restore(caches: Caches, kind: str, policy: str) -> None:
    a, side_pool = caches.open("a", kind), KINDS[kind].side_pool
    keys = page_hashes(3)
    a.put_pages("kv", keys)
    n_pages, hits, stops = a.stops(keys, policy, 1)
    assert (n_pages, stops) == (0, [])
    assert side_pool not in hits


def test_pools_keep_their_pages_apart(caches: Caches) -> None:
    a = caches.open("a", "swa")
    keys = page_hashes(2)
    a.put_pages("kv", keys)
    assert a.take_pages("swa", keys) == ["missing"] * 2
    a.put_pages("swa", keys)
    assert a.take_pages("kv", keys) == ["right"] * 2
    assert a.take_pages("swa", keys) == ["right"] * 2


@INTERFACES
@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "another-model"},
        {"rank": {"tp_rank": 1, "tp_size": 2}},
        {"rank": {"tp_rank": 0, "tp_size": 2}},
        {"rank": {"pp_rank": 1, "pp_size": 2}},
        {"rank": {"attn_cp_rank": 1, "attn_cp_size": 2}},
    ],
    ids=str,
)
def test_another_model_or_rank_never_gets_the_pages(caches: Caches, other: dict[str, Any], is_v1: bool) -> None:
    keys = page_hashes(3)
    a = caches.open("a", is_v1=is_v1)
    a.put_pages("kv", keys)
    assert caches.open("b", is_v1=is_v1, **other).take_pages("kv", keys) == ["missing"] * 3
    assert caches.open("b", is_v1=is_v1).take_pages("kv", keys) == ["right"] * 3


def test_ranks_of_one_engine_keep_their_pages_apart(caches: Caches) -> None:
    keys = page_hashes(3)
    zero = caches.open("a", rank={"tp_rank": 0, "tp_size": 2})
    zero.put_pages("kv", keys)
    one = caches.open("b", rank={"tp_rank": 1, "tp_size": 2})
    assert one.n_existing(keys) == 0
    assert one.put_pages("kv", keys) == [True] * 3
    assert one.take_pages("kv", keys) == ["right"] * 3


def test_numbers_are_given_once(caches: Caches) -> None:
    a = caches.open("a")
    a.stats()
    keys = page_hashes(4)
    a.put_pages("kv", keys)
    a.take_pages("kv", keys)
    looks = a.stats()
    if not looks:
        pytest.skip("this backend has no numbers")
    ((read_pages, written_pages, read_gb_per_s, written_gb_per_s),) = looks
    assert (sum(read_pages), sum(written_pages)) == (4, 4)
    assert all(0 < speed < 1000 for speed in read_gb_per_s + written_gb_per_s), "GB/s"


def test_close_is_quick_and_may_be_called_again(caches: Caches) -> None:
    a = caches.open("a")
    assert a.close_storage_twice() < 5.0
