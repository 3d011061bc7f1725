"""Changes of frames and messages that leave the rest intact: a column longer than its neighbours, a number at a limit.

Chance alone changes a length and not the length's own prefix; almost all such inputs are refused at the first look.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from random import Random
from typing import Any

import msgspec

__all__ = ["changed_body", "changed_frames", "changed_pem", "changed_text"]

_HEADER = struct.Struct("<I16s")  # a frame's: the body's length, and what is not looked at here

_WORD = re.compile(rb"\w+")
_EDGES = (
    0,
    1,
    -1,
    255,
    4095,
    4096,
    65535,
    65536,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    (1 << 63) - 1,
    1 << 63,
)
_PEM = re.compile(rb"(-----BEGIN CERTIFICATE-----\n)([A-Za-z0-9+/=\n]+)")
_COUNTS = (1, 1, 2, 4, 8, 16, 20, 32)  # bytes of one item of a column, or of less


def changed_frames(stream: bytes, random: Random) -> bytes:
    """The stream with the body of one of its frames changed, if there is one; that frame's length is right again."""
    frames: list[tuple[bytes, bytes]] = []
    start = 0
    while start + _HEADER.size <= len(stream):
        n_bytes, rest = _HEADER.unpack_from(stream, start)
        start += _HEADER.size
        frames.append((rest, stream[start : start + n_bytes]))
        start += n_bytes
    if not frames:
        return stream
    idx = random.randrange(len(frames))
    frames[idx] = frames[idx][0], changed_body(frames[idx][1], random)
    if random.random() < 0.2:
        frames.insert(idx, random.choice(frames))
    return b"".join(_HEADER.pack(len(body), rest) + body for rest, body in frames)


def changed_body(body: bytes, random: Random) -> bytes:
    """The message with one of its values changed; what is no message stays as it is."""
    try:
        fields = msgspec.msgpack.decode(body)
        return msgspec.msgpack.encode(_changed(fields, random))
    except (ValueError, OverflowError, RecursionError):  # DecodeError is a ValueError
        return body


def changed_text(text: bytes, random: Random) -> bytes:
    """The text with one of its words or numbers changed."""
    words = [match.span() for match in _WORD.finditer(text)]
    if not words:
        return text
    start, stop = random.choice(words)
    word = text[start:stop]
    n = random.choice(_COUNTS)
    others = [word[:-n], word[n:], word + word[-n:], word * n, b"", b"%d" % random.choice(_EDGES), b"[" * n, b'"\xff"']
    return text[:start] + random.choice(others) + text[stop:]


def changed_pem(text: bytes, random: Random) -> bytes:
    """The file with one byte of its certificate changed, under the text that encodes it."""
    match = _PEM.search(text)
    if match is None:
        return changed_text(text, random)
    try:
        der = bytearray(base64.b64decode(match[2]))
    except binascii.Error:  # changed before: padding within, or too few characters
        return changed_text(text, random)
    if not der:
        return changed_text(text, random)
    der[random.randrange(len(der))] = random.choice((random.randrange(256), 0, 1, 255))
    return text[: match.start(2)] + base64.encodebytes(der) + text[match.end(2) :]


def _changed(value: Any, random: Random) -> Any:
    if isinstance(value, bytes | str):
        return _resized(value, random)
    if isinstance(value, int):
        return random.choice([value - 1, value + 1, value * 2, *_EDGES])
    if isinstance(value, list) and value:
        if random.random() < 0.1:
            return random.choice([value[:-1], value + value[-1:], value * 2])
        idx = random.randrange(len(value))
        return [*value[:idx], _changed(value[idx], random), *value[idx + 1 :]]
    return random.choice([None, 0, b"", "", [], {}])


def _resized(value: Any, random: Random) -> Any:
    n = random.choice(_COUNTS)
    zero = value[:0] + ("\0" if isinstance(value, str) else b"\0")
    start = random.randrange(len(value) + 1)
    return random.choice(
        [value[:-n], value + zero * n, value * n, value[:start] + zero + value[start + 1 :], value[n:]]
    )
