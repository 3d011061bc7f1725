"""When a producer is read by the second way, and when by the first again."""

from __future__ import annotations

import numpy as np
import pytest
from kvpeer.core.reasons import UnaskedReason
from kvpeer.model import KvPeerError, Outcome, PeerUnavailableError
from kvpeer.transport import FallbackPeer, FetchResult, NoPathError, NotAskedError
from kvpeer.transport.fallback import RETRY_S

from transport.page_pool import Destinations, Location, key_of

N_PAGES = 2
BATCH = Destinations([Location(slot, 1, key_of(slot, 1)) for slot in range(N_PAGES)]).batch
DEADLINE_NS = 1


class ScriptedTransport:
    """Hits, or fails with `error`, and counts what it was asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: KvPeerError | None = None
        self.n_hits = N_PAGES
        self.n_fetches = 0
        self.is_closed = False

    def fetch(self, batch, deadline_ns, abort=None) -> FetchResult:
        self.n_fetches += 1
        result = FetchResult.unavailable(len(batch))
        result.transport = self.name
        result.outcomes = np.full(len(batch), Outcome.HIT, np.uint8)
        if self.error is not None:
            result.end(0, Outcome.MISS, self.error)
        return result

    def close(self) -> None:
        self.is_closed = True


class Two:
    def __init__(self) -> None:
        self.now_ns = 1 << 40
        self.verbs, self.tcp = ScriptedTransport("verbs"), ScriptedTransport("tcp")
        self.changes: list[tuple[str, str]] = []
        self.peer = FallbackPeer(self.verbs, self.tcp, lambda *told: self.changes.append(told), lambda: self.now_ns)

    def fetch(self) -> tuple[str, int]:
        result = self.peer.fetch(BATCH, DEADLINE_NS)
        return result.transport, int(result.outcomes[0])


@pytest.fixture
def two() -> Two:
    return Two()


def test_the_first_way_is_taken_while_it_works_and_said_once(two):
    assert [two.fetch() for _ in range(3)] == [("verbs", Outcome.HIT)] * 3
    assert two.changes == [("verbs", "")]
    assert two.tcp.n_fetches == 0


def test_without_a_first_way_the_same_fetch_goes_by_the_second_and_the_reason_is_said_once(two):
    two.verbs.error = NoPathError("no device there")
    assert [two.fetch() for _ in range(3)] == [("tcp", Outcome.HIT)] * 3
    assert two.verbs.n_fetches == 1
    assert two.changes == [("tcp", "no device there")]
    assert two.peer.name == "tcp"


def test_a_first_way_that_breaks_twice_in_a_row_is_given_up_and_nothing_is_fetched_twice(two):
    two.verbs.error = PeerUnavailableError("retries exceeded")
    assert [two.fetch() for _ in range(3)] == [("verbs", Outcome.MISS)] * 2 + [("tcp", Outcome.HIT)]
    assert two.changes == [("tcp", "retries exceeded")]


def test_one_accident_between_good_fetches_changes_nothing(two):
    for _ in range(3):
        two.verbs.error = PeerUnavailableError("retries exceeded")
        two.fetch()
        two.verbs.error = None
        assert two.fetch() == ("verbs", Outcome.HIT)
    assert two.tcp.n_fetches == 0


def test_a_fetch_that_was_not_begun_is_no_failure(two):
    two.verbs.error = NotAskedError(UnaskedReason.BUSY, "busy")
    assert [two.fetch()[0] for _ in range(4)] == ["verbs"] * 4


def test_the_first_way_is_tried_again_after_a_while(two):
    two.verbs.error = NoPathError("no device there")
    two.fetch()
    two.verbs.error = None
    two.now_ns += round(RETRY_S * 1e9) - 1
    assert two.fetch()[0] == "tcp"
    two.now_ns += 1
    assert two.fetch()[0] == "verbs"
    assert [name for name, _ in two.changes] == ["tcp", "verbs"]


def test_closing_closes_both(two):
    two.peer.close()
    assert two.verbs.is_closed
    assert two.tcp.is_closed
