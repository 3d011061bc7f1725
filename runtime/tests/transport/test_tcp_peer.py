"""What only tcp has: connections that are few, admitted, reused, replaced, and dropped when they break."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest
from kvpeer.model import AdmissionRefusedError, CapacityError, Outcome, PeerUnavailableError, Verify
from kvpeer.native import crc64
from kvpeer.transport import CHUNK_BYTES_MAX, FetchBatch, FetchResult, NotAskedError, Producer, TcpPeer

from transport.page_pool import (
    READER_ID,
    SERVER_PAGES_MAX,
    SLOT_BYTES,
    Destinations,
    Location,
    Serving,
    page_bytes_of,
    soon,
)

TOLERANCE_S = 1.0
"""How much later than its deadline a call may return on a busy machine."""


@pytest.fixture
def serving(pages):
    opened = Serving(pages)
    yield opened
    opened.server.close()


@pytest.fixture
def peer(serving):
    opened = peer_of(serving)
    yield opened
    opened.close()


def peer_of(serving, **settings) -> TcpPeer:
    return TcpPeer(serving.producer, serving.capability, **{"verify": Verify.FULL, "connections_max": 2, **settings})


def fetch(peer: TcpPeer, locations: list[Location], deadline_ns: int | None = None) -> FetchResult:
    into = Destinations(locations)  # named: it must live as long as the fetch
    return peer.fetch(into.batch, deadline_ns or soon())


def eventually(condition) -> None:
    deadline_ns = soon()
    while not condition():
        assert time.monotonic_ns() < deadline_ns
        time.sleep(0.001)


def test_it_brings_the_producers_part_tables(peer, pages):
    location = pages.publish(2, 2)
    result = fetch(peer, [location])
    assert result.n_parts.tolist() == [1]
    assert result.parts[0, 0].tolist() == (0, SLOT_BYTES, crc64(page_bytes_of(location.key)))


def test_a_batch_is_cut_into_requests_that_the_producer_takes(peer, serving, pages):
    n = 2 * SERVER_PAGES_MAX + 1
    result = fetch(peer, [pages.publish(2, 2)] * n)
    assert result.outcomes.tolist() == [Outcome.HIT] * n
    assert serving.server.stats().requests == 3


def test_one_connection_serves_fetch_after_fetch(peer, serving, pages):
    location = pages.publish(2, 2)
    for _ in range(5):
        assert fetch(peer, [location]).outcomes[0] == Outcome.HIT
    assert serving.server.stats().connections_accepted == 1


def test_no_more_connections_than_the_limit_however_many_threads(serving, pages):
    peer = peer_of(serving, connections_max=2)
    location = pages.publish(2, 2)
    batches = [Destinations([location] * 8) for _ in range(6)]
    threads = [threading.Thread(target=peer.fetch, args=(into.batch, soon())) for into in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(into.holds(7) for into in batches)
    assert serving.server.stats().connections_accepted <= 2
    peer.close()


def test_an_abort_stops_asking_after_the_chunk_under_way(serving, pages):
    abort = threading.Event()

    def capability_then_abort(deadline_ns: int) -> bytes:
        abort.set()
        return serving.capability(deadline_ns)

    peer = TcpPeer(serving.producer, capability_then_abort, verify=Verify.FULL, connections_max=1)
    n = 3 * SERVER_PAGES_MAX
    into = Destinations([pages.publish(2, 2)] * n)
    result = peer.fetch(into.batch, soon(), abort)
    assert result.outcomes.tolist() == [Outcome.HIT] * SERVER_PAGES_MAX + [Outcome.MISS] * (n - SERVER_PAGES_MAX)
    assert (into.pages[SERVER_PAGES_MAX:] == 0xEE).all()
    peer.close()


def test_large_pages_make_chunks_of_bytes():
    location_bytes = CHUNK_BYTES_MAX // 2 + 1
    column = np.full(5, location_bytes, np.uint32)
    batch = FetchBatch(column, column, bytes(80), column, column.astype(np.uint64))
    assert [batch.chunk_stop(start, 100) for start in range(5)] == [1, 2, 3, 4, 5]


def test_a_connection_that_the_producer_closed_meanwhile_is_replaced(peer, serving, pages):
    location = pages.publish(2, 2)
    assert fetch(peer, [location]).outcomes[0] == Outcome.HIT
    serving.server.revoke(READER_ID)
    eventually(lambda: serving.server.stats().connections_open == 0)
    assert fetch(peer, [location]).outcomes[0] == Outcome.HIT
    assert serving.server.stats().connections_accepted == 2


def test_idle_connections_are_closed(serving, pages):
    peer = peer_of(serving, idle_close_s=0.0)
    fetch(peer, [pages.publish(2, 2)])
    peer.close_idle()
    eventually(lambda: serving.server.stats().connections_open == 0)


def test_connections_in_use_lately_stay_open(peer, serving, pages):
    fetch(peer, [pages.publish(2, 2)])
    peer.close_idle()
    assert serving.server.stats().connections_open == 1


def test_a_reader_that_is_not_admitted_is_refused(serving, pages):
    peer = TcpPeer(serving.producer, lambda _deadline_ns: bytes(32), verify=Verify.FULL, connections_max=1)
    result = fetch(peer, [pages.publish(2, 2)])
    assert result.outcomes.tolist() == [Outcome.REFUSED]
    assert isinstance(result.error, AdmissionRefusedError)


def test_a_control_channel_that_fails_makes_misses_and_says_why(serving, pages):
    def no_capability(_deadline_ns: int) -> bytes:
        raise CapacityError("no more admissions")

    peer = TcpPeer(serving.producer, no_capability, verify=Verify.FULL, connections_max=1)
    location = pages.publish(2, 2)
    for _ in range(3):  # a failed opening gives its place back
        result = fetch(peer, [location])
        assert result.outcomes.tolist() == [Outcome.MISS]
        assert isinstance(result.error, CapacityError)


def test_a_producer_that_is_not_there_makes_misses(pages):
    with socket.create_server(("127.0.0.1", 0)) as closed_soon:
        port = closed_soon.getsockname()[1]
    peer = TcpPeer(
        Producer("127.0.0.1", port, b"p" * 16, READER_ID), lambda _: bytes(32), verify=Verify.FULL, connections_max=1
    )
    result = fetch(peer, [pages.publish(2, 2)])
    assert result.outcomes.tolist() == [Outcome.MISS]
    assert isinstance(result.error, PeerUnavailableError)


def test_a_producer_that_stalls_costs_no_more_than_the_deadline_and_writes_nothing_afterwards(pages):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        producer = Producer("127.0.0.1", silent.getsockname()[1], b"p" * 16, READER_ID)
        peer = TcpPeer(producer, lambda _: bytes(32), verify=Verify.FULL, connections_max=1)
        into = Destinations([pages.publish(slot, 1) for slot in range(3)])
        start = time.monotonic()
        result = peer.fetch(into.batch, soon(0.1))
        took_s = time.monotonic() - start
    assert 0.1 <= took_s < 0.1 + TOLERANCE_S
    assert result.outcomes.tolist() == [Outcome.TIMEOUT] * 3
    assert into.is_untouched


def test_waiting_for_a_busy_connection_ends_at_the_deadline(serving, pages):
    is_asked, may_answer = threading.Event(), threading.Event()

    def slow_capability(deadline_ns: int) -> bytes:
        is_asked.set()
        may_answer.wait(20)
        return serving.capability(deadline_ns)

    peer = TcpPeer(serving.producer, slow_capability, verify=Verify.FULL, connections_max=1)
    location = pages.publish(2, 2)
    first = Destinations([location])
    thread = threading.Thread(target=peer.fetch, args=(first.batch, soon()))
    thread.start()
    assert is_asked.wait(20)
    result = fetch(peer, [location], soon(0.05))
    assert result.outcomes.tolist() == [Outcome.TIMEOUT]
    assert isinstance(result.error, NotAskedError), "which says nothing about the producer"
    assert result.n_asked == 0
    may_answer.set()
    thread.join()
    assert first.holds(0)
    peer.close()


def test_close_ends_a_fetch_that_waits_for_the_producer(pages):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        producer = Producer("127.0.0.1", listener.getsockname()[1], b"p" * 16, READER_ID)
        peer = TcpPeer(producer, lambda _: bytes(32), verify=Verify.FULL, connections_max=1)
        results = []
        into = Destinations([pages.publish(2, 2)])
        thread = threading.Thread(target=lambda: results.append(peer.fetch(into.batch, soon())))
        thread.start()
        connection, _ = listener.accept()
        with connection:
            greet(connection)
            assert len(connection.recv(48, socket.MSG_WAITALL)) == 48  # the request is under way
            peer.close()
            thread.join(20)
    assert not thread.is_alive()
    assert results[0].outcomes.tolist() == [Outcome.MISS]
    assert into.is_untouched


def greet(connection: socket.socket) -> None:
    """Plays a producer's hello (docs/formats.md)."""
    assert len(connection.recv(72, socket.MSG_WAITALL)) == 72
    connection.sendall(b"KVPA" + b"\x01\0" + b"\0\0" + b"p" * 16 + (64).to_bytes(4, "little") + bytes(4))


def test_its_name_is_the_one_in_the_metrics(peer):
    assert peer.name == "tcp"
