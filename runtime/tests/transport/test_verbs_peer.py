"""What only verbs have: keys that hold no longer, queue pairs that break, links that go down, processes that are killed
in the middle. On real verbs, in the machine of `make test-rdma`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from kvpeer.model import CapacityError, KvPeerError, LocalProtocolError, Outcome, PeerUnavailableError, Verify
from kvpeer.native import Pool, VerbsConnection, VerbsDevice, VerbsSettings, monotonic_ns
from kvpeer.transport import FetchResult, VerbsPeer

from transport.page_pool import (
    N_SLOTS,
    RDMA_DEVICE,
    READER_ID,
    SLOT_BYTES,
    Destinations,
    Location,
    PagePool,
    Reading,
    key_of,
    page_bytes_of,
    soon,
)

pytestmark = pytest.mark.skipif(not RDMA_DEVICE, reason="needs RDMA devices: make test-rdma")

MTU_BYTES = 4096
LINK = "dum0"
"""Below RDMA_DEVICE, see e2e/rdma/rxe.sh."""

TOLERANCE_S = 2.0
"""How much later than its deadline a fetch may return on an emulated processor."""


@pytest.fixture
def reading(pages):
    with contextlib.closing(Reading(pages)) as opened:
        yield opened


@pytest.fixture
def peer(reading, verify):
    with contextlib.closing(reading.peer(verify=verify)) as opened:
        yield opened


def fetch(peer: VerbsPeer, locations: list[Location], seconds: float = 20.0) -> tuple[FetchResult, Destinations]:
    into = Destinations(locations)
    return peer.fetch(into.batch, soon(seconds)), into


def assert_hit(peer: VerbsPeer, location: Location) -> None:
    result, into = fetch(peer, [location])
    assert result.error is None
    assert result.outcomes.tolist() == [Outcome.HIT]
    assert into.holds(0)


def rdma_counter(name: str) -> int:
    return int(Path(f"/sys/class/infiniband/{RDMA_DEVICE}/ports/1/hw_counters/{name}").read_text())


# ---- bytes


def test_the_bytes_of_verbs_went_through_the_device(peer, pages):
    locations = [pages.publish(slot, 1) for slot in range(N_SLOTS)]
    before = rdma_counter("rcvd_pkts")
    result, _ = fetch(peer, locations)
    assert result.outcomes.tolist() == [Outcome.HIT] * N_SLOTS
    assert rdma_counter("rcvd_pkts") - before >= N_SLOTS * SLOT_BYTES // MTU_BYTES


def test_verbs_bring_the_producers_part_tables(peer, pages):
    location = pages.publish(2, 2)
    result, _ = fetch(peer, [location])
    assert result.n_parts.tolist() == [1]
    assert result.parts[0, 0]["length"] == location.length


def test_verbs_write_nowhere_but_into_registered_memory(reading, pages):
    into = Destinations([pages.publish(2, 2)])
    with contextlib.closing(reading.peer()) as peer, pytest.raises(LocalProtocolError):
        VerbsPeer.fetch(peer, into.batch, soon())
    assert into.is_untouched


def test_a_fetch_by_verbs_that_timed_out_writes_nothing_afterwards(peer, pages):
    locations = [pages.publish(slot, 1) for slot in range(N_SLOTS)] * 16
    assert_hit(peer, locations[0])
    result, into = fetch(peer, locations, seconds=0.01)
    assert Outcome.TIMEOUT in result.outcomes
    at_return = into.pages.copy()
    result, _ = fetch(peer, locations)
    assert set(result.outcomes.tolist()) == {Outcome.HIT}
    assert np.array_equal(into.pages, at_return)


# ---- keys


class Forging:
    """A producer's control that tells of wrong keys while `is_forging`."""

    def __init__(self, control, column: str) -> None:
        self._control = control
        self._column = column
        self.is_forging = True
        self.open_queue_pair = control.open_queue_pair

    def extents(self, first: int, rail: int, deadline_ns: int) -> tuple[bytes, int]:
        told, n = self._control.extents(first, rail, deadline_ns)
        layout = [("payload", "<u8"), ("header", "<u8"), ("payload_key", "<u4"), ("header_key", "<u4"), ("rest", "<u8")]
        extents = np.frombuffer(told, np.dtype(layout)).copy()
        extents[self._column] ^= 0x55 if self.is_forging else 0
        return extents.tobytes(), n


@pytest.mark.parametrize("column", ["payload_key", "header_key"])
def test_a_wrong_key_of_verbs_is_a_miss_and_the_next_fetch_finds_a_new_queue_pair(reading, pages, column):
    location = pages.publish(2, 2)
    reading.control = Forging(reading.control, column)
    with contextlib.closing(reading.peer()) as peer:
        result, _ = fetch(peer, [location])
        assert result.outcomes.tolist() == [Outcome.MISS]
        assert isinstance(result.error, PeerUnavailableError)
        assert "access error" in str(result.error)
        reading.control.is_forging = False
        assert_hit(peer, location)


def test_headers_that_were_registered_anew_for_verbs_are_found_again(peer, reading, pages):
    old = pages.publish(0, 1)
    assert_hit(peer, old)
    pages.withdraw(old)
    pages.pool.assign_extent(0, SLOT_BYTES // 2)
    reading.producer.extents(0, 1)  # as for another reader: more headers, under a new key
    assert_hit(peer, pages.publish(0, 2, 4096))
    assert next(reading.control.n_opened) == 2


def test_a_page_of_an_extent_that_was_cut_anew_is_stale_for_verbs_until_that_is_learnt(peer, pages):
    old = pages.publish(1, 1)
    assert_hit(peer, old)
    pages.withdraw(old)
    pages.pool.assign_extent(0, 2 * SLOT_BYTES)
    moved = publish_at(pages, slot=1, generation=2, start=2 * SLOT_BYTES)
    assert fetch(peer, [moved])[0].outcomes.tolist() == [Outcome.STALE]
    assert_hit(peer, moved)


def publish_at(pages: PagePool, slot: int, generation: int, start: int) -> Location:
    """Publishes into a slot that does not lie where PagePool thinks, with other bytes where it does."""
    location = pages.publish(slot, generation)
    pages.payload[start : start + SLOT_BYTES] = pages.payload[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]
    pages.payload[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = 0
    return location


# ---- queue pairs, links


def test_one_queue_pair_serves_fetch_after_fetch(peer, reading, pages):
    location = pages.publish(2, 2)
    for _ in range(5):
        assert_hit(peer, location)
    assert next(reading.control.n_opened) == 1


def test_a_queue_pair_that_the_producer_ended_is_replaced(peer, reading, pages):
    location = pages.publish(2, 2)
    assert_hit(peer, location)
    reading.producer.revoke(READER_ID)
    assert_hit(peer, location)
    assert next(reading.control.n_opened) == 2


def test_a_silent_producer_of_verbs_costs_a_fetch_its_deadline_and_no_more(peer, reading, pages):
    location = pages.publish(2, 2)
    assert_hit(peer, location)
    reading.producer.revoke(READER_ID)
    began_ns = monotonic_ns()
    result, into = fetch(peer, [location], seconds=0.2)
    assert monotonic_ns() - began_ns < (0.2 + TOLERANCE_S) * 1e9
    assert result.outcomes.tolist() == [Outcome.TIMEOUT]
    assert into.is_untouched
    assert_hit(peer, location)


def test_a_reader_holds_as_many_queue_pairs_as_it_may_and_loses_its_oldest(pages):
    with contextlib.closing(Reading(pages, reader_connections_max=3)) as reading:
        location = pages.publish(2, 2)
        for _ in range(5):
            with contextlib.closing(reading.peer()) as peer:
                assert_hit(peer, location)
        stats = reading.producer.stats()
        assert (stats.connections_open, stats.connections_accepted, stats.connections_replaced) == (3, 5, 2)


def test_where_all_places_are_taken_the_reader_with_the_most_makes_room(pages):
    settings = VerbsSettings(RDMA_DEVICE, connections_max=4)
    with contextlib.ExitStack() as entered:
        producer = entered.enter_context(contextlib.closing(VerbsDevice(pages.pool, settings)))
        reading = entered.enter_context(contextlib.closing(Reading(pages)))

        def accept(reader: bytes) -> None:
            connection = VerbsConnection(reading.rails[0], reading.producer_id)
            entered.enter_context(contextlib.closing(connection))
            producer.accept(reader * 16, connection.own_end)

        for reader in (b"a", b"a", b"a", b"b", b"c"):  # the last one takes the place of the oldest of `a`
            accept(reader)
        assert producer.stats().connections_replaced == 1
        with pytest.raises(CapacityError):
            accept(b"b")  # `a` has two and `b` would have, too
        assert producer.stats().connections_open == 4


def test_verbs_come_back_after_the_link_was_down(peer, pages):
    location = pages.publish(2, 2)
    assert_hit(peer, location)
    subprocess.run(["ip", "link", "set", LINK, "down"], check=True)
    try:
        result, into = fetch(peer, [location], seconds=1.0)
        assert result.outcomes[0] in (Outcome.MISS, Outcome.TIMEOUT)
        assert into.is_untouched
    finally:
        subprocess.run(["ip", "link", "set", LINK, "up"], check=True)
    deadline_ns = soon()
    while fetch(peer, [location])[0].outcomes[0] != Outcome.HIT:  # the kernel gives the address back in its own time
        assert monotonic_ns() < deadline_ns
    assert_hit(peer, location)


def test_closing_a_peer_of_verbs_ends_its_fetches_soon(reading, pages):
    locations = [pages.publish(slot, 1) for slot in range(N_SLOTS)] * 64
    peer = reading.peer()
    results = []
    thread = threading.Thread(target=lambda: results.append(fetch(peer, locations)[0]))
    thread.start()
    peer.close()
    thread.join()
    assert {*results[0].outcomes.tolist()} <= {Outcome.HIT, Outcome.MISS}


def test_a_machine_without_the_device_says_what_is_missing(pages):
    with pytest.raises(KvPeerError, match="no RDMA device rxe9"):
        VerbsDevice(pages.pool, VerbsSettings("rxe9"))


# ---- processes that are killed


class Child:
    """A forked process that runs `work(calls)`; its calls to the parent are lines answered by `serve`."""

    def __init__(self, work) -> None:
        self._from_child, to_parent = os.pipe()
        from_parent, self._to_child = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._from_child), os.close(self._to_child)
            with contextlib.suppress(BaseException):
                work(lambda ask, room: (os.write(to_parent, ask), os.read(from_parent, room))[1])
            os._exit(1)
        os.close(to_parent), os.close(from_parent)

    def hear(self, room: int) -> bytes:
        return os.read(self._from_child, room)

    def tell(self, answer: bytes) -> None:
        os.write(self._to_child, answer)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._from_child), os.close(self._to_child)


class PipedControl:
    """The reader's end of a control channel that is a pipe to the parent."""

    def __init__(self, call) -> None:
        self._call = call

    def open_queue_pair(self, reader_end: bytes, rail: int, deadline_ns: int) -> tuple[bytes, int]:
        return self._call(reader_end, 32), 1

    def extents(self, first: int, rail: int, deadline_ns: int) -> tuple[bytes, int]:
        return self._call(b"extents", 32), 1


def read_for_ever(locations: list[Location], call) -> None:
    pool = Pool(N_SLOTS * SLOT_BYTES, N_SLOTS * SLOT_BYTES, READER_ID)
    pool.assign_extent(0, SLOT_BYTES)
    into = Destinations(locations)
    into.pages = pool.payload_view().reshape(N_SLOTS, SLOT_BYTES)
    device = VerbsDevice(pool, VerbsSettings(RDMA_DEVICE))
    peer = VerbsPeer([device], b"p" * 16, PipedControl(call), verify=Verify.FULL, connections_max=1)
    while True:
        result = peer.fetch(into.batch, soon())
        if {*result.outcomes.tolist()} != {Outcome.HIT}:
            call(b"bad outcome", 1)
        call(b"hit", 1)


def kill_readers(pages: PagePool, rounds: int) -> None:
    """Kills a reader in the middle of its READs, again and again; the producer's pages stay as they are."""
    locations = [pages.publish(slot, 1) for slot in range(N_SLOTS)]
    with contextlib.closing(VerbsDevice(pages.pool, VerbsSettings(RDMA_DEVICE, reader_connections_max=4))) as producer:
        for number in range(rounds):
            child = Child(lambda call: read_for_ever(locations, call))
            try:
                child.tell(producer.accept(READER_ID, child.hear(32)))
                assert child.hear(32) == b"extents"
                child.tell(producer.extents(0, 1))
                assert child.hear(32) == b"hit"
                child.tell(b"!")  # it begins to read again
                threading.Event().wait(number % 10 / 1000)  # and is somewhere in it
            finally:
                child.kill()
    for idx, location in enumerate(locations):
        start = location.slot * SLOT_BYTES
        assert np.array_equal(pages.payload[start : start + SLOT_BYTES], page_bytes_of(location.key)), idx


def test_readers_by_verbs_that_are_killed_in_the_middle_harm_nobody(pages):
    kill_readers(pages, rounds=30)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_thousand_readers_by_verbs_that_are_killed_in_the_middle_harm_nobody(pages):
    kill_readers(pages, rounds=1000)


def produce(call) -> None:
    pages = PagePool()
    for slot in range(N_SLOTS):
        pages.publish(slot, 1)
    device = VerbsDevice(pages.pool, VerbsSettings(RDMA_DEVICE))
    extents = device.extents(0, 1)
    asked = call(b"ready", 64)
    while True:
        asked = call(extents if asked == b"extents" else device.accept(READER_ID, asked), 64)


class ChildControl:
    """The control channel to a producer that is a child."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def open_queue_pair(self, reader_end: bytes, rail: int, deadline_ns: int) -> tuple[bytes, int]:
        return self._ask(reader_end), 1

    def extents(self, first: int, rail: int, deadline_ns: int) -> tuple[bytes, int]:
        return self._ask(b"extents"), 1

    def _ask(self, question: bytes) -> bytes:
        try:
            self._child.tell(question)
            return self._child.hear(32)
        except OSError as error:
            raise PeerUnavailableError("the producer was killed") from error


def test_a_producer_of_verbs_that_is_killed_in_the_middle_is_a_miss(pages, reading):
    outcomes = Counter()
    for number in range(10):
        child = Child(produce)
        killing = threading.Timer(0.05 * 1.5**number, child.kill)  # a busy machine brings nothing for a second
        try:
            assert child.hear(32) == b"ready"
            reading.control = ChildControl(child)
            reading.producer_id = b"p" * 16
            with contextlib.closing(reading.peer(connections_max=1)) as peer:
                locations = [Location(slot, 1, key_of(slot, 1)) for slot in range(N_SLOTS)] * 64
                result, into = fetch(peer, locations[:1])
                assert result.outcomes.tolist() == [Outcome.HIT]
                killing.start()
                result, into = fetch(peer, locations, seconds=3.0)
                outcomes.update(result.outcomes.tolist())
                assert all(into.holds(idx) for idx in np.flatnonzero(result.outcomes == Outcome.HIT))
        finally:
            killing.join()
    assert set(outcomes) <= {Outcome.HIT, Outcome.MISS, Outcome.TIMEOUT}
    assert outcomes[Outcome.HIT]
    assert outcomes.total() > outcomes[Outcome.HIT], "no producer was killed in time"
