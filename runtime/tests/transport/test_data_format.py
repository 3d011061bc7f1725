"""The data connection speaks exactly the bytes of docs/formats.md: here they are written and read by hand."""

from __future__ import annotations

import socket
import struct

import pytest
from kvpeer.native import crc64

from transport.page_pool import READER_ID, SERVER_PAGES_MAX, SLOT_BYTES, Serving, key_of, page_bytes_of, soon

HELLO = struct.Struct("<4sHH32s16s16s")
HELLO_ANSWER = struct.Struct("<4sHH16sII")
REQUEST = struct.Struct("<4sIII")
PAGE_REQUEST = struct.Struct("<II16sII")
PREFIX = struct.Struct("<4sHHII")
SLOT_HEADER = struct.Struct("<4sBBHII16s16sB3sIII")
PART = struct.Struct("<IIQ")


@pytest.fixture
def serving(pages):
    opened = Serving(pages)
    yield opened
    opened.server.close()


def take(connection: socket.socket, layout: struct.Struct) -> tuple:
    return layout.unpack(connection.recv(layout.size, socket.MSG_WAITALL))


def test_two_pages_and_a_stale_one_are_answered_byte_for_byte(serving, pages):
    run_id = serving.producer.producer_id
    locations = [pages.publish(2, 7), pages.publish(1, 3)]
    with socket.create_connection((serving.producer.host, serving.producer.data_port), timeout=20) as connection:
        capability = serving.capability(soon())
        connection.sendall(HELLO.pack(b"KVPH", 1, 0, capability, READER_ID, run_id))
        assert take(connection, HELLO_ANSWER) == (b"KVPA", 1, 0, run_id, SERVER_PAGES_MAX, 0)

        connection.sendall(REQUEST.pack(b"KVPR", 4711, 3, 0))
        for slot, generation in ((2, 7), (2, 6), (1, 3)):
            connection.sendall(PAGE_REQUEST.pack(slot, generation, key_of(slot, generation), SLOT_BYTES, 0))

        payloads = [page_bytes_of(location.key).tobytes() for location in locations]
        parts = [PART.pack(0, SLOT_BYTES, crc64(payload)) for payload in payloads]
        headers = [
            header_of(run_id, location.generation, location.key, part)
            for location, part in zip(locations, parts, strict=True)
        ]
        expected = [
            PREFIX.pack(b"KVPP", 0, 1, 4711, 0), headers[0], parts[0],
            PREFIX.pack(b"KVPP", 1, 0, 4711, 1),
            PREFIX.pack(b"KVPP", 0, 1, 4711, 2), headers[1], parts[1],
            *payloads, *headers,
        ]  # fmt: skip
        for piece in expected:
            assert connection.recv(len(piece), socket.MSG_WAITALL) == piece


def header_of(run_id: bytes, generation: int, key: bytes, part: bytes) -> bytes:
    fields = (b"KVPS", 1, 2, 1, generation, SLOT_BYTES, key, run_id, 1, bytes(3), SLOT_BYTES, crc64(part) & 0xFFFFFFFF)
    header = SLOT_HEADER.pack(*fields, 0)
    return header[:-4] + struct.pack("<I", crc64(header[:-4]) & 0xFFFFFFFF)


def test_a_refused_reader_learns_nothing_about_the_producer(serving):
    with socket.create_connection((serving.producer.host, serving.producer.data_port), timeout=20) as connection:
        connection.sendall(HELLO.pack(b"KVPH", 1, 0, bytes(32), READER_ID, serving.producer.producer_id))
        assert take(connection, HELLO_ANSWER) == (b"KVPA", 1, 1, bytes(16), 0, 0)
        assert connection.recv(1) == b""
