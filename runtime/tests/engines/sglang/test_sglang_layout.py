"""Segments of host pools: whatever the layout, they are the bytes of SGLang's own flat page, in its order."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from host_pools import N_PAGES, PAGE_TOKENS, CopiesOnly, HostPool
from kvpeer.engines.sglang.layout import SUPPORTED_LAYOUTS, is_logical, page_layout
from kvpeer.model import ConfigError


def bytes_of(segments, page: int) -> bytes:
    columns = zip(segments.base.tolist(), segments.stride.tolist(), segments.length.tolist(), strict=True)
    return b"".join(ctypes.string_at(base + page * stride, length) for base, stride, length in columns)


@pytest.mark.parametrize("layout", SUPPORTED_LAYOUTS)
def test_the_segments_of_a_page_are_sglangs_flat_page(layout: str) -> None:
    pool = HostPool(layout)
    pool.array[...] = np.random.default_rng(1).integers(0, 256, pool.array.shape)
    found = page_layout("kv", pool)
    assert (found.n_pages, found.page_tokens) == (N_PAGES, PAGE_TOKENS)
    for page in range(N_PAGES):
        assert bytes_of(found.segments, page) == pool.get_data_page(page * PAGE_TOKENS).array.tobytes()


def test_layouts_with_equal_sizes_have_other_descriptions() -> None:
    assert len({page_layout("kv", HostPool(layout)).description for layout in SUPPORTED_LAYOUTS}) == 4


def test_a_pool_of_one_page_has_a_layout() -> None:
    pool = HostPool("page_first")
    pool.size = pool.logical_size = PAGE_TOKENS
    assert page_layout("kv", pool).n_pages == 1


def test_a_pool_that_gives_copies_only_has_no_segments() -> None:
    pool = CopiesOnly("layer_first")
    found = page_layout("mamba", pool)
    assert found.segments is None
    assert found.page_bytes == pool.get_dummy_flat_data_page().nbytes


def skewed(pool: HostPool) -> None:
    regular = pool.get_page_buffer_meta

    def meta(indices):
        addresses, lengths = regular(indices)
        page = int(indices[0]) // PAGE_TOKENS
        return [address + (64 if page == N_PAGES - 1 else 0) for address in addresses], lengths

    pool.get_page_buffer_meta = meta  # type: ignore[method-assign]


def no_pages_at_all(pool: HostPool) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError("scales live outside kv_buffer")

    pool.get_page_buffer_meta = pool.get_dummy_flat_data_page = refuse  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pool: setattr(pool, "layout", "page_unified"), "'kv' has the layout 'page_unified'.*page_first_direct"),
        (lambda pool: setattr(pool, "layout", "page_first_kv_split"), "page_first_kv_split"),
        (lambda pool: setattr(pool, "shared_allocation_domain", object()), "its pages move"),
        (lambda pool: setattr(pool, "logical_size", 2 * pool.size), "decode context parallelism"),
        (lambda pool: setattr(pool, "size", 3), "room for no page"),
        (skewed, "HostPool, layout 'page_first'.*does not keep its pages at one distance"),
        (no_pages_at_all, "gives away no pages: scales live outside kv_buffer"),
    ],
    ids=["page_unified", "kv_split", "moving", "sharded", "empty", "not strided", "no pages"],
)
def test_what_cannot_be_read_into_is_refused_by_name(spoil, message: str) -> None:
    pool = HostPool("page_first")
    spoil(pool)
    if message == "room for no page":
        pool.logical_size = pool.size
    with pytest.raises(ConfigError, match=message):
        page_layout("kv", pool)


def test_an_anchor_without_bytes_is_logical_and_a_pool_is_not() -> None:
    anchor = HostPool("page_first")
    assert not is_logical(anchor)
    anchor.kv_buffer, anchor.size_per_token = None, 0
    assert is_logical(anchor)
