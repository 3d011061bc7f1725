"""From SGLang's host pools to the segments that the copiers understand.

A host pool says of each page at which addresses its bytes are (`get_page_buffer_meta`): a pointer for K and V, one for
each layer, or one for each part of a state. Asked for a few pages, that gives base, stride and length of each segment,
whatever the layout is called, so one piece of code serves them all. What is not a strided array, or can move, is
refused rather than guessed. Pools are read by duck typing; neither SGLang nor torch is imported.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpeer.client.device import EngineLayout
from kvpeer.model import ConfigError

__all__ = ["SUPPORTED_LAYOUTS", "PageLayout", "is_logical", "page_layout"]

SUPPORTED_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
"""Of --hicache-mem-layout. Others cut pages into chunks of their own (page_unified) or keep K and V in separate
buffers of another device (page_first_kv_split)."""

SEGMENT_BYTES_MAX = 2**32 - 1
"""A segment's length is a u32 in the native interface."""


@dataclass(frozen=True)
class PageLayout:
    """Where the pages of a host pool are. `segments` is None for a pool that only gives copies of its pages.

    page_tokens: indices of the pool that make a page. description: what the bytes of a page mean, beyond dtype and
    sizes.
    """

    segments: EngineLayout | None
    n_pages: int
    page_tokens: int
    page_bytes: int
    description: str


def is_logical(pool: Any) -> bool:
    """Whether this pool has no bytes: an anchor that only numbers the pages of other pools."""
    return getattr(pool, "size_per_token", None) == 0 and getattr(pool, "kv_buffer", None) is None


def page_layout(name: str, pool: Any) -> PageLayout:
    """Returns the layout of a host pool, which keeps its memory where it is as long as it lives.

    Raises:
        ConfigError: the pool's layout is not supported; names it and the fix.
    """
    _refuse_unsupported(name, pool)
    page_tokens = int(pool.page_size)
    n_pages = int(pool.size) // page_tokens
    if n_pages < 1:
        raise ConfigError(f"host pool {name!r} has room for no page: raise --hicache-ratio or --hicache-size")
    try:
        probes = [_probe(pool, page) for page in sorted({0, min(1, n_pages - 1), n_pages - 1})]
    except (NotImplementedError, ValueError):
        # It gives copies only: mamba and indexer pools with layer_first, mamba with further states.
        return _copied_layout(name, pool, n_pages, page_tokens)
    base, lengths = probes[0]
    stride = probes[1][0] - base if n_pages > 1 else np.zeros_like(base)
    is_strided = all(
        np.array_equal(probe_lengths, lengths) and np.array_equal(addresses, base + stride * np.uint64(page))
        for page, (addresses, probe_lengths) in zip((0, 1, n_pages - 1), probes, strict=False)
    )
    if not is_strided or (n_pages > 1 and (stride.astype(np.int64) < lengths.astype(np.int64)).any()):
        raise ConfigError(
            f"host pool {name!r} ({_kind(pool)}, layout {pool.layout!r}) does not keep its pages at one distance from "
            f"each other, so kvpeer cannot read into it: use --hicache-mem-layout {SUPPORTED_LAYOUTS[2]}"
        )
    if int(lengths.max()) > SEGMENT_BYTES_MAX:
        raise ConfigError(f"host pool {name!r}: a run of {lengths.max()} bytes is longer than {SEGMENT_BYTES_MAX}")
    order = _canonical_order(pool, base, n_pages, stride)
    segments = EngineLayout(base[order], stride[order], lengths[order].astype(np.uint32))
    runs = ",".join(f"{len(list(group))}x{length}" for length, group in itertools.groupby(segments.length.tolist()))
    return PageLayout(segments, n_pages, page_tokens, segments.part_bytes, f"{pool.layout}:{runs}")


def _refuse_unsupported(name: str, pool: Any) -> None:
    layout = getattr(pool, "layout", None)
    use = f"start SGLang with --hicache-mem-layout {SUPPORTED_LAYOUTS[2]} (or {', '.join(SUPPORTED_LAYOUTS[:2])})"
    if layout not in SUPPORTED_LAYOUTS:
        raise ConfigError(f"host pool {name!r} has the layout {layout!r}, which kvpeer does not support: {use}")
    if getattr(pool, "shared_allocation_domain", None) is not None:
        raise ConfigError(f"host pool {name!r} shares memory that SGLang compacts, so its pages move: {use}")
    if getattr(pool, "logical_size", pool.size) != pool.size:
        raise ConfigError(
            f"host pool {name!r} numbers {pool.logical_size} tokens over several ranks, and this rank holds "
            f"{pool.size} of them: kvpeer supports neither decode context parallelism nor sharded KV; turn it off"
        )


def _probe(pool: Any, page: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Addresses and lengths of the runs of one page."""
    page_tokens = int(pool.page_size)
    indices = np.arange(page * page_tokens, (page + 1) * page_tokens)
    addresses, lengths = pool.get_page_buffer_meta(indices)
    return np.array(addresses, np.uint64), np.array(lengths, np.uint64)


def _canonical_order(
    pool: Any, base: npt.NDArray[np.uint64], n_pages: int, stride: npt.NDArray[np.uint64]
) -> npt.NDArray[np.intp]:
    """The order of segments in a page. Inside one tensor it is that of their addresses, and so the one of SGLang's own
    flat pages: both interfaces then mean the same bytes. (SGLang lists layer_first as k0, v0, k1, v1.)"""
    buffer: Any = getattr(pool, "kv_buffer", None)
    if not hasattr(buffer, "data_ptr"):
        return np.arange(len(base))
    start, stop = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
    last = base + stride * np.uint64(n_pages - 1)
    is_inside = int(base.min()) >= start and int(last.max()) < stop
    return np.argsort(base, kind="stable") if is_inside else np.arange(len(base))


def _copied_layout(name: str, pool: Any, n_pages: int, page_tokens: int) -> PageLayout:
    try:
        page_bytes = int(pool.get_dummy_flat_data_page().nbytes)
    except NotImplementedError as error:
        raise ConfigError(
            f"host pool {name!r} ({_kind(pool)}, layout {pool.layout!r}) gives away no pages: {error}; "
            "start SGLang without --hicache-storage-backend for this model"
        ) from error
    return PageLayout(None, n_pages, page_tokens, page_bytes, f"{pool.layout}:flat")


def _kind(pool: Any) -> str:
    return type(pool).__name__
