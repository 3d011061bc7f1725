"""What must be equal for two vLLM engines to share pages, and what makes an engine unfit to share any.

vLLM's block hash covers the tokens and, as extra keys of the hash, what a request brings along: `cache_salt` (in the
first block, and by chaining in all later ones), the identifiers and offsets of multimodal inputs, digests of prompt
embeddings, and for LoRA the adapter's name and path (vllm/v1/core/kv_cache_utils.py, generate_block_hash_extra_keys).
So a tenant's salt needs nothing here. LoRA does: a path is not content, so requests with an adapter are not shared at
all (see `scheduler_side`). The hash covers nothing of the engine itself; that is what the namespace is for. Config
objects are read by duck typing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kvpeer.model import PARTS_MAX, ConfigError

__all__ = ["hash_seed", "namespace_fields", "part_of_rank", "refuse_unshareable", "refuse_unsupported"]

_FIELDS_VERSION = "1"
"""Raised when the meaning of a field changes, so that engines before and after never share."""

_SHARED_SPECS = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
"""KV-cache kinds whose block, once full, holds the KV of exactly its own tokens for good. Subclasses may evict or add
to it, so the name must be exact."""

_SEEDED_HASHES = frozenset({"sha256", "sha256_cbor"})
"""Algorithms for which vLLM has a fixed default seed (resolve_none_hash_seed); the others draw a random one per
process."""

_DEFAULT_HASH_SEED = "vllm-none-hash"

_VOLATILE_MODEL_KEYS = frozenset({"_name_or_path", "transformers_version", "name_or_path"})
"""Of the effective model config: where it was loaded from and by what, which say nothing about KV."""


def refuse_unsupported(config: Any, kv_cache_config: Any) -> None:
    """Returns only when this engine may load and publish pages as the connector does; reads nothing but the two config
    objects.

    Raises:
        ConfigError: names the setting and the fix.
    """
    transfer = config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: a page that cannot be had would fail its "
            'request. Add "kv_load_failure_policy": "recompute" to --kv-transfer-config'
        )
    if transfer.kv_role != "kv_both":
        raise ConfigError(
            f'kv_role is {transfer.kv_role!r}: set "kv_role": "kv_both" in --kv-transfer-config '
            "(to only read or only serve, use kvpeer's own settings `publish` and `mode`)"
        )
    refuse_unshareable(config, kv_cache_config)


def refuse_unshareable(config: Any, kv_cache_config: Any) -> None:
    """Returns only when every page of this engine may be shared, whoever moves it; reads nothing but the two config
    objects.

    Raises:
        ConfigError: names the setting and the fix.
    """
    cache, parallel = config.cache_config, config.parallel_config
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales takes KV scales from the first requests, so equal tokens have different bytes on two "
            "engines: remove --calculate-kv-scales (use a checkpoint with scales, or --kv-cache-dtype auto)"
        )
    _refuse_groups(kv_cache_config, cache)
    for name, size in (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
        ("decode_context_parallel_size", getattr(parallel, "decode_context_parallel_size", 1)),
        ("prefill_context_parallel_size", getattr(parallel, "prefill_context_parallel_size", 1)),
        ("nnodes", getattr(parallel, "nnodes", 1)),
    ):
        if size > 1:
            raise ConfigError(f"{name} is {size}: kvpeer supports tensor parallelism on one node only; set it to 1")
    if parallel.tensor_parallel_size > PARTS_MAX:
        raise ConfigError(
            f"tensor_parallel_size is {parallel.tensor_parallel_size}: a page has at most {PARTS_MAX} parts"
        )


def _refuse_groups(kv_cache_config: Any, cache: Any) -> None:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(
            f"the model has {len(groups)} KV-cache groups and kvpeer shares models with one: "
            "start vLLM with --disable-hybrid-kv-cache-manager"
        )
    spec = groups[0].kv_cache_spec
    kinds = sorted({type(layer).__name__ for layer in getattr(spec, "kv_cache_specs", {"": spec}).values()})
    if not _SHARED_SPECS.issuperset(kinds):
        raise ConfigError(
            f"the model's KV cache is of kind {', '.join(kinds)} and kvpeer shares {', '.join(sorted(_SHARED_SPECS))}: "
            "start vLLM with --disable-hybrid-kv-cache-manager, or without this connector"
        )
    if getattr(kv_cache_config, "hisparse_host_num_blocks", None) is not None:
        raise ConfigError(
            "HiSparse keeps KV in host blocks of its own: start vLLM without it, or without this connector"
        )
    hash_tokens = getattr(kv_cache_config, "hash_block_size", None)
    if hash_tokens not in (None, cache.block_size):
        raise ConfigError(
            f"block hashes cover {hash_tokens} tokens and blocks {cache.block_size}: remove --prefix-match-unit, "
            "kvpeer shares whole blocks"
        )


def hash_seed(algorithm: str, environment: Mapping[str, str]) -> str:
    """Returns the seed that this engine's block hashes start from.

    Raises:
        ConfigError: vLLM would draw a random seed, so that no two engines agree on a hash.
    """
    seed = environment.get("PYTHONHASHSEED")
    if seed is not None:
        return seed
    if algorithm not in _SEEDED_HASHES:
        raise ConfigError(
            f"prefix_caching_hash_algo is {algorithm!r}, whose seed is random in each process: "
            "use sha256 or sha256_cbor, or set PYTHONHASHSEED to the same value on every engine"
        )
    return _DEFAULT_HASH_SEED


def part_of_rank(tensor_parallel_size: int, replicas: int, rank: int) -> tuple[int, int, bool]:
    """Returns (number of parts, this rank's part, whether this rank writes it).

    `replicas` consecutive ranks hold the same KV (MLA; fewer KV heads than ranks): they share a part, the first one
    writes it.
    """
    return max(1, tensor_parallel_size // replicas), rank // replicas, rank % replicas == 0


def namespace_fields(
    config: Any,
    *,
    engine_version: str,
    weights: str,
    layout: str,
    attention: str,
    replicas: int,
    seed: str,
    salt: str,
) -> dict[str, str]:
    """Returns everything that decides the bytes of a page or their meaning, as text.

    layout: what `layout.engine_layout` described. attention: backend and, on a CPU, the instruction set (which orders
    the bytes).
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    fields = {
        "fields_version": _FIELDS_VERSION,
        "engine": "vllm",
        "engine_version": engine_version,
        "weights": weights,
        "model_config": _model_config_digest(model),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_dtype": str(cache.cache_dtype),
        "page_tokens": str(cache.block_size),
        "layout": f"{cache.kv_cache_layout}:{layout}",
        "attention": attention,
        "parallel": f"tp={parallel.tensor_parallel_size},pp={parallel.pipeline_parallel_size},cp=1,replicas={replicas}",
        "hash": f"{cache.prefix_caching_hash_algo}:{seed}",
        "speculative": _speculative(getattr(config, "speculative_config", None)),
    }
    if salt:
        fields["salt"] = salt
    return fields


def _model_config_digest(model: Any) -> str:
    """The effective config: with --hf-overrides applied, which may change rotary embeddings and so the keys."""
    effective = {key: value for key, value in model.hf_text_config.to_dict().items() if key not in _VOLATILE_MODEL_KEYS}
    effective["quantization_config_argument"] = getattr(model, "quantization_config", None)
    if _scales_rotation(effective.get("rope_parameters")) or _scales_rotation(effective.get("rope_scaling")):
        # Some scalings choose their factors by the longest sequence that the engine admits.
        effective["max_model_len"] = model.max_model_len
    return hashlib.sha256(json.dumps(effective, sort_keys=True, default=str).encode()).hexdigest()


def _scales_rotation(rope: Any) -> bool:
    """Whether rotary parameters, possibly nested by kind of layer, name another type than the plain one."""
    if not isinstance(rope, Mapping):
        return False
    types = {rope[key] for key in ("rope_type", "type") if key in rope}
    return bool(types - {"default"}) or any(_scales_rotation(nested) for nested in rope.values())


def _speculative(speculative: Any) -> str:
    """Draft layers have KV of their own in the same blocks."""
    if speculative is None:
        return "none"
    return f"{speculative.method}:{speculative.model}:{speculative.revision}"
