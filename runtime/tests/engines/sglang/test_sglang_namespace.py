"""Namespaces and shards: whoever could have other bytes has another key."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import pytest
from kvpeer.core.chain import namespace_digest
from kvpeer.engines.sglang.namespace import PoolFacts, RankFacts, namespace_fields, shard_of
from kvpeer.model import ConfigError

POOL = PoolFacts(
    name="kv",
    kind="MHATokenToKVPoolHost",
    dtype="torch.bfloat16",
    layout="page_first:2x4096",
    page_tokens=16,
    page_bytes=8192,
    layers="0-2/2",
    heads="2x64",
    page_format="",
    is_sharded=True,
)
RANK = RankFacts(tp_rank=1, tp_size=2, pp_rank=0, pp_size=2, cp_rank=0, cp_size=1, is_replicated=False)
GIVEN = {"model_name": "m", "engine_version": "0.5.23", "weights": "w", "arguments": {"dtype": "auto"}, "salt": ""}


def digest(pool: PoolFacts = POOL, rank: RankFacts = RANK, **changes: object) -> bytes:
    return namespace_digest(namespace_fields(pool, rank, **{**GIVEN, **changes}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [field.name for field in fields(PoolFacts) if field.name != "is_sharded"])
def test_every_fact_of_a_pool_makes_another_namespace(name: str) -> None:
    value = getattr(POOL, name)
    assert digest(replace(POOL, **{name: value + 1 if isinstance(value, int) else value + "x"})) != digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"model_name": "n"},
        {"engine_version": "0.5.24"},
        {"weights": "v"},
        {"arguments": {"dtype": "half"}},
        {"arguments": {}},
        {"salt": "tenant"},
    ],
    ids=str,
)
def test_everything_given_makes_another_namespace(changes: dict[str, object]) -> None:
    assert digest(**changes) != digest()


@pytest.mark.parametrize(
    "rank", [replace(RANK, tp_size=4), replace(RANK, pp_rank=1), replace(RANK, pp_size=3), replace(RANK, cp_size=2)]
)
def test_other_parallel_sizes_and_stages_make_another_namespace(rank: RankFacts) -> None:
    assert digest(rank=rank) != digest()


def test_tensor_parallel_ranks_share_a_namespace_and_no_key() -> None:
    ranks = [replace(RANK, tp_rank=tp, cp_rank=cp, cp_size=3) for tp, cp in product(range(2), range(3))]
    assert len({digest(rank=rank) for rank in ranks}) == 1
    assert len({shard_of(POOL, rank) for rank in ranks}) == 6


def test_replicated_pools_are_shared_by_all_ranks_and_by_engines_of_any_size() -> None:
    pool = replace(POOL, is_sharded=False)
    ranks = [replace(RANK, tp_rank=tp, tp_size=size) for size in (1, 2, 4) for tp in range(size)]
    assert {(digest(pool, rank), shard_of(pool, rank)) for rank in ranks} == {(digest(pool), 0)}


def test_context_parallel_ranks_hold_different_slices_of_replicated_pools() -> None:
    pool = replace(POOL, is_sharded=False)
    ranks = [replace(RANK, cp_rank=cp, cp_size=2, tp_rank=tp) for cp, tp in product(range(2), range(2))]
    assert sorted(shard_of(pool, rank) for rank in ranks) == [0, 0, 1, 1]


@pytest.mark.parametrize("wrong", [{"tp_rank": 2}, {"pp_rank": -1}, {"cp_rank": 1}])
def test_an_impossible_rank_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="_rank is"):
        replace(RANK, **wrong)
