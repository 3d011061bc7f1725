"""What one process stored, another one restores: all of it, with the same bytes, for each kind of model."""

from __future__ import annotations

import itertools

import pytest

from kvpeer.engines.sglang.contract.caches import Caches, until_found
from kvpeer.engines.sglang.contract.kinds import KINDS

seeds = itertools.count(1)

INTERFACES = pytest.mark.parametrize("is_v1", [True, False], ids=["v1", "copying"])
CASES = pytest.mark.parametrize(
    ("kind", "layout"), [(kind.name, layout) for kind in KINDS.values() for layout in kind.layouts]
)


@INTERFACES
@CASES
def test_another_process_restores_a_prompt_byte_for_byte(caches: Caches, kind: str, layout: str, is_v1: bool) -> None:
    producer = caches.open("a", kind, is_v1=is_v1, layout=layout)
    consumer = caches.open("b", kind, is_v1=is_v1, layout=layout)
    seed, n_pages = next(seeds), KINDS[kind].n_pages
    stored = producer.store(seed, n_pages)
    until_found(consumer, stored)
    n_tokens, restored = consumer.restore(seed, n_pages)
    assert n_tokens == n_pages * KINDS[kind].page_tokens
    assert restored.hashes == stored.hashes
    assert len(restored.digests["kv"]) == n_pages
    assert restored.digests["kv"] == stored.digests["kv"]
    side_pool = KINDS[kind].side_pool
    if side_pool:
        side = restored.digests[side_pool]
        assert side
        assert n_pages - 1 in side
        assert side.items() <= stored.digests[side_pool].items()


@pytest.mark.parametrize("kind", KINDS)
def test_both_interfaces_mean_the_same_pages(caches: Caches, kind: str) -> None:
    zero_copy, copying = caches.open("a", kind, is_v1=True), caches.open("b", kind, is_v1=False)
    n_pages = KINDS[kind].n_pages
    for producer, consumer in ((zero_copy, copying), (copying, zero_copy)):
        seed = next(seeds)
        stored = producer.store(seed, n_pages)
        until_found(consumer, stored)
        n_tokens, restored = consumer.restore(seed, n_pages)
        assert n_tokens == n_pages * KINDS[kind].page_tokens
        assert restored.digests["kv"] == stored.digests["kv"]


@INTERFACES
def test_of_a_longer_prompt_the_stored_part_is_restored(caches: Caches, is_v1: bool) -> None:
    producer, consumer = caches.open("a", is_v1=is_v1), caches.open("b", is_v1=is_v1)
    seed = next(seeds)
    stored = producer.store(seed, 5)
    until_found(consumer, stored)
    n_tokens, restored = consumer.restore(seed, 9)
    assert n_tokens == 5 * KINDS["full"].page_tokens
    assert restored.digests == stored.digests


def test_a_prompt_that_nobody_stored_is_not_restored(caches: Caches) -> None:
    consumer = caches.open("b")
    assert consumer.restore(next(seeds), 4)[0] == 0


def test_a_prompt_is_restored_after_detach_and_attach(caches: Caches) -> None:
    producer, consumer = caches.open("a"), caches.open("b")
    seed = next(seeds)
    stored = producer.store(seed, 6)
    consumer.detach()
    consumer.attach()
    until_found(consumer, stored)
    n_tokens, restored = consumer.restore(seed, 6)
    assert n_tokens == 6 * KINDS["full"].page_tokens
    assert restored.digests == stored.digests


@pytest.mark.parametrize("kind", KINDS)
def test_with_delays_and_failures_what_is_restored_has_the_right_bytes(caches: Caches, kind: str) -> None:
    n_pages = KINDS[kind].n_pages
    producer = caches.open("a", kind)
    faulty = caches.open(
        "b",
        kind,
        is_usable=False,
        environment={
            "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.02",
            "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.15",
        },
    )
    n_restored = 0
    for _ in range(8):
        seed = next(seeds)
        stored = producer.store(seed, n_pages)
        until_found(faulty, stored)
        n_tokens, restored = faulty.restore(seed, n_pages)
        n_restored += n_tokens > 0
        for pool, digests in restored.digests.items():
            assert digests.items() <= stored.digests[pool].items()
        producer.evict_all()
        faulty.evict_all()
    assert n_restored, "with so few failures something is restored"


def test_a_backend_that_always_fails_costs_a_miss_and_nothing_else(caches: Caches) -> None:
    failing = caches.open("b", is_usable=False, environment={"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "1.0"})
    seed = next(seeds)
    assert failing.restore(seed, 4)[0] == 0
    failing.store(seed, 4)
