"""The namespace: every difference that matters separates two engines, and engines that cannot share do not start."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from kvpeer.core.chain import namespace_digest
from kvpeer.engines.vllm.namespace import hash_seed, namespace_fields, part_of_rank, refuse_unsupported
from kvpeer.model import ConfigError


class FullAttentionSpec:
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec:
    pass


def engine_config() -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            dtype="torch.bfloat16",
            quantization=None,
            quantization_config=None,
            max_model_len=4096,
            hf_text_config=SimpleNamespace(
                values={"_name_or_path": "/a", "hidden_size": 64, "rope_parameters": {"rope_type": "default"}}
            ),
        ),
        cache_config=SimpleNamespace(
            block_size=32,
            cache_dtype="auto",
            kv_cache_layout="LBHNC",
            prefix_caching_hash_algo="sha256",
            enable_prefix_caching=True,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute", kv_role="kv_both"),
        speculative_config=None,
    )


def cache_config(*specs: object) -> Any:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs or (FullAttentionSpec(),)],
        hash_block_size=32,
    )


def digest(config: Any, **changes: Any) -> bytes:
    text_config = config.model_config.hf_text_config
    text_config.to_dict = lambda: copy.deepcopy(text_config.values)
    facts: dict[str, Any] = {
        "engine_version": "0.32.0",
        "weights": "w",
        "layout": "l",
        "attention": "CPU_ATTN/vec",
        "replicas": 1,
        "seed": "s",
        "salt": "",
    }
    return namespace_digest(namespace_fields(config, **{**facts, **changes}))


def set_path(config: Any, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        config = config[parent] if isinstance(config, dict) else getattr(config, parent)
    if isinstance(config, dict):
        config[name] = value
    else:
        setattr(config, name, value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.dtype", "torch.float16"),
        ("model_config.quantization", "fp8"),
        ("model_config.quantization_config", {"bits": 8}),
        ("model_config.hf_text_config.values.hidden_size", 128),
        ("model_config.hf_text_config.values.rope_parameters.rope_theta", 7),
        ("cache_config.cache_dtype", "fp8"),
        ("cache_config.block_size", 64),
        ("cache_config.kv_cache_layout", "LBNHC"),
        ("cache_config.prefix_caching_hash_algo", "sha256_cbor"),
        ("parallel_config.tensor_parallel_size", 4),
        ("speculative_config", SimpleNamespace(method="eagle", model="d", revision=None)),
    ],
)
def test_a_difference_in_the_engine_separates(path: str, value: Any) -> None:
    config = engine_config()
    before = digest(config)
    set_path(config, path, value)
    assert digest(config) != before


@pytest.mark.parametrize(
    "change",
    [
        {"engine_version": "0.33.0"},
        {"weights": "v"},
        {"layout": "m"},
        {"attention": "CPU_ATTN/amx"},
        {"replicas": 2},
        {"seed": "t"},
        {"salt": "x"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_difference_in_a_fact_separates(change: dict[str, Any]) -> None:
    assert digest(engine_config(), **change) != digest(engine_config())


@pytest.mark.parametrize(
    ("path", "value"),
    [("model_config.hf_text_config.values._name_or_path", "/b"), ("model_config.max_model_len", 8192)],
    ids=["where the model lies", "how long requests may be"],
)
def test_what_does_not_change_the_bytes_does_not_separate(path: str, value: Any) -> None:
    config = engine_config()
    before = digest(config)
    set_path(config, path, value)
    assert digest(config) == before


def test_the_admitted_length_separates_where_rotary_scaling_may_depend_on_it() -> None:
    config = engine_config()
    config.model_config.hf_text_config.values["rope_parameters"] = {"full": {"rope_type": "longrope"}}
    before = digest(config)
    config.model_config.max_model_len = 8192
    assert digest(config) != before


def test_a_supported_engine_is_not_refused() -> None:
    refuse_unsupported(engine_config(), cache_config())
    refuse_unsupported(engine_config(), cache_config(MLAAttentionSpec()))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("kv_transfer_config.kv_load_failure_policy", "fail", '"kv_load_failure_policy": "recompute"'),
        ("kv_transfer_config.kv_role", "kv_producer", '"kv_role": "kv_both"'),
        ("cache_config.calculate_kv_scales", True, "remove --calculate-kv-scales"),
        ("parallel_config.pipeline_parallel_size", 2, "pipeline_parallel_size is 2"),
        ("parallel_config.decode_context_parallel_size", 2, "decode_context_parallel_size is 2"),
        ("parallel_config.nnodes", 2, "nnodes is 2"),
        ("parallel_config.tensor_parallel_size", 65, "at most 64 parts"),
    ],
)
def test_an_engine_that_cannot_share_is_refused_with_the_fix(path: str, value: Any, message: str) -> None:
    config = engine_config()
    set_path(config, path, value)
    with pytest.raises(ConfigError, match=message):
        refuse_unsupported(config, cache_config())


@pytest.mark.parametrize(
    "specs",
    [
        (FullAttentionSpec(), SlidingWindowSpec()),
        (SlidingWindowSpec(),),
        (SimpleNamespace(kv_cache_specs={"a": FullAttentionSpec(), "b": SlidingWindowSpec()}),),
    ],
    ids=["two groups", "sliding window", "mixed in one group"],
)
def test_a_cache_of_another_kind_is_refused_naming_the_flag(specs: tuple[object, ...]) -> None:
    with pytest.raises(ConfigError, match="--disable-hybrid-kv-cache-manager"):
        refuse_unsupported(engine_config(), cache_config(*specs))


def test_hashes_finer_than_blocks_are_refused() -> None:
    caches = cache_config()
    caches.hash_block_size = 16
    with pytest.raises(ConfigError, match="--prefix-match-unit"):
        refuse_unsupported(engine_config(), caches)


def test_the_hash_seed_is_the_one_that_vllm_uses() -> None:
    assert hash_seed("sha256", {}) == "vllm-none-hash"
    assert hash_seed("xxhash", {"PYTHONHASHSEED": "7"}) == "7"
    with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
        hash_seed("xxhash", {})


@pytest.mark.parametrize(
    ("tensor_parallel_size", "replicas", "rank", "expected"),
    [
        (1, 1, 0, (1, 0, True)),
        (4, 1, 3, (4, 3, True)),
        (4, 4, 0, (1, 0, True)),
        (4, 4, 2, (1, 0, False)),
        (4, 2, 3, (2, 1, False)),
    ],
)
def test_ranks_with_the_same_kv_share_a_part_that_the_first_one_writes(
    tensor_parallel_size: int, replicas: int, rank: int, expected: tuple[int, int, bool]
) -> None:
    assert part_of_rank(tensor_parallel_size, replicas, rank) == expected
