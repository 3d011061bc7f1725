"""Messages <-> bytes: the bodies of frames, as MessagePack arrays that start with the message's tag.

`encode` takes any message of `kvpeer.wire.messages`. There is one decoder a channel, because a message of the other
channel is as wrong as garbage: `decode_peer` between agents, `decode_client` between a client and its agent. Decoding
checks types, fixed lengths and ranges; packed columns are checked against each other by `kvpeer.wire.packing`. All
functions are thread-safe.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kvpeer.model import RemoteProtocolError
from kvpeer.wire.messages import ClientMessage, Message, PeerMessage

__all__ = ["decode_client", "decode_peer", "encode"]

_M = TypeVar("_M")

_encoder = msgspec.msgpack.Encoder()
_peer_decoder: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)
_client_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)


def encode(message: Message) -> bytes:
    """The message's body; its size is checked where it is put into a frame."""
    return _encoder.encode(message)


def decode_peer(body: bytes) -> PeerMessage:
    """The message between agents in this body.

    Raises:
        RemoteProtocolError: the body is not one; the message names the fault.
    """
    return _decode(_peer_decoder, body, "agents")


def decode_client(body: bytes) -> ClientMessage:
    """The message between a client and its agent in this body.

    Raises:
        RemoteProtocolError: the body is not one; the message names the fault.
    """
    return _decode(_client_decoder, body, "a client and its agent")


def _decode(decoder: msgspec.msgpack.Decoder[_M], body: bytes, sides: str) -> _M:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        # RecursionError: thousands of nested arrays in a field that this version does not know.
        raise RemoteProtocolError(f"not a message between {sides}: {fault}") from fault
