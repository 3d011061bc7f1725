"""Pools that are full: pages go and slots are used again while peers read them, and a hit is right all the same."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from kvpeer.core.chain import ChainSlice
from kvpeer.model import Outcome

from processes.agents import POLL_S, AgentProcess, Cluster, finds, has_pages_on_the_way, publish_all
from processes.engine import Engine, chain_of, content
from processes.handles import eventually

pytestmark = pytest.mark.process

CHAIN_BYTES = 64 << 20
"""So long that a page comes again only after the reader has forgotten that it was missing."""

ALLOWED = {Outcome.HIT, Outcome.MISS, Outcome.STALE, Outcome.REFUSED}
"""An honest page is never corrupt, and nothing here takes so long that a deadline passes."""

SHARE_MIN = 0.002
"""Of all fetched pages: fewer pulled ones or fewer stale ones, and eviction did not meet the reads."""


EIGHT_SLOTS = (8, 128 << 10)
"""Slots and page bytes."""

SMALL_PAGES = (64, 16 << 10)
"""So small that there are many fetches a second."""

LARGE_PAGES = (8, 2 << 20)
"""Together more than the buffers between two agents hold."""


MEETINGS = 5
"""Fetches in whose middle slots were used again, not all of them in the middle of a page."""


@dataclass
class Tally:
    outcomes: Counter = field(default_factory=Counter)
    n_wrong: int = 0


class Churn:
    """An engine that publishes the pages of one chain in turn, a few at a time, without a pause."""

    def __init__(self, producer: Engine, n_slots: int, page_bytes: int) -> None:
        self._producer = producer
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._n_pages = CHAIN_BYTES // page_bytes
        numbers = range(self._n_pages)
        self._chain = chain_of(producer.namespace, *numbers)
        self._pages = np.stack([content(number, 0, page_bytes).reshape(2, -1) for number in numbers], axis=1)
        self._window = n_slots
        self.step = n_slots // 2
        self.n_published = 0

    def __enter__(self) -> Churn:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping.set()
        self._thread.join()

    def newest(self) -> tuple[ChainSlice, np.ndarray]:
        """The last pages that were offered, at most as many as there are slots, as a slice of the chain; and their
        content [2, n, half a page]."""
        stop = (self.n_published - 1) % self._n_pages + 1
        start = max(0, stop - self._window)
        return self._chain.part(start, stop), self._pages[:, start:stop]

    def _run(self) -> None:
        start = 0
        blocks = np.arange(self.step, dtype=np.int64)
        while not self._is_stopping.is_set():
            stop = start + self.step
            self._producer.memory[:, : self.step] = self._pages[:, start:stop]
            self._producer.client.publish(self._chain.part(start, stop), blocks, 5.0)
            self.n_published += self.step
            start = stop % self._n_pages


def fetch_under_churn(reader: Engine, churn: Churn, n_fetches: int, seconds: float) -> Tally:
    """Fetches the newest pages again and again; every other time after their locations had time to become old."""
    tally = Tally()
    until = time.monotonic() + seconds
    n = 0
    while tally.outcomes.total() < n_fetches and time.monotonic() < until:
        chain, pages = churn.newest()
        request = f"request {n}"
        if n % 2:
            reader.client.locate(chain, request, 5.0)
            _let_pass(churn, churn.step)
        reader.memory[:, : len(chain)] = 0
        outcomes = reader.client.fetch(chain, np.arange(len(chain), dtype=np.int64), request, 5.0)
        tally.outcomes.update(outcomes.tolist())
        for page in np.flatnonzero(outcomes == Outcome.HIT).tolist():
            tally.n_wrong += not np.array_equal(reader.memory[:, page], pages[:, page])
        n += 1
    return tally


def _let_pass(churn: Churn, n_pages: int) -> None:
    """Returns when so many more pages were published."""
    enough = churn.n_published + n_pages
    eventually(lambda: churn.n_published >= enough, poll_s=0.001)


def pool_of(n_slots: int, page_bytes: int) -> dict[str, str]:
    size = f"{n_slots * page_bytes >> 20}Mi"
    return {"pool.size": size, "pool.extent_size": size, "pool.lease_ttl": "0s"}


def check(cluster: Cluster, verify: str, shape: tuple[int, int], n_fetches: int, seconds: float) -> None:
    n_slots, page_bytes = shape
    a, b = cluster.start("a", "b", settings={**pool_of(n_slots, page_bytes), "transport.verify": verify})
    producer, reader = (cluster.engine(agent, page_bytes=page_bytes) for agent in (a, b))
    with Churn(producer, n_slots, page_bytes) as churn:
        _let_pass(churn, n_slots)
        tally = fetch_under_churn(reader, churn, n_fetches, seconds)
    n = tally.outcomes.total()
    n_pulled = b.metric("kvpeer_transport_pulled_bytes_total", transport="tcp") / page_bytes
    described = f"{n} fetched, {n_pulled:.0f} pulled, {churn.n_published} published, {tally}"
    print(described)
    assert tally.n_wrong == 0, described
    assert set(tally.outcomes) <= ALLOWED, described
    assert n >= n_fetches, described
    assert n_pulled >= SHARE_MIN * n, described
    assert tally.outcomes[Outcome.STALE] >= SHARE_MIN * n, described
    assert a.metric("kvpeer_pool_corrupt_pages_total") == b.metric("kvpeer_pool_corrupt_pages_total") == 0


@pytest.mark.parametrize("verify", ["full", "generation"])
@pytest.mark.parametrize(
    ("shape", "n_fetches"),
    [
        pytest.param(EIGHT_SLOTS, 2_000, id="8 slots"),
        pytest.param(SMALL_PAGES, 12_000, id="64 slots", marks=pytest.mark.long),
    ],
)
def test_hits_are_right_while_the_slots_are_used_again_without_a_pause(
    cluster: Cluster, verify: str, shape: tuple[int, int], n_fetches: int
) -> None:
    check(cluster, verify, shape, n_fetches, seconds=40)


def wait_for_pages(producer: AgentProcess, fetching: threading.Thread) -> None:
    """Returns in the middle of a fetch, or after it where it was too quick."""
    eventually(lambda: has_pages_on_the_way(producer.data_port) or not fetching.is_alive(), poll_s=0.0005)


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("verify", ["full", "generation"])
def test_a_page_whose_slot_is_used_again_in_the_middle_of_being_sent_is_no_hit(cluster: Cluster, verify: str) -> None:
    """The reader's agent is held up while it receives, until every slot of the producer has another page."""
    n_slots, page_bytes = LARGE_PAGES
    a, b = cluster.start("a", "b", settings={**pool_of(*LARGE_PAGES), "transport.verify": verify})
    producer, reader = (cluster.engine(agent, page_bytes=page_bytes, n_blocks=n_slots) for agent in (a, b))
    n_met = 0
    for attempt in range(60 * MEETINGS):
        chain, others = (range(first, first + n_slots) for first in (1000 * attempt, 1000 * attempt + 500))
        publish_all(producer, chain)
        finds(reader, chain)
        outcomes: list[str] = []
        fetching = threading.Thread(target=lambda into=outcomes, chain=chain: into.extend(reader.fetch(*chain)))
        fetching.start()
        wait_for_pages(a, fetching)
        b.signal(signal.SIGSTOP)
        publish_all(producer, others)
        b.signal(signal.SIGCONT)
        fetching.join(20)
        assert len(outcomes) == n_slots
        # On a slow machine the reader is held up beyond its deadline: that is a miss like any other.
        assert not {"WRONG", "CORRUPT"} & set(outcomes)
        n_met += "STALE" in outcomes
        if n_met == MEETINGS:
            return
    pytest.fail("the fetches were over before the slots were used again")


@pytest.mark.soak
@pytest.mark.timeout(620)
def test_a_million_fetches_have_no_wrong_hit(cluster: Cluster) -> None:
    check(cluster, "full", SMALL_PAGES, n_fetches=1_000_000, seconds=590)


def test_a_full_pool_evicts_or_refuses_and_is_no_error(cluster: Cluster) -> None:
    a, b = cluster.start("a", "b", settings={**pool_of(8, 128 << 10), "pool.lease_ttl": "50ms"})
    producer, reader = (cluster.engine(agent, page_bytes=128 << 10) for agent in (a, b))
    for first in range(0, 200, 10):
        n_written, n_present, n_refused = producer.publish(*range(first, first + 10))
        assert n_written + n_refused == 10, "more than the pool has slots"
        assert n_written > 0, "eviction makes progress"
        assert n_present == 0
    eventually(lambda: a.metric("kvpeer_pool_evicted_pages_total") >= 100, poll_s=POLL_S)
    publish_all(producer, range(1000, 1004))
    finds(reader, range(1000, 1004))
    assert reader.fetch(*range(1000, 1004)) == ["HIT"] * 4
    assert not [what for what, _ in producer.client.counters() if what.startswith("failed")]
    assert "Traceback" not in a.log
