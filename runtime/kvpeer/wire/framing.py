"""Frames: the 20-byte header that carries every message, and an incremental reader of them.

The same frames run between agents (TLS over TCP) and between a client and its agent (Unix socket). This module turns
bytes into frames and frames into bytes; it has no socket and no clock, so both the agent's event loop and the client's
blocking sockets use it. It does not look into bodies: that is `kvpeer.wire.codec`.

docs/wire.md has the byte table. The first seven bytes (body length, magic, wire version) keep their place in every
version, so that two sides of different versions can tell each other what is wrong.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from kvpeer.model import LocalProtocolError, RemoteProtocolError

__all__ = [
    "BODY_BYTES_MAX",
    "DEADLINE_MS_MAX",
    "FRAME_BYTES_MAX",
    "HEADER_BYTES",
    "MAGIC",
    "WIRE_VERSION",
    "Frame",
    "FrameHeader",
    "FrameKind",
    "FrameReader",
    "WireVersionError",
    "pack_frame",
    "parse_header",
    "remaining_ms",
]

MAGIC = b"KV"
WIRE_VERSION = 1

_HEADER = struct.Struct("<I2sBBQI")
HEADER_BYTES = _HEADER.size

FRAME_BYTES_MAX = 4 << 20
"""Header and body together. The largest message is a prompt of a million tokens in pages of 16 (65,536 keys: 1 MiB) or
a repair of a full partition (29 bytes an entry); four times that leaves room, and it is also what gRPC accepts by
default. A peer can make a reader hold this much a connection and no more."""

BODY_BYTES_MAX = FRAME_BYTES_MAX - HEADER_BYTES

DEADLINE_MS_MAX = 600_000
"""Ten minutes: longer than any request of this protocol is worth waiting for, short enough that a handler whose asker
has vanished does not stay for good."""


class FrameKind(IntEnum):
    """What a frame is for. A request is answered by one reply or one error with its id; a notice is never answered."""

    REQUEST = 1
    REPLY = 2
    ERROR = 3
    """The body is a Refusal."""
    NOTICE = 4


class WireVersionError(RemoteProtocolError):
    """The other side speaks another wire version; the message names both."""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """A checked header: `body_bytes` is within the limit and `kind` is known."""

    kind: FrameKind
    id: int
    deadline_ms: int
    body_bytes: int


@dataclass(frozen=True, slots=True)
class Frame:
    """One whole frame. `deadline_ms` is the time that the sender still had when it sent a request, 0 for all other
    kinds."""

    kind: FrameKind
    id: int
    deadline_ms: int
    body: bytes


def remaining_ms(remaining_s: float) -> int:
    """The `deadline_ms` of a request that has this many seconds left: whole milliseconds, rounded down, within 1 and
    DEADLINE_MS_MAX. (Whether any time is left at all is for the caller to check before it sends.)"""
    return max(1, min(int(remaining_s * 1000), DEADLINE_MS_MAX))


def pack_frame(kind: FrameKind, frame_id: int, body: bytes, deadline_ms: int = 0) -> bytes:
    """The frame's bytes, ready to be sent; the body is copied once.

    Raises:
        LocalProtocolError: the body is beyond BODY_BYTES_MAX, the id does not fit 64 bits, or the deadline does not
        suit the kind.
    """
    if len(body) > BODY_BYTES_MAX:
        raise LocalProtocolError(
            f"a body of {len(body)} bytes is beyond BODY_BYTES_MAX ({BODY_BYTES_MAX}): send smaller batches"
        )
    if not 0 <= frame_id < 1 << 64:
        raise LocalProtocolError(f"frame id {frame_id} does not fit 64 bits")
    fault = _deadline_fault(kind, deadline_ms)
    if fault:
        raise LocalProtocolError(fault)
    return _HEADER.pack(len(body), MAGIC, WIRE_VERSION, kind, frame_id, deadline_ms) + body


def parse_header(
    header: bytes | bytearray | memoryview, offset: int = 0, body_bytes_max: int = BODY_BYTES_MAX
) -> FrameHeader:
    """The checked header in the HEADER_BYTES bytes at `offset`. Nothing is allocated for the body.

    Raises:
        WireVersionError: the frame is of another wire version.
        RemoteProtocolError: anything else is wrong with it; the message names the fault.
    """
    body_bytes, magic, version, kind, frame_id, deadline_ms = _HEADER.unpack_from(header, offset)
    if magic != MAGIC:
        raise RemoteProtocolError(f"not a kvpeer frame: magic is {magic!r} instead of {MAGIC!r}")
    if version != WIRE_VERSION:
        raise WireVersionError(
            f"the other side speaks wire version {version}, this side {WIRE_VERSION}: run the same release on both"
        )
    if body_bytes > body_bytes_max:
        raise RemoteProtocolError(
            f"a frame announces a body of {body_bytes} bytes, beyond the limit of {body_bytes_max}"
        )
    try:
        known_kind = FrameKind(kind)
    except ValueError:
        raise RemoteProtocolError(f"unknown frame kind {kind}") from None
    fault = _deadline_fault(known_kind, deadline_ms)
    if fault:
        raise RemoteProtocolError(fault)
    return FrameHeader(known_kind, frame_id, deadline_ms, body_bytes)


class FrameReader:
    """Cuts a byte stream into frames. It keeps the bytes of at most one unfinished frame (<= FRAME_BYTES_MAX) between
    calls.

    Not thread-safe. After a fault the stream cannot be trusted any more: every later call raises the same fault.
    `body_bytes_max` may be changed between calls: a listener starts low, until it knows who speaks.
    """

    def __init__(self, body_bytes_max: int = BODY_BYTES_MAX) -> None:
        self.body_bytes_max = body_bytes_max
        self._buffer = bytearray()
        self._fault: RemoteProtocolError | None = None

    @property
    def n_buffered(self) -> int:
        """Bytes of an unfinished frame: not zero at the end of a stream means that it was cut off."""
        return len(self._buffer)

    def feed(self, chunk: bytes | bytearray | memoryview) -> list[Frame]:
        """The frames that this chunk completes, in order; their bodies are copies, the chunk may be reused.

        Raises:
            RemoteProtocolError: as `parse_header`, as soon as the header is there. Frames before it in the chunk are
            lost.
        """
        if self._fault is not None:
            raise self._fault
        self._buffer += chunk
        try:
            return self._cut()
        except RemoteProtocolError as fault:
            self._fault = fault
            self._buffer.clear()
            raise

    def _cut(self) -> list[Frame]:
        frames: list[Frame] = []
        start = 0
        while len(self._buffer) - start >= HEADER_BYTES:
            header = parse_header(self._buffer, start, self.body_bytes_max)
            body_start = start + HEADER_BYTES
            end = body_start + header.body_bytes
            if end > len(self._buffer):
                break
            with memoryview(self._buffer) as view:
                frames.append(Frame(header.kind, header.id, header.deadline_ms, bytes(view[body_start:end])))
            start = end
        del self._buffer[:start]
        return frames


def _deadline_fault(kind: FrameKind, deadline_ms: int) -> str:
    if kind is not FrameKind.REQUEST:
        return f"a {kind.name.lower()} frame has a deadline ({deadline_ms} ms)" if deadline_ms else ""
    if not 1 <= deadline_ms <= DEADLINE_MS_MAX:
        return f"a request's deadline of {deadline_ms} ms is not within 1 and DEADLINE_MS_MAX ({DEADLINE_MS_MAX})"
    return ""
