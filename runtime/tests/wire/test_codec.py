"""The bodies of frames: golden bytes of version 1, round trips, and garbage."""

from __future__ import annotations

import contextlib
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpeer.model import RemoteProtocolError
from kvpeer.wire.codec import decode_client, decode_peer, encode
from kvpeer.wire.messages import (
    UPDATES_MAX,
    Gossip,
    Locate,
    Located,
    Lookup,
    Message,
    Ok,
    OpenQueuePair,
    Ping,
    PingAck,
    QueuePairOpened,
    ReadExtents,
    Refusal,
)
from message_samples import CLIENT_SAMPLES, ID, INFO, NESTED, PEER_SAMPLES, UPDATE


def test_every_message_has_golden_bytes() -> None:
    names = {message.__name__ for message in Message.__subclasses__()}
    assert names == PEER_SAMPLES.keys() | CLIENT_SAMPLES.keys() | NESTED


@pytest.mark.parametrize("name", PEER_SAMPLES)
def test_peer_message_has_its_version_1_bytes(name: str) -> None:
    message, golden = PEER_SAMPLES[name]
    assert encode(message).hex() == golden
    decoded = decode_peer(bytes.fromhex(golden))
    assert decoded == message
    assert type(decoded) is type(message)


@pytest.mark.parametrize("name", CLIENT_SAMPLES)
def test_client_message_has_its_version_1_bytes(name: str) -> None:
    message, golden = CLIENT_SAMPLES[name]
    assert encode(message).hex() == golden
    decoded = decode_client(bytes.fromhex(golden))
    assert decoded == message
    assert type(decoded) is type(message)


def test_fields_that_were_appended_may_be_left_out() -> None:
    assert decode_client(bytes.fromhex("932b" + "c40102" + "a0")) == Located(b"\2", "")


def test_an_agent_that_knows_of_no_rails_speaks_of_its_only_one() -> None:
    end = "c420" + "65" * 32
    assert decode_peer(bytes.fromhex("9218" + end)) == OpenQueuePair(b"e" * 32, rail=0)
    assert decode_peer(bytes.fromhex("9219" + end)) == QueuePairOpened(b"e" * 32, n_rails=1)
    assert decode_peer(bytes.fromhex("921a" + "cd1000")) == ReadExtents(4096, rail=0)


def test_the_two_channels_share_only_ok_and_refusal() -> None:
    for name, (message, _) in PEER_SAMPLES.items():
        if name in CLIENT_SAMPLES:
            assert decode_client(encode(message)) == message
        else:
            with pytest.raises(RemoteProtocolError, match="between a client and its agent"):
                decode_client(encode(message))
    for name in CLIENT_SAMPLES.keys() - PEER_SAMPLES.keys():
        with pytest.raises(RemoteProtocolError, match="between agents"):
            decode_peer(encode(CLIENT_SAMPLES[name][0]))


def test_fields_appended_by_a_later_release_are_skipped() -> None:
    later = msgspec.msgpack.encode([61, "busy", "no", {"retry_ms": 5}, [1, [2]]])
    assert decode_peer(later) == Refusal("busy", "no")


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b"", "truncated"),
        (b"\xc1", "malformed"),
        (encode(Ok()) + b"\0", "trailing"),
        (b"\xdd\xff\xff\xff\xff\x09", "truncated"),
        (b"\xc6\xff\xff\xff\xff", "truncated"),
        (msgspec.msgpack.encode([64]), "Invalid value 64"),
        (msgspec.msgpack.encode([9, "text", b""]), "Expected `bytes`, got `str`"),
        (msgspec.msgpack.encode([9, b""]), "at least length 3"),
        (b"\x93\x3d\xa1\xff\xa0", "UTF-8"),
        (b"\x94\x3d\xa0\xa0" + b"\x91" * 100_000 + b"\0", "recursion"),
        (encode(PingAck(1, ID[:15], [])), "length >= 16"),
        (encode(PingAck(1, ID * 2, [])), "length <= 16"),
        (encode(Ping(1 << 63, [])), "9223372036854775807"),
        (encode(Ping(1, [msgspec.structs.replace(UPDATE, state=6)])), "<= 5"),
        (
            encode(Ping(1, [msgspec.structs.replace(UPDATE, info=msgspec.structs.replace(INFO, data_port=1 << 16))])),
            "65535",
        ),
        (encode(Gossip([UPDATE] * (UPDATES_MAX + 1))), f"length <= {UPDATES_MAX}"),
    ],
)
def test_a_faulty_body_is_refused_with_its_fault_named(body: bytes, fault: str) -> None:
    with pytest.raises(RemoteProtocolError, match=fault):
        decode_peer(body)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_a_message_or_a_protocol_error(body: bytes) -> None:
    for decode in (decode_peer, decode_client):
        try:
            message = decode(body)
        except RemoteProtocolError:
            continue
        assert isinstance(message, Message)


@given(st.data())
def test_a_flipped_byte_is_a_message_or_a_protocol_error(data: st.DataObject) -> None:
    body = bytearray(encode(data.draw(st.sampled_from([message for message, _ in PEER_SAMPLES.values()]))))
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(RemoteProtocolError):
        assert isinstance(decode_peer(bytes(body)), Message)


@given(st.text(max_size=20), st.integers(0, (1 << 63) - 1), st.binary(max_size=200), st.binary(max_size=200))
def test_messages_survive_the_round_trip(request: str, first: int, keys: bytes, anchors: bytes) -> None:
    locate = Locate(request, first, keys, anchors)
    assert decode_client(encode(locate)) == locate
    lookup = Lookup(keys, anchors)
    assert decode_peer(encode(lookup)) == lookup


def test_threads_may_share_the_codec() -> None:
    faults: list[object] = []

    def work(text: str) -> None:
        refusal = Refusal("busy", text * 1000)
        for _ in range(300):
            if decode_peer(encode(refusal)) != refusal:
                faults.append(text)

    threads = [threading.Thread(target=work, args=(text,)) for text in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert faults == []
