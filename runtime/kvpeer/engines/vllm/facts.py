"""What a vLLM worker knows of itself, read from vLLM's objects: the fields of its namespace and its engine layout."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import vllm

from kvpeer.client.device import Copier, CudaCopier, EngineLayout, NativeCopier
from kvpeer.engines.vllm.layout import engine_layout
from kvpeer.engines.vllm.metadata import RankFacts
from kvpeer.engines.vllm.namespace import hash_seed, namespace_fields, part_of_rank
from kvpeer.engines.vllm.settings import Settings
from kvpeer.engines.weights import checkpoint_folder, digest_cache_folder, weights_identity
from kvpeer.model import ConfigError

__all__ = ["RankLayout", "rank_layout"]


@dataclass(frozen=True)
class RankLayout:
    """A rank's facts for the scheduler side, its memory, and the copier for the kind of device that it is on."""

    facts: RankFacts
    layout: EngineLayout
    copier: Copier
    is_writer: bool


def rank_layout(config: Any, kv_cache_config: Any, kv_caches: dict[str, Any], settings: Settings) -> RankLayout:
    """Returns what this rank is. Reads samples of the checkpoint, once per checkpoint and machine.

    Raises:
        ConfigError: something decides the bytes of a page and cannot be named; the message says what and the fix.
    """
    layer_names = kv_cache_config.kv_cache_groups[0].layer_names
    layout, description = engine_layout(kv_caches, layer_names, kv_cache_config.num_blocks)
    replicas = int(getattr(kv_cache_config, "kv_tp_replicas", 1))
    parallel = config.parallel_config
    n_parts, part, is_writer = part_of_rank(
        parallel.tensor_parallel_size, replicas, parallel.rank % parallel.tensor_parallel_size
    )
    fields = namespace_fields(
        config,
        engine_version=str(vllm.__version__),
        weights=_weights(config, settings),
        layout=description,
        attention=_attention(config, layer_names),
        replicas=replicas,
        seed=hash_seed(config.cache_config.prefix_caching_hash_algo, os.environ),
        salt=settings.namespace_salt,
    )
    facts = RankFacts(fields, n_parts, part, layout.part_bytes)
    return RankLayout(facts, layout, _copier(kv_caches, layer_names, kv_cache_config.num_blocks, layout), is_writer)


def _weights(config: Any, settings: Settings) -> str:
    model = config.model_config
    return weights_identity(
        declared=settings.weights_identity,
        load_format=str(getattr(config.load_config.load_format, "value", config.load_config.load_format)),
        seed=model.seed,
        model=model.model,
        folder=checkpoint_folder(model.model, model.revision, config.load_config.download_dir),
        cache_folder=digest_cache_folder(os.environ),
    )


def _attention(config: Any, layer_names: list[str]) -> str:
    """The backends of the layers. On a CPU the instruction set as well: it decides the order of bytes within a
    block."""
    layers = config.compilation_config.static_forward_context
    kinds = set()
    for name in layer_names:
        layer = layers[name]
        backend = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else layer.attn_backend
        kind = str(backend.get_name())
        if kind == "CPU_ATTN":
            if not getattr(layer, "isa", ""):
                raise ConfigError(
                    f"vLLM {vllm.__version__} does not say which instruction set orders the KV cache of layer {name}: "
                    "this version is not supported on a CPU"
                )
            kind += f"/{layer.isa}"
        kinds.add(kind)
    return ",".join(sorted(kinds))


def _copier(kv_caches: dict[str, Any], layer_names: list[str], n_blocks: int, layout: EngineLayout) -> Copier:
    device = kv_caches[layer_names[0]].device
    if device.type == "cpu":
        return NativeCopier(layout)
    if device.type == "cuda":
        return CudaCopier(_segment_views(kv_caches, layer_names, n_blocks, layout))
    raise ConfigError(f"KV caches on a device of type {device.type!r} are not supported (cpu and cuda are)")


def _segment_views(kv_caches: dict[str, Any], layer_names: list[str], n_blocks: int, layout: EngineLayout) -> list[Any]:
    """Each segment as a strided uint8 tensor [n_blocks, length] over the memory that vLLM allocated."""
    import torch

    storages = [kv_caches[name].untyped_storage() for name in layer_names]
    views = []
    for base, stride, length in zip(layout.base.tolist(), layout.stride.tolist(), layout.length.tolist(), strict=True):
        storage = next(s for s in storages if s.data_ptr() <= base < s.data_ptr() + s.nbytes())
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        views.append(empty.set_(storage, base - storage.data_ptr(), (n_blocks, length), (stride, 1)))
    return views
