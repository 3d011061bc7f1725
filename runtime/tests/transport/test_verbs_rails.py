"""Several rails at once: how pages are shared out; rails that break, are silent, and come back. On real
verbs, in the machine of `make test-rdma`."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvpeer.model import Outcome, Verify
from kvpeer.native import monotonic_ns
from kvpeer.transport import FetchResult

from transport.page_pool import (
    N_SLOTS,
    RDMA_DEVICE,
    RDMA_DEVICES,
    READER_ID,
    SLOT_BYTES,
    Control,
    Destinations,
    PagePool,
    Reading,
    RegisteringPeer,
    soon,
)

pytestmark = pytest.mark.skipif(not RDMA_DEVICE, reason="needs RDMA devices: make test-rdma")

LINKS = ("dum0", "dum1")
"""Below RDMA_DEVICES, see e2e/rdma/rxe.sh."""

MTU_BYTES = 4096
REST = 5
"""Packets that a page costs beside its payload, where both ends are one device: three requests, two headers."""


class Rails:
    """A reader and a producer with two rails each, one connection between them, and pages to read."""

    def __init__(self, pages: PagePool, verify: Verify = Verify.FULL, **reading: object) -> None:
        self.locations = [pages.publish(slot, 1) for slot in range(N_SLOTS)]
        self.reading = Reading(pages, **{"devices": RDMA_DEVICES, **reading})
        self.peer: RegisteringPeer = self.reading.peer(verify=verify, connections_max=1)

    def fetch(self, n: int = N_SLOTS, seconds: float = 20.0) -> tuple[FetchResult, Destinations]:
        into = Destinations((self.locations * (n // N_SLOTS + 1))[:n])
        return self.peer.fetch(into.batch, soon(seconds)), into

    def assert_all_hit(self, n: int = N_SLOTS, seconds: float = 20.0) -> None:
        result, into = self.fetch(n, seconds)
        assert result.error is None
        assert result.outcomes.tolist() == [Outcome.HIT] * n
        assert all(into.holds(idx) for idx in range(n))

    def close(self) -> None:
        self.peer.close()
        self.reading.close()


@pytest.fixture
def rails(pages, verify) -> Iterator[Rails]:
    with contextlib.closing(Rails(pages, verify)) as opened:
        yield opened


def received_packets() -> list[int]:
    return [
        int(Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters/rcvd_pkts").read_text())
        for device in RDMA_DEVICES
    ]


def went_by(work) -> list[int]:
    """How many packets each rail received meanwhile."""
    before = received_packets()
    work()
    return [after - earlier for after, earlier in zip(received_packets(), before, strict=True)]


@contextlib.contextmanager
def link_down(link: str) -> Iterator[None]:
    subprocess.run(["ip", "link", "set", link, "down"], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "link", "set", link, "up"], check=True)


def until_all_carry_pages(rails: Rails, devices: int = 2) -> None:
    """Fetches until every rail brings its share."""
    deadline_ns = soon(60.0)
    while min(went_by(rails.assert_all_hit)[:devices]) < N_SLOTS // 2 * SLOT_BYTES // MTU_BYTES:
        assert monotonic_ns() < deadline_ns


def test_every_rail_brings_its_share_of_the_bytes_of_one_batch(rails):
    rails.assert_all_hit()
    share = went_by(lambda: rails.assert_all_hit(4 * N_SLOTS))
    assert min(share) >= 2 * N_SLOTS * SLOT_BYTES // MTU_BYTES
    assert max(share) < 1.2 * min(share)


def test_pages_are_shared_out_by_their_bytes(pages):
    with contextlib.closing(Rails(pages)) as rails:
        rails.locations = [pages.publish(0, 2)] + [pages.publish(slot, 2, 16 << 10) for slot in range(1, 5)]
        rails.assert_all_hit(5)
        share = went_by(lambda: rails.assert_all_hit(5))
        assert sorted(share) == [16 + REST, 4 * (4 + REST)], "one rail brings the large page, the other the small ones"


def test_single_pages_go_by_all_rails_in_turn(rails):
    rails.assert_all_hit()
    assert min(went_by(lambda: [rails.assert_all_hit(1) for _ in range(4)])) >= 2 * SLOT_BYTES // MTU_BYTES


@pytest.mark.parametrize(("own", "theirs"), [(("rxe0",), RDMA_DEVICES), (RDMA_DEVICES, ("rxe1",))])
def test_a_side_with_one_rail_reads_from_one_with_several(pages, own, theirs):
    with contextlib.closing(Rails(pages, devices=own, producer_devices=theirs)) as rails:
        rails.assert_all_hit(2 * N_SLOTS)
        assert [device.stats().connections_open for device in rails.reading.producers] == [2 // len(theirs)] * len(
            theirs
        )


def test_the_pages_of_a_queue_pair_that_the_producer_destroyed_come_by_the_other_rail_in_the_same_fetch(rails):
    rails.assert_all_hit()
    rails.reading.producers[1].revoke(READER_ID)
    assert went_by(rails.assert_all_hit)[0] >= N_SLOTS * SLOT_BYTES // MTU_BYTES
    until_all_carry_pages(rails)


def test_the_pages_of_a_silent_rail_come_by_the_other_one_before_the_deadline(rails):
    rails.assert_all_hit()
    rails.reading.producers[0].revoke(READER_ID)
    rails.assert_all_hit(seconds=0.6)  # the device gives up after more than that
    assert rails.peer.lanes.n_out == 0, "one accident takes no rail out"
    until_all_carry_pages(rails)


def test_a_single_page_of_a_silent_rail_comes_by_the_other_one_that_had_nothing_to_bring(rails):
    for _ in range(2):  # by one rail and by the other
        rails.assert_all_hit()
        rails.reading.producers[0].revoke(READER_ID)
        rails.assert_all_hit(1, seconds=0.6)
        rails.assert_all_hit(1, seconds=0.6)


@pytest.mark.parametrize("link", LINKS)
def test_a_rail_whose_link_is_down_is_taken_out_and_returns(rails, link):
    rails.assert_all_hit()
    with link_down(link):
        for _ in range(3):
            rails.assert_all_hit()
        assert rails.peer.lanes.n_out == 1
        began_ns = monotonic_ns()
        rails.assert_all_hit()
        assert monotonic_ns() - began_ns < 5e9, "a rail that is out costs nothing"
    until_all_carry_pages(rails)
    assert rails.peer.lanes.n_out == 0


def test_without_any_rail_pages_are_misses_and_all_rails_return(rails):
    rails.assert_all_hit()
    with link_down(LINKS[0]), link_down(LINKS[1]):
        for _ in range(2):
            result, into = rails.fetch(seconds=2.0)
            assert set(result.outcomes.tolist()) <= {Outcome.MISS, Outcome.TIMEOUT}
            assert into.is_untouched
    deadline_ns = soon(60.0)
    while rails.fetch()[0].outcomes[0] != Outcome.HIT:
        assert monotonic_ns() < deadline_ns
    until_all_carry_pages(rails)


class ForgingRail(Control):
    """Tells wrong keys of one rail."""

    is_forging = True

    def extents(self, first: int, rail: int, deadline_ns: int) -> tuple[bytes, int]:
        told, n = super().extents(first, rail, deadline_ns)
        columns = np.frombuffer(told, "<u4").reshape(-1, 8).copy()
        columns[:, 4] ^= 0x55 if self.is_forging and rail == 1 else 0
        return columns.tobytes(), n


def test_a_wrong_key_of_one_rail_costs_no_page(pages):
    with contextlib.closing(Rails(pages)) as rails:
        rails.reading.control = ForgingRail(*rails.reading.producers)
        rails.peer = rails.reading.peer(connections_max=1)
        for _ in range(3):
            rails.assert_all_hit()
        assert rails.peer.lanes.n_out == 1
        assert "access error" in rails.peer.lanes.reason
        rails.reading.control.is_forging = False
        until_all_carry_pages(rails)


def test_memory_that_one_rail_has_no_more_costs_no_page(rails):
    """What a producer unregisters has no key any more: the headers are registered anew when an extent is cut finer."""
    rails.assert_all_hit()
    rails.reading.producers[1].close()
    rails.assert_all_hit()
    assert rails.fetch()[0].error is None


def test_a_fetch_by_rails_that_timed_out_writes_nothing_afterwards(rails):
    rails.assert_all_hit()
    result, into = rails.fetch(32 * N_SLOTS, seconds=0.02)
    assert Outcome.TIMEOUT in result.outcomes
    at_return = into.pages.copy()
    rails.assert_all_hit(4 * N_SLOTS)
    assert np.array_equal(into.pages, at_return)
    assert rails.peer.lanes.n_out == 0
