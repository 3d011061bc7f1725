"""The first words of an agent to its client: whatever they are, the client gets an error that it can wait out."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest
from kvpeer.client.link import open_link
from kvpeer.client.settings import Registration
from kvpeer.model import RemoteProtocolError
from kvpeer.native import Pool
from kvpeer.wire.codec import encode
from kvpeer.wire.framing import FrameKind, pack_frame
from kvpeer.wire.messages import ClientWelcome

EXTENT_BYTES = 1 << 20
AGENT_ID = b"a" * 16
REGISTRATION = Registration("raw", b"n" * 32, {}, 4096, 1, 0, 0, 4096)


def open_with(welcome: ClientWelcome, path: str) -> None:
    """Opens a link to an agent that says this, and closes it."""
    with Pool(EXTENT_BYTES, EXTENT_BYTES, AGENT_ID) as pool, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                socket.send_fds(connection, [pack_frame(FrameKind.REPLY, 0, encode(welcome))], list(pool.fds))
                connection.recv(1)

        agent = threading.Thread(target=answer)
        agent.start()
        try:
            open_link(path, REGISTRATION, time.monotonic() + 10).close()
        finally:
            agent.join(10)


def test_a_way_to_verify_that_this_release_does_not_know_is_refused_and_leaves_nothing_open(tmp_path: Path) -> None:
    known = ClientWelcome(AGENT_ID, EXTENT_BYTES, EXTENT_BYTES, 4096, 2, 64)
    open_with(known, str(tmp_path / "known"))
    n_open = len(os.listdir("/proc/self/fd"))
    unknown = ClientWelcome(AGENT_ID, EXTENT_BYTES, EXTENT_BYTES, 4096, 3, 64)
    with pytest.raises(RemoteProtocolError, match="in way 3, which this client does not know"):
        open_with(unknown, str(tmp_path / "unknown"))
    assert len(os.listdir("/proc/self/fd")) == n_open
