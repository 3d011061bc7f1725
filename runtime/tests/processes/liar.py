"""A whole agent of the cluster whose data server lies: it stands before the real one and changes what passes.

Runs as `python liar.py <file>`, with the agent's settings in the environment. The file holds the name of the lie,
which is read anew for every connection and request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpeer.agent.config import load
from kvpeer.agent.main import Agent, _main
from kvpeer.native import DataServer, crc64

HELLO_BYTES = 72
ANSWER_BYTES = 32
REQUEST_BYTES = 16
REQUEST_PAGE_BYTES = 32
PREFIX_BYTES = 16
HEADER_BYTES = 64
PART_BYTES = 16
RUN_PAGES_MAX = 16
RUN_BYTES = 1 << 20

_log = logging.getLogger("liar")


@dataclasses.dataclass
class PageAnswer:
    """One page on its way to the reader (docs/formats.md has the tables)."""

    prefix: bytearray
    header: bytearray = dataclasses.field(default_factory=bytearray)
    table: bytearray = dataclasses.field(default_factory=bytearray)
    payload: bytearray = dataclasses.field(default_factory=bytearray)
    trailer: bytearray = dataclasses.field(default_factory=bytearray)

    def set_in_headers(self, offset: int, layout: str, value: int) -> None:
        """Both headers say this, under a right checksum."""
        for header in (self.header, self.trailer):
            struct.pack_into(layout, header, offset, value)
            struct.pack_into("<I", header, 60, crc64(header[:60]) & 0xFFFFFFFF)

    @property
    def front(self) -> bytearray:
        return self.prefix + self.header + self.table


def _flip_byte(page: PageAnswer) -> None:
    page.payload[len(page.payload) // 2] ^= 1


def _swap_payload(page: PageAnswer) -> None:
    page.payload[:] = bytes(len(page.payload))


def _refuse(page: PageAnswer) -> None:
    struct.pack_into("<HH", page.prefix, 4, 2, 0)
    page.header = page.table = page.payload = page.trailer = bytearray()


def _change_trailer(page: PageAnswer) -> None:
    (generation,) = struct.unpack_from("<I", page.trailer, 8)
    struct.pack_into("<I", page.trailer, 8, generation + 1)


PAGE_LIES: dict[str, Callable[[PageAnswer], None]] = {
    "one wrong byte": _flip_byte,
    "zeros instead of the payload": _swap_payload,
    "shorter length": lambda page: page.set_in_headers(12, "<I", len(page.payload) - 4096),
    "length of 4 GiB": lambda page: page.set_in_headers(12, "<I", 0xFFFFFFFF),
    "old generation": lambda page: page.set_in_headers(8, "<I", struct.unpack_from("<I", page.header, 8)[0] - 1),
    "another key": lambda page: page.set_in_headers(16, "<B", page.header[16] ^ 1),
    "another run": lambda page: page.set_in_headers(32, "<B", page.header[32] ^ 1),
    "withdrawn": lambda page: page.set_in_headers(5, "<B", 3),
    "reused while it was sent": _change_trailer,
    "65535 parts": lambda page: struct.pack_into("<H", page.prefix, 6, 0xFFFF),
    "no parts": lambda page: struct.pack_into("<H", page.prefix, 6, 0),
    "wrong magic": lambda page: struct.pack_into("<I", page.prefix, 0, 0),
    "another request": lambda page: struct.pack_into("<I", page.prefix, 8, 0xFFFFFFFF),
    "another page": lambda page: struct.pack_into("<I", page.prefix, 12, 0xFFFFFFFF),
    "unknown status": lambda page: struct.pack_into("<H", page.prefix, 4, 9),
    "refused pages": _refuse,
}

HONEST = "nothing but the truth"
SILENT_HELLO, SILENT = "never answers the hello", "never answers a request"
REFUSED, CLOSES, GARBAGE = "refuses the reader", "closes at once", "garbage instead of the hello's answer"
TRUNCATED, MORE = "half an answer", "more than was asked for"
ABSURD_LIMIT = "takes 4 Gi pages in a request"

HELLO_LIES = (SILENT_HELLO, REFUSED, CLOSES, GARBAGE)
RIGHT_PAGES_LIES = (TRUNCATED, MORE, ABSURD_LIMIT)
"""Some or all pages are right all the same."""


class LyingServer:
    """Stands before the real data server; everything else is the real one's."""

    def __init__(self, real: DataServer, host: str, lie: Callable[[], str]) -> None:
        self._real = real
        self._host = host
        self._lie = lie
        self._listener = socket.create_server((host, 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _accept(self) -> None:
        while True:
            reader, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(reader,), daemon=True).start()

    def _serve(self, reader: socket.socket) -> None:
        with contextlib.suppress(EOFError, ConnectionError), reader:
            hello = _receive(reader, HELLO_BYTES)
            if not self._greets(reader):
                return
            with socket.create_connection((self._host, self._real.port)) as producer:
                producer.sendall(hello)
                answer = bytearray(_receive(producer, ANSWER_BYTES))
                if self._lie() == ABSURD_LIMIT:
                    struct.pack_into("<I", answer, 24, 0xFFFFFFFF)
                reader.sendall(answer)
                while True:
                    self._answer(reader, producer)

    def _greets(self, reader: socket.socket) -> bool:
        lie = self._lie()
        _log.info("connected, and tells: %s", lie)
        if lie == SILENT_HELLO:
            reader.recv(1)  # until the reader gives up
        elif lie == REFUSED:
            reader.sendall(struct.pack("<4sHH16sII", b"KVPA", 1, 1, bytes(16), 0, 0))
        elif lie == GARBAGE:
            reader.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(ANSWER_BYTES))
        return lie not in HELLO_LIES

    def _answer(self, reader: socket.socket, producer: socket.socket) -> None:
        request = _receive(reader, REQUEST_BYTES)
        (n_pages,) = struct.unpack_from("<I", request, 8)
        pages = _receive(reader, n_pages * REQUEST_PAGE_BYTES)
        lie = self._lie()
        if lie in HELLO_LIES:
            raise EOFError  # a connection of better days
        _log.info("asked, and tells: %s", lie)
        if lie == SILENT:
            reader.recv(1)
            raise EOFError
        producer.sendall(request + pages)
        lengths = [struct.unpack_from("<I", pages, idx * REQUEST_PAGE_BYTES + 24)[0] for idx in range(n_pages)]
        change = PAGE_LIES.get(lie, lambda page: None)
        packed = b""
        while lengths:
            run = _run(producer, lengths)
            for page in run:
                if page.header:
                    change(page)
            packed += b"".join(
                [*(page.front for page in run), *(page.payload for page in run), *(page.trailer for page in run)]
            )
        if lie == TRUNCATED:
            reader.sendall(packed[: len(packed) // 2])
            raise EOFError
        reader.sendall(packed + bytes(100 if lie == MORE else 0))


def _run(producer: socket.socket, lengths: list[int]) -> list[PageAnswer]:
    """The next run of pages; takes their lengths off the front."""
    run: list[PageAnswer] = []
    sent: dict[int, int] = {}  # index in the run -> payload bytes
    while lengths and len(sent) < RUN_PAGES_MAX and sum(sent.values()) < RUN_BYTES:
        page = PageAnswer(_receive(producer, PREFIX_BYTES))
        length = lengths.pop(0)
        status, n_parts = struct.unpack_from("<HH", page.prefix, 4)
        if status == 0:
            page.header = _receive(producer, HEADER_BYTES)
            page.table = _receive(producer, n_parts * PART_BYTES)
            sent[len(run)] = length
        run.append(page)
    for idx, length in sent.items():
        run[idx].payload = _receive(producer, length)
    for idx in sent:
        run[idx].trailer = _receive(producer, HEADER_BYTES)
    return run


def _receive(connection: socket.socket, n_bytes: int) -> bytearray:
    received = bytearray()
    while len(received) < n_bytes:
        chunk = connection.recv(n_bytes - len(received))
        if not chunk:
            raise EOFError
        received += chunk
    return received


class LyingAgent(Agent):
    """An agent of which nothing else is false."""

    lie_path = Path()

    def _build_server(self) -> Any:
        return LyingServer(super()._build_server(), self.config.agent.host, self.lie_path.read_text)


if __name__ == "__main__":
    import asyncio

    import kvpeer.agent.main as agent_main

    LyingAgent.lie_path = Path(sys.argv[1])
    agent_main.Agent = LyingAgent
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    asyncio.run(_main(load(None, os.environ), is_embedded=False))
