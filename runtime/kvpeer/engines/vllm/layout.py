"""From vLLM's KV-cache tensors to the segments that the copiers understand.

vLLM gives each layer as a view [blocks, heads, tokens, content] of one large allocation, in one of several physical
orders, and possibly with blocks split into smaller kernel blocks. A page part is the concatenation, layer after
layer, of the bytes that one manager block has in each layer. That is a plain strided array per layer exactly when
those bytes are one run; any other order is refused rather than guessed. Tensors are read by duck typing (shape,
stride, address), so torch is not needed.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvpeer.client.device import EngineLayout
from kvpeer.model import ConfigError

__all__ = ["CacheTensor", "LayerLayout", "engine_layout", "layer_layout"]

SEGMENT_BYTES_MAX = 2**32 - 1
"""A segment's length is a u32 in the native interface."""


class CacheTensor(Protocol):
    """The part of `torch.Tensor` that is read here."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> object: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...
    def data_ptr(self) -> int: ...


@dataclass(frozen=True)
class LayerLayout:
    """Where block b of a layer lies: `length` bytes at `base + b * stride`. `order` says what those bytes mean."""

    base: int
    stride: int
    length: int
    order: str


def layer_layout(name: str, cache: CacheTensor, n_blocks: int) -> LayerLayout:
    """Returns the layout of one layer's cache in manager blocks.

    Raises:
        ConfigError: the bytes of a block are not one run, or kernel blocks do not group into manager blocks.
    """
    shape, stride = list(cache.shape), list(cache.stride())
    if not shape or n_blocks < 1 or shape[0] % n_blocks:
        raise ConfigError(f"layer {name}: a cache of shape {tuple(shape)} does not group into {n_blocks} blocks")
    ratio = shape[0] // n_blocks
    # A manager block is `ratio` kernel blocks, uniformly strided: grouping them is only another way to see the same
    # memory.
    inner_shape, inner_stride = [ratio, *shape[1:]], [stride[0], *stride[1:]]
    dims = sorted((d for d in range(len(inner_shape)) if inner_shape[d] > 1), key=lambda d: inner_stride[d])
    run = 1
    for dim in dims:
        if inner_stride[dim] != run:
            raise ConfigError(
                f"layer {name}: the bytes of a block are not one run "
                f"(shape {tuple(shape)}, stride {tuple(stride)}); "
                "kvpeer supports layouts whose layer and block dimensions are outermost (LBHNC, LBNHC, BLHNC, BLNHC)"
            )
        run *= inner_shape[dim]
    element_bytes = cache.element_size()
    length, block_stride = run * element_bytes, stride[0] * ratio * element_bytes
    if length > SEGMENT_BYTES_MAX:
        raise ConfigError(
            f"layer {name}: a block of {length} bytes is larger than a segment may be ({SEGMENT_BYTES_MAX})"
        )
    if n_blocks > 1 and block_stride < length:
        raise ConfigError(f"layer {name}: blocks of {length} bytes overlap at a stride of {block_stride}")
    order = f"{cache.dtype}{tuple(inner_shape)}/{tuple(reversed(dims))}"
    return LayerLayout(cache.data_ptr(), block_stride, length, order)


def engine_layout(
    caches: Mapping[str, CacheTensor], layer_names: Sequence[str], n_blocks: int
) -> tuple[EngineLayout, str]:
    """Returns the segments of a page part, in the order of `layer_names`, and a description of what their bytes mean.

    Layers that share their memory (cross-layer KV sharing) count once; runs that touch (block-outermost layouts)
    become one.

    Raises:
        ConfigError: a layer has no cache here, or a layout that is not supported.
    """
    layers: list[LayerLayout] = []
    names = hashlib.sha256()
    for name in layer_names:
        if name not in caches:
            raise ConfigError(f"layer {name} is in the KV-cache group but vLLM registered no cache for it")
        layer = layer_layout(name, caches[name], n_blocks)
        if layer in layers:
            continue
        names.update(f"{name}\n".encode())
        layers.append(layer)
    if not layers:
        raise ConfigError("vLLM registered no KV cache: there is nothing to share")
    merged = _merge_touching(layers)
    layout = EngineLayout(
        base=np.array([layer.base for layer in merged], dtype=np.uint64),
        stride=np.array([layer.stride for layer in merged], dtype=np.uint64),
        length=np.array([layer.length for layer in merged], dtype=np.uint32),
        memory=[caches[name] for name in layer_names],
    )
    orders = [f"{len(list(group))}x{order}" for order, group in itertools.groupby(layer.order for layer in layers)]
    return layout, f"{','.join(orders)};layers={names.hexdigest()[:16]}"


def _merge_touching(layers: Sequence[LayerLayout]) -> list[LayerLayout]:
    merged: list[LayerLayout] = []
    for layer in layers:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.stride == layer.stride
            and last.base + last.length == layer.base
            and last.length + layer.length <= min(layer.stride, SEGMENT_BYTES_MAX)
        ):
            merged[-1] = LayerLayout(last.base, last.stride, last.length + layer.length, last.order)
        else:
            merged.append(layer)
    return merged
