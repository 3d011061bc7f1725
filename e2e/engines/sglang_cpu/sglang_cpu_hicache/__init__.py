"""Copies between device and host pools in torch, and host pools without pinned memory. See ../README.md.

A layer of a device pool is [token, ...]. A host pool is [page, layer, token of the page, ...] with page_first_direct
(a Mamba state is a page of one token), and like a device pool with layer_first. SGLang passes all arguments by name.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

_POOLS = "sglang.srt.mem_cache.pool_host"


def transfer_kv_direct(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """Tokens of layers to tokens of layers: layer_first, both ways."""
    sources, targets = _on_cpu(src_indices), _on_cpu(dst_indices)
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[targets] = source[sources]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    """One layer from host pages to device tokens."""
    sources, targets = _on_cpu(src_indices), _on_cpu(dst_indices)
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        device[targets] = host[sources // page_size, layer_id, sources % page_size]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """All layers from device tokens to host pages. src_ptrs: the layers of the first host pool, then of the next."""
    sources, targets = _on_cpu(src_indices), _on_cpu(dst_indices)
    n_layers = len(src_ptrs) // len(dst_ptrs)
    for place, device in enumerate(src_ptrs):
        host = dst_ptrs[place // n_layers]
        host[targets // page_size, place % n_layers, targets % page_size] = device[sources]


def install() -> None:
    """Puts the copies into SGLang's host pools, and switches pinning off there."""
    base = importlib.import_module(f"{_POOLS}.base").HostKVCache
    base.pin_memory = property(lambda pool: False, lambda pool, value: None)
    for name in ("mha", "mla", "mamba"):
        module = importlib.import_module(f"{_POOLS}.{name}")
        for copy in (transfer_kv_direct, transfer_kv_per_layer_direct_pf_lf, transfer_kv_all_layer_direct_lf_pf):
            setattr(module, copy.__name__, copy)


def _on_cpu(indices: torch.Tensor) -> torch.Tensor:
    return indices.to("cpu", torch.int64)
