"""CRC-64/NVME through the binding equals the definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpeer.model import LocalProtocolError
from kvpeer.native import copy_crc64, crc64, select_crc64

POLYNOMIAL = 0x9A6C9329AC4BC9B5
ALL_ONES = (1 << 64) - 1

untimed = settings(deadline=None)
"""The definition in Python is slow, and on a busy machine slower still."""

buffers = st.integers(0, 700).flatmap(lambda n: st.binary(min_size=n, max_size=n))


def crc64_by_definition(source: bytes, crc: int = 0) -> int:
    crc ^= ALL_ONES
    for byte in source:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (POLYNOMIAL if crc & 1 else 0)
    return crc ^ ALL_ONES


@pytest.fixture(params=[1, 2, 3], ids=["table", "pclmul", "vpclmul"], scope="module")
def implementation(request):
    try:
        select_crc64(request.param)
    except LocalProtocolError:
        pytest.skip("this CPU lacks the implementation")
    yield request.param
    select_crc64(0)


def test_gives_the_check_value(implementation):
    assert crc64(b"123456789") == 0xAE8B14860A799888


@untimed
@given(source=buffers, crc=st.integers(0, ALL_ONES))
def test_equals_the_definition(implementation, source, crc):
    assert crc64(source, crc) == crc64_by_definition(source, crc)


@untimed
@given(source=buffers, cut=st.integers(0, 700))
def test_goes_on_where_it_stopped(implementation, source, cut):
    assert crc64(source[cut:], crc64(source[:cut])) == crc64(source)


@untimed
@given(source=buffers)
def test_copies_what_it_sums(implementation, source):
    destination = bytearray(len(source))
    assert copy_crc64(destination, source) == crc64_by_definition(source)
    assert destination == source


def test_takes_any_contiguous_buffer():
    expected = crc64(b"abcd")
    assert (
        crc64(bytearray(b"abcd")) == crc64(memoryview(b"abcd")) == crc64(np.frombuffer(b"abcd", np.uint8)) == expected
    )


def test_refuses_destinations_that_do_not_fit():
    with pytest.raises(LocalProtocolError, match="4 bytes into a writable buffer of 3"):
        copy_crc64(bytearray(3), b"abcd")
    with pytest.raises(LocalProtocolError, match="read-only"):
        copy_crc64(memoryview(b"abcd"), b"abcd")


def test_refuses_an_implementation_that_does_not_exist():
    with pytest.raises(LocalProtocolError, match="CRC-64 implementation 9"):
        select_crc64(9)
