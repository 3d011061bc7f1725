"""The pool gives clients what they may have and nothing more, and refuses steps that a slot's life does not have."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import numpy as np
import pytest
from kvpeer.model import CapacityError, ConfigError, LocalProtocolError
from kvpeer.native import PART_DTYPE, DataServer, Pool, ServerLimits
from pool_pages import EXTENT_BYTES, RUN_ID, key_of, new_pool, u4, whole_page

CHILD_DEADLINE_S = 30

CHILD = """
import json, mmap, os, socket, sys

def attempt(action):
    try:
        action()
        return "done"
    except (PermissionError, OSError) as error:
        return type(error).__name__

own_end = socket.socket(fileno=int(sys.argv[1]))
_, (payload_fd, header_fd), _, _ = socket.recv_fds(own_end, 1, 2)
payload_bytes, header_bytes = os.fstat(payload_fd).st_size, os.fstat(header_fd).st_size
read_write = mmap.PROT_READ | mmap.PROT_WRITE
results = {
    "map headers for writing": attempt(lambda: mmap.mmap(header_fd, 4096, mmap.MAP_SHARED, read_write)),
    "write headers": attempt(lambda: os.pwrite(header_fd, b"x", 0)),
    "reopen headers and map them": attempt(
        lambda: mmap.mmap(os.open(f"/proc/self/fd/{header_fd}", os.O_RDWR), 4096, mmap.MAP_SHARED, read_write)),
    "shrink headers": attempt(lambda: os.ftruncate(header_fd, 4096)),
    "shrink payload": attempt(lambda: os.ftruncate(payload_fd, 4096)),
    "grow payload": attempt(lambda: os.ftruncate(payload_fd, 2 * payload_bytes)),
    "map headers for reading": attempt(lambda: mmap.mmap(header_fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ)),
    "magic": mmap.mmap(header_fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ)[:4].decode(),
}
payload = mmap.mmap(payload_fd, payload_bytes, mmap.MAP_SHARED, read_write)
payload[7:12] = b"child"
print(json.dumps(results))
"""


@pytest.fixture
def pool():
    with new_pool() as pool:
        yield pool


def test_another_process_can_write_payload_but_only_read_headers(pool):
    pool.mark_writing(u4(0), u4(1))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b"f"], list(pool.fds))
        child = subprocess.run(
            [sys.executable, "-c", CHILD, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            capture_output=True,
            timeout=CHILD_DEADLINE_S,
            check=True,
        )
    assert json.loads(child.stdout) == {
        "map headers for writing": "PermissionError",
        "write headers": "PermissionError",
        "reopen headers and map them": "PermissionError",
        "shrink headers": "PermissionError",
        "shrink payload": "PermissionError",
        "grow payload": "PermissionError",
        "map headers for reading": "done",
        "magic": "KVPS",
    }
    assert pool.payload_view()[7:12].tobytes() == b"child"
    pool.mark_committed(u4(0), u4(1), key_of(0), whole_page([1], 100))


def test_capacity_is_rounded_down_to_extents():
    with Pool(3 * EXTENT_BYTES - 1, EXTENT_BYTES, RUN_ID) as pool:
        assert pool.n_extents == 2
        assert pool.payload_bytes == len(pool.payload_view()) == 2 * EXTENT_BYTES


def test_refuses_sizes_that_do_not_fit_and_says_which():
    with pytest.raises(LocalProtocolError, match="1000 bytes in extents of 1048576"):
        Pool(1000, EXTENT_BYTES, RUN_ID)
    with pytest.raises(LocalProtocolError, match="run_id must have 16 bytes, not 3"):
        Pool(EXTENT_BYTES, EXTENT_BYTES, b"abc")


def test_huge_pages_that_nobody_reserved_are_an_error_at_start():
    with pytest.raises((ConfigError, CapacityError), match="huge pages of 1073741824"):
        Pool(4096 << 30, 1 << 30, RUN_ID, hugepage_bytes=1 << 30)


def test_refuses_steps_that_a_slots_life_does_not_have(pool):
    parts = whole_page([1], 100)
    with pytest.raises(LocalProtocolError, match="mark 1 slots committed"):
        pool.mark_committed(u4(0), u4(1), key_of(0), parts)
    with pytest.raises(LocalProtocolError, match="mark_withdrawn of 1 slots"):
        pool.mark_withdrawn(u4(0), u4(1))
    pool.mark_writing(u4(0), u4(1))
    with pytest.raises(LocalProtocolError, match="mark_writing"):
        pool.mark_writing(u4(0), u4(1))
    with pytest.raises(LocalProtocolError, match="assign extent 0"):
        pool.assign_extent(0, 4096)
    pool.mark_committed(u4(0), u4(1), np.frombuffer(key_of(0), np.uint8).reshape(1, 16), parts)
    with pytest.raises(LocalProtocolError, match="parts must be"):
        pool.mark_committed(u4(0), u4(1), key_of(0), np.zeros(1, PART_DTYPE))
    with pytest.raises(LocalProtocolError, match="touch extent 2"):
        pool.touch_extent(2)


def test_a_closed_pool_says_so_and_closes_once(pool):
    pool.close()
    pool.close()
    assert pool.is_closed
    with pytest.raises(LocalProtocolError, match="Pool is closed"):
        pool.mark_writing(u4(0), u4(1))


def test_a_pool_outlives_its_server(pool):
    limits = ServerLimits(
        connections_max=4, pages_max=64, idle_timeout_ms=1000, io_timeout_ms=1000, handshake_timeout_ms=1000
    )
    with DataServer(pool, "127.0.0.1", 0, limits) as server:
        assert server.port > 0
        with pytest.raises(LocalProtocolError, match="close its DataServer first"):
            pool.close()
    pool.close()
