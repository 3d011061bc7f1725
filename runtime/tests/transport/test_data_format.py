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
SLOT_HEADER = struct.Struct("<4sBBHII16s16sB7sII")
PART = struct.Struct("<IIQ")


@pytest.fixture
def serving(pages):
    opened = Serving(pages)
    yield opened
    opened.server.close()


def take(connection: socket.socket, layout: struct.Struct) -> tuple:
    return layout.unpack(connection.recv(layout.size, socket.MSG_WAITALL))


def test_a_page_and_a_stale_one_are_answered_byte_for_byte(serving, pages):
    run_id = serving.producer.producer_id
    location = pages.publish(2, 7)
    with socket.create_connection((serving.producer.host, serving.producer.data_port), timeout=20) as connection:
        capability = serving.capability(soon())
        connection.sendall(HELLO.pack(b"KVPH", 1, 0, capability, READER_ID, run_id))
        assert take(connection, HELLO_ANSWER) == (b"KVPA", 1, 0, run_id, SERVER_PAGES_MAX, 0)

        connection.sendall(REQUEST.pack(b"KVPR", 4711, 2, 0))
        connection.sendall(PAGE_REQUEST.pack(2, 7, location.key, SLOT_BYTES, 0))
        connection.sendall(PAGE_REQUEST.pack(2, 6, key_of(2, 6), SLOT_BYTES, 0))

        page = page_bytes_of(location.key).tobytes()
        part = PART.pack(0, SLOT_BYTES, crc64(page))
        fields = (b"KVPS", 1, 2, 1, 7, SLOT_BYTES, location.key, run_id, 1, bytes(7), crc64(part) & 0xFFFFFFFF)
        header = SLOT_HEADER.pack(*fields, 0)
        header = header[:-4] + struct.pack("<I", crc64(header[:-4]) & 0xFFFFFFFF)
        assert take(connection, PREFIX) == (b"KVPP", 0, 1, 4711, 0)
        expected = header + part + page + header
        assert connection.recv(len(expected), socket.MSG_WAITALL) == expected
        assert take(connection, PREFIX) == (b"KVPP", 1, 0, 4711, 1)


def test_a_refused_reader_learns_nothing_about_the_producer(serving):
    with socket.create_connection((serving.producer.host, serving.producer.data_port), timeout=20) as connection:
        connection.sendall(HELLO.pack(b"KVPH", 1, 0, bytes(32), READER_ID, serving.producer.producer_id))
        assert take(connection, HELLO_ANSWER) == (b"KVPA", 1, 1, bytes(16), 0, 0)
        assert connection.recv(1) == b""
