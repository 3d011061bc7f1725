"""Any message, made from its own definition: the round trip, damage, and what hostile lengths may cost."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpeer.model import RemoteProtocolError
from kvpeer.wire.codec import decode_client, decode_peer, encode
from kvpeer.wire.framing import BODY_BYTES_MAX
from kvpeer.wire.messages import Message
from message_samples import CLIENT_SAMPLES, INFO, PEER_SAMPLES, UPDATE
from msgspec import inspect

OVERHEAD_BYTES = 1 << 20
"""What decoding may take beyond the body: error texts, the interpreter's own."""


def values_of(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """All values that a field of this type may have, within small sizes."""
    if isinstance(kind, inspect.BytesType):
        return st.binary(min_size=kind.min_length or 0, max_size=kind.max_length or 40)
    if isinstance(kind, inspect.StrType):
        return st.text(max_size=min(kind.max_length or 30, 30))
    if isinstance(kind, inspect.IntType):
        low, high = -(1 << 63) if kind.ge is None else kind.ge, (1 << 64) - 1 if kind.le is None else kind.le
        return st.integers(low, high if kind.lt is None else kind.lt - 1)
    if isinstance(kind, inspect.ListType):
        return st.lists(values_of(kind.item_type), max_size=3)
    if isinstance(kind, inspect.DictType):
        return st.dictionaries(values_of(kind.key_type), values_of(kind.value_type), max_size=3)
    if isinstance(kind, inspect.BoolType):
        return st.booleans()
    assert isinstance(kind, inspect.StructType), kind
    return messages_of(kind.cls)


def messages_of(message: type[Message]) -> st.SearchStrategy[Message]:
    fields = msgspec.inspect.type_info(message).fields  # type: ignore[attr-defined]
    return st.builds(message, *(values_of(field.type) for field in fields))


peer_messages = st.one_of([messages_of(type(message)) for message, _ in PEER_SAMPLES.values()])
client_messages = st.one_of([messages_of(type(message)) for message, _ in CLIENT_SAMPLES.values()])


@given(peer_messages)
def test_every_message_between_agents_survives_the_round_trip(message: Message) -> None:
    decoded = decode_peer(encode(message))
    assert decoded == message
    assert type(decoded) is type(message)


@given(client_messages)
def test_every_message_of_a_client_survives_the_round_trip(message: Message) -> None:
    decoded = decode_client(encode(message))
    assert decoded == message
    assert type(decoded) is type(message)


@given(peer_messages | client_messages, st.data())
def test_a_truncated_or_lengthened_body_is_refused(message: Message, data: st.DataObject) -> None:
    body = encode(message)
    damaged = data.draw(st.one_of(st.integers(0, len(body) - 1).map(lambda n: body[:n]), st.just(body + b"\0")))
    for decode in (decode_peer, decode_client):
        with pytest.raises(RemoteProtocolError):
            decode(damaged)


@given(
    peer_messages | client_messages, st.lists(st.tuples(st.integers(0), st.integers(1, 255)), min_size=1, max_size=4)
)
def test_damage_anywhere_is_a_message_or_a_protocol_error(message: Message, flips: list[tuple[int, int]]) -> None:
    body = bytearray(encode(message))
    for place, mask in flips:
        body[place % len(body)] ^= mask
    for decode in (decode_peer, decode_client):
        try:
            decoded = decode(bytes(body))
        except RemoteProtocolError:
            continue
        assert isinstance(decoded, Message)


def peak_bytes(decode: Callable[[bytes], object], body: bytes) -> int:
    """The most memory that decoding had at a time; the body is refused or not."""
    tracemalloc.start()
    try:
        decode(body)
    except RemoteProtocolError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


ANNOUNCED = [(1 << 32) - 1, (1 << 31) - 1, 1 << 24]
FORMS = {"array": b"\xdd", "map": b"\xdf", "bin": b"\xc6", "str": b"\xdb", "ext": b"\xc9"}


@pytest.mark.parametrize("n", ANNOUNCED)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", [*PEER_SAMPLES, *(name for name in CLIENT_SAMPLES if name not in PEER_SAMPLES)])
def test_an_announced_length_allocates_nothing(name: str, form: bytes, n: int) -> None:
    """In the place of every field of every message."""
    samples, decode = (PEER_SAMPLES, decode_peer) if name in PEER_SAMPLES else (CLIENT_SAMPLES, decode_client)
    fields = msgspec.msgpack.decode(encode(samples[name][0]))  # type: ignore[arg-type]
    hostile = form + struct.pack(">I", n)
    bodies = [hostile]
    for place in range(1, len(fields)):
        ahead = msgspec.msgpack.encode(fields[:place])[1:]
        bodies.append(bytes([0x90 | len(fields)]) + ahead + hostile)
    for body in bodies:
        assert peak_bytes(decode, body) < OVERHEAD_BYTES


def array_of(n: int, item: bytes) -> bytes:
    return b"\xdd" + struct.pack(">I", n) + item * n


def filled_bodies() -> dict[str, bytes]:
    """Bodies as large as a frame may have, full of the smallest items that become objects."""
    room = BODY_BYTES_MAX - 64
    update = encode(UPDATE)
    keys = b"".join(b"\xa4%c%c%c%c\xa0" % (65, 65 + i // 3600, 65 + i // 60 % 60, 65 + i % 60) for i in range(200_000))
    return {
        "updates": b"\x92\x08" + array_of(room // len(update), update),
        "members": b"\x94\x03\xa0" + encode(INFO) + array_of(room // len(encode(INFO)), encode(INFO)),
        "a field that does not exist": b"\x94\x3d\xa0\xa0" + array_of(room, b"\x90"),
        "a description": b"\x99\x28\xa0\xc4\x00\xdf" + struct.pack(">I", 200_000) + keys + b"\1\1\0\0\1",
    }


@pytest.mark.parametrize("name", filled_bodies())
def test_no_frame_makes_its_reader_hold_more_than_its_own_size_again(name: str) -> None:
    body = filled_bodies()[name]
    for decode in (decode_peer, decode_client):
        assert peak_bytes(decode, body) <= len(body)
