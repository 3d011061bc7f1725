"""Frames: the header's bytes, cutting a stream, and what is refused at the header."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpeer.model import LocalProtocolError, RemoteProtocolError
from kvpeer.wire.framing import (
    BODY_BYTES_MAX,
    DEADLINE_MS_MAX,
    FRAME_BYTES_MAX,
    HEADER_BYTES,
    Frame,
    FrameKind,
    FrameReader,
    WireVersionError,
    pack_frame,
    parse_header,
    remaining_ms,
)

ANSWERS = [FrameKind.REPLY, FrameKind.ERROR, FrameKind.NOTICE]

frames = st.one_of(
    st.builds(
        Frame,
        st.just(FrameKind.REQUEST),
        st.integers(0, 2**64 - 1),
        st.integers(1, DEADLINE_MS_MAX),
        st.binary(max_size=60),
    ),
    st.builds(Frame, st.sampled_from(ANSWERS), st.integers(0, 2**64 - 1), st.just(0), st.binary(max_size=60)),
)


def packed(frame: Frame) -> bytes:
    return pack_frame(frame.kind, frame.id, frame.body, frame.deadline_ms)


def header(
    body_bytes: int = 0, magic: bytes = b"KV", version: int = 1, kind: int = 2, frame_id: int = 0, ms: int = 0
) -> bytes:
    return struct.pack("<I2sBBQI", body_bytes, magic, version, kind, frame_id, ms)


def test_a_frame_has_its_version_1_bytes() -> None:
    golden = "03000000" + "4b56" + "01" + "01" + "0807060504030201" + "e8030000" + "616263"
    assert pack_frame(FrameKind.REQUEST, 0x0102030405060708, b"abc", 1000).hex() == golden
    assert HEADER_BYTES == 20
    assert FrameReader().feed(bytes.fromhex(golden)) == [Frame(FrameKind.REQUEST, 0x0102030405060708, 1000, b"abc")]


@given(st.lists(frames, max_size=8), st.data())
def test_frames_survive_any_cutting_of_the_stream(sent: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(map(packed, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    reader = FrameReader()
    received: list[Frame] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += reader.feed(stream[start:end])
    assert received == sent
    assert reader.n_buffered == 0


def test_an_unfinished_frame_is_visible_at_the_end_of_the_stream() -> None:
    reader = FrameReader()
    assert reader.feed(pack_frame(FrameKind.REPLY, 1, b"abc")[:-1]) == []
    assert reader.n_buffered == HEADER_BYTES + 2


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_arbitrary_bytes_are_frames_or_a_protocol_error_and_never_buffer_beyond_one_frame(chunks: list[bytes]) -> None:
    reader = FrameReader()
    for chunk in chunks:
        try:
            reader.feed(chunk)
        except RemoteProtocolError:
            assert reader.n_buffered == 0
        assert reader.n_buffered <= FRAME_BYTES_MAX


def test_a_4_gib_length_is_refused_at_the_header_before_any_allocation() -> None:
    reader = FrameReader()
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="4294967295 bytes, beyond the limit of 4194284"):
            reader.feed(header(body_bytes=0xFFFF_FFFF))
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


def test_the_largest_body_passes_and_one_byte_more_does_not() -> None:
    body = bytes(BODY_BYTES_MAX)
    frame = pack_frame(FrameKind.REPLY, 1, body)
    assert len(frame) == FRAME_BYTES_MAX
    assert FrameReader().feed(frame) == [Frame(FrameKind.REPLY, 1, 0, body)]
    with pytest.raises(LocalProtocolError, match="BODY_BYTES_MAX"):
        pack_frame(FrameKind.REPLY, 1, body + b"\0")
    with pytest.raises(RemoteProtocolError, match="beyond the limit"):
        parse_header(header(body_bytes=BODY_BYTES_MAX + 1))


def test_a_reader_may_start_with_a_lower_limit_and_raise_it() -> None:
    reader = FrameReader(body_bytes_max=2)
    assert reader.feed(pack_frame(FrameKind.REPLY, 1, b"ab")) == [Frame(FrameKind.REPLY, 1, 0, b"ab")]
    reader.body_bytes_max = 3
    assert reader.feed(pack_frame(FrameKind.REPLY, 1, b"abc")) == [Frame(FrameKind.REPLY, 1, 0, b"abc")]
    with pytest.raises(RemoteProtocolError, match="4 bytes, beyond the limit of 3"):
        reader.feed(pack_frame(FrameKind.REPLY, 1, b"abcd"))


def test_another_wire_version_is_an_error_that_names_both() -> None:
    with pytest.raises(WireVersionError, match=r"speaks wire version 2, this side 1"):
        FrameReader().feed(header(version=2, body_bytes=0xFFFF_FFFF, kind=77))


@pytest.mark.parametrize(
    ("faulty", "fault"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n", "magic is b'/ '"),
        (header(kind=0), "kind 0"),
        (header(kind=5), "kind 5"),
        (header(kind=1, ms=0), "deadline of 0 ms"),
        (header(kind=1, ms=DEADLINE_MS_MAX + 1), "deadline of 600001 ms"),
        (header(kind=2, ms=1), "reply frame has a deadline"),
        (header(kind=4, ms=1), "notice frame has a deadline"),
    ],
    ids=[
        "plain text",
        "kind 0",
        "kind 5",
        "no deadline",
        "deadline too far",
        "reply with deadline",
        "notice with deadline",
    ],
)
def test_a_faulty_header_is_refused_with_its_fault_named(faulty: bytes, fault: str) -> None:
    reader = FrameReader()
    with pytest.raises(RemoteProtocolError, match=fault):
        reader.feed(faulty)
    with pytest.raises(RemoteProtocolError, match=fault):  # the stream stays broken
        reader.feed(pack_frame(FrameKind.REPLY, 1, b""))


@pytest.mark.parametrize(
    ("kind", "frame_id", "ms"),
    [(FrameKind.REQUEST, 1, 0), (FrameKind.REPLY, 1, 1), (FrameKind.REPLY, 1 << 64, 0), (FrameKind.REPLY, -1, 0)],
)
def test_our_own_faulty_frame_is_a_local_error(kind: FrameKind, frame_id: int, ms: int) -> None:
    with pytest.raises(LocalProtocolError):
        pack_frame(kind, frame_id, b"", ms)


@pytest.mark.parametrize(
    ("seconds", "ms"), [(0.0, 1), (-5.0, 1), (0.0015, 1), (0.25, 250), (7.0, 7000), (1e9, DEADLINE_MS_MAX)]
)
def test_remaining_time_becomes_a_valid_deadline(seconds: float, ms: int) -> None:
    assert remaining_ms(seconds) == ms


@pytest.mark.parametrize("ms", [1, DEADLINE_MS_MAX])
def test_the_first_and_the_last_deadline_are_valid(ms: int) -> None:
    assert FrameReader().feed(pack_frame(FrameKind.REQUEST, 1, b"", ms)) == [Frame(FrameKind.REQUEST, 1, ms, b"")]
