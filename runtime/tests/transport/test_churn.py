"""Never wrong bytes: eight slots that are reused without a pause and without a lease, under readers in both modes."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from kvpeer.model import Outcome
from kvpeer.native import monotonic_ns

from transport.page_pool import N_SLOTS, SLOT_BYTES, Destinations, Location, PagePool, soon

STALE_SHARE_MIN = 0.01
"""Fewer stale pages than this, and the churn did not meet the reads."""


class Churn:
    """Reuses the slots of a pool in turn, in a thread of its own, which replaces `current` and never changes it."""

    def __init__(self, pages: PagePool) -> None:
        self._pages = pages
        self._is_stopping = threading.Event()
        self.current: tuple[Location, ...] = tuple(pages.publish(slot, 1) for slot in range(N_SLOTS))
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Churn:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping.set()
        self._thread.join()

    def _run(self) -> None:
        slot = 0
        while not self._is_stopping.is_set():
            renewed = self._pages.publish(slot, self.current[slot].generation + 1)
            self.current = (*self.current[:slot], renewed, *self.current[slot + 1 :])
            slot = (slot + 1) % N_SLOTS


@dataclass
class Tally:
    outcomes: Counter = field(default_factory=Counter)
    n_wrong: int = 0
    n_reused_meanwhile: int = 0
    """Locations that were right when the fetch began and no longer when it ended."""

    def is_enough(self, reuses: int, fetches: int) -> bool:
        n = self.outcomes.total()
        return (
            n >= fetches
            and self.n_reused_meanwhile >= reuses
            and self.outcomes[Outcome.STALE] >= STALE_SHARE_MIN * n
            and self.outcomes[Outcome.HIT] > 0
        )


def check(transport, pages: PagePool, reuses: int, fetches: int = 0, seconds: float = 500) -> None:
    """Fetches until so many slots were reused under a fetch and so many pages were fetched; all hits must be right."""
    tally = fetch_under_churn(transport, pages, reuses, fetches, seconds)
    print(tally)
    assert tally.n_wrong == 0
    assert set(tally.outcomes) <= {Outcome.HIT, Outcome.STALE}, "an honest page is never corrupt"
    assert tally.is_enough(reuses, fetches), f"the churn proves nothing: {tally}"


def fetch_under_churn(transport, pages: PagePool, reuses: int, fetches: int, seconds: float) -> Tally:
    tally = Tally()
    deadline_ns = soon(seconds)
    with Churn(pages) as churn:
        while monotonic_ns() < deadline_ns and not tally.is_enough(reuses, fetches):
            before = churn.current
            into = Destinations(list(before))
            result = transport.fetch(into.batch, soon())
            assert result.error is None
            tally.n_reused_meanwhile += sum(was is not now for was, now in zip(before, churn.current, strict=True))
            tally.outcomes.update(result.outcomes.tolist())
            hits = np.flatnonzero(result.outcomes == Outcome.HIT)
            tally.n_wrong += sum(not into.holds(idx) for idx in hits)
    return tally


def test_hits_have_the_right_bytes_while_slots_are_reused(transport, pages):
    check(transport, pages, reuses=200, seconds=10)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_hits_have_the_right_bytes_through_ten_thousand_reuses(transport, pages):
    check(transport, pages, reuses=10_000)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_hits_have_the_right_bytes_in_a_million_fetches(transport, pages):
    check(transport, pages, reuses=10_000, fetches=1_000_000)


def test_the_same_churn_read_without_checks_gives_wrong_bytes(pages):
    """The negative control: without it, the tests above might pass because nothing ever met."""
    n_wrong = 0
    deadline_ns = soon()
    with Churn(pages) as churn:
        while monotonic_ns() < deadline_ns and not n_wrong:
            into = Destinations(list(churn.current))
            into.pages[:] = pages.payload.reshape(N_SLOTS, SLOT_BYTES)
            n_wrong = sum(not into.holds(idx) for idx in range(N_SLOTS))
    assert n_wrong
