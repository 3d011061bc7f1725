"""Keys and partitions: the same everywhere, for whatever slice of a chain is asked for."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpeer.core.chain import Chain, ChainSlice, loose_pages, namespace_digest, page_key
from kvpeer.model import ANCHOR_GROUP_PAGES, KEY_BYTES, N_PARTITIONS, LocalProtocolError
from kvpeer.wire.packing import n_chain_keys

NAMESPACE = namespace_digest({"model": "tiny", "dtype": "bf16"})


def chain_of(n_pages: int, group: int = 0) -> Chain:
    chain = Chain(NAMESPACE, group)
    chain.extend(hashlib.sha256(page.to_bytes(4, "big")).digest() for page in range(n_pages))
    return chain


def test_digest_is_a_constant_of_the_format():
    """Agents of different builds must agree, so these bytes may change only together with the version in the domain."""
    assert namespace_digest({"model": "m", "dtype": "bf16"}).hex() == (
        "d6a515e772eaba465d282831c2fb61ec8969484fab72c8186a9653b770abf9aa"
    )
    assert page_key(b"\x01" * 32, b"hash", 7).hex() == "fe90742a46267fb91d3dcc2f919ae8dd"


def test_digest_does_not_depend_on_the_order_of_the_fields():
    assert namespace_digest({"a": "1", "b": "2"}) == namespace_digest({"b": "2", "a": "1"})


@pytest.mark.parametrize(
    "other",
    [{"ab": "c"}, {"a": "bc", "": ""}, {"a": "b", "c": ""}, {"a": "b"}],
    ids=["moved", "empty", "split", "shorter"],
)
def test_digest_differs_where_only_a_boundary_moved(other):
    assert namespace_digest(other) != namespace_digest({"a": "bc"})


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=4), st.text(max_size=4), min_size=1, max_size=4), st.data())
def test_digest_differs_when_a_value_differs(fields, drawn):
    name = drawn.draw(st.sampled_from(sorted(fields)))
    assert namespace_digest({**fields, name: fields[name] + "x"}) != namespace_digest(fields)


def test_an_empty_namespace_is_refused():
    with pytest.raises(LocalProtocolError, match="at least one field"):
        namespace_digest({})


def test_key_depends_on_namespace_hash_and_group():
    keys = {
        page_key(NAMESPACE, b"a"),
        page_key(NAMESPACE, b"b"),
        page_key(NAMESPACE, b"a", 1),
        page_key(namespace_digest({"model": "other"}), b"a"),
    }
    assert len(keys) == 4
    assert all(len(key) == KEY_BYTES for key in keys)


@pytest.mark.parametrize(("namespace", "group"), [(b"short", 0), (NAMESPACE, -1), (NAMESPACE, 1 << 32)])
def test_bad_namespace_or_group_is_refused(namespace, group):
    with pytest.raises(LocalProtocolError):
        page_key(namespace, b"hash", group)
    with pytest.raises(LocalProtocolError):
        Chain(namespace, group)


def test_chain_holds_the_keys_of_its_pages():
    unnamed = Chain(NAMESPACE)
    unnamed.extend([b"a"])
    assert unnamed.slice(0, 1).keys == page_key(NAMESPACE, b"a", 0), "without a group it is group 0"
    chain = Chain(NAMESPACE, group=3)
    chain.extend([b"a", b"b"])
    chain.extend([b"c"])
    assert chain.slice(0, 3).keys == b"".join(page_key(NAMESPACE, name, 3) for name in (b"a", b"b", b"c"))


@settings(deadline=None)
@given(st.integers(1, 130), st.data())
def test_every_slice_agrees_with_the_anchor_of_each_page(n_pages, drawn):
    chain = chain_of(n_pages)
    whole = chain.slice(0, n_pages).keys
    first = drawn.draw(st.integers(0, n_pages))
    stop = drawn.draw(st.integers(first, n_pages))
    expected = []
    for page in range(first, stop):
        anchor_page = page // ANCHOR_GROUP_PAGES * ANCHOR_GROUP_PAGES
        anchor = whole[anchor_page * KEY_BYTES : (anchor_page + 1) * KEY_BYTES]
        expected.append(int.from_bytes(anchor[:2], "big") >> 4)
    piece = chain.slice(first, stop)
    assert piece.keys == whole[first * KEY_BYTES : stop * KEY_BYTES]
    assert piece.partitions().dtype == np.uint16
    assert piece.partitions().tolist() == expected
    assert all(partition < N_PARTITIONS for partition in expected)


@settings(deadline=None)
@given(st.integers(0, 130), st.data())
def test_a_part_of_a_slice_equals_the_slice_of_the_chain(n_pages, drawn):
    chain = chain_of(n_pages)
    first = drawn.draw(st.integers(0, n_pages))
    stop = drawn.draw(st.integers(first, n_pages))
    start = drawn.draw(st.integers(0, stop - first))
    end = drawn.draw(st.integers(start, stop - first))
    assert chain.slice(first, stop).part(start, end) == chain.slice(first + start, first + end)


@settings(deadline=None)
@given(st.integers(0, 130), st.data())
def test_a_slice_has_the_anchors_that_the_wire_expects(n_pages, drawn):
    """Two modules count groups; a slice that one makes and the other refuses could never be asked for."""
    first = drawn.draw(st.integers(0, n_pages))
    stop = drawn.draw(st.integers(first, n_pages))
    piece = chain_of(n_pages).slice(first, stop)
    assert n_chain_keys(first, piece.keys, piece.anchors) == stop - first


@pytest.mark.parametrize(
    ("first", "n", "anchors"), [(0, 31, 1), (0, 32, 1), (0, 33, 2), (31, 1, 1), (33, 0, 0), (31, 2, 2)]
)
def test_anchors_of_slices_that_end_at_a_group(first, n, anchors):
    assert len(chain_of(70).slice(first, first + n).anchors) == anchors * KEY_BYTES


def test_a_prompt_of_781_pages_has_25_anchors():
    assert len(chain_of(781).slice(0, 781).anchors) == 25 * KEY_BYTES


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 6)])
def test_a_range_outside_is_refused(start, stop):
    with pytest.raises(LocalProtocolError):
        chain_of(5).slice(start, stop)
    with pytest.raises(LocalProtocolError):
        chain_of(5).slice(0, 5).part(start, stop)


@pytest.mark.parametrize(
    ("first", "n_key_bytes", "n_anchor_bytes"),
    [(-1, 0, 0), (0, 15, 16), (0, 0, 16), (31, 32, 16), (0, 16, 17)],
    ids=["negative", "ragged keys", "anchor of nothing", "one of two anchors", "ragged anchor"],
)
def test_a_slice_whose_lengths_do_not_fit_is_refused(first, n_key_bytes, n_anchor_bytes):
    with pytest.raises(LocalProtocolError):
        ChainSlice(first, b"k" * n_key_bytes, b"a" * n_anchor_bytes)


@settings(deadline=None)
@given(st.integers(0, 80), st.data())
def test_a_loose_page_is_its_own_anchor_wherever_it_stands(n_pages, drawn):
    hashes = [page.to_bytes(4, "big") for page in range(n_pages)]
    pages = loose_pages(NAMESPACE, hashes, group=2)
    keys = [page_key(NAMESPACE, page_hash, 2) for page_hash in hashes]
    assert pages.keys == b"".join(keys)
    assert pages.partitions().tolist() == [int.from_bytes(key[:2], "big") >> 4 for key in keys]
    start = drawn.draw(st.integers(0, n_pages))
    stop = drawn.draw(st.integers(start, n_pages))
    piece = pages.part(start, stop)
    assert piece.keys == b"".join(keys[start:stop])
    assert piece.partitions().tolist() == pages.partitions().tolist()[start:stop]
