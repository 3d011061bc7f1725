"""What every transport promises, in both verify modes."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from kvpeer.model import LocalProtocolError, Outcome, Verify
from kvpeer.transport import CHUNK_BYTES_MAX, FetchBatch

from transport.page_pool import N_SLOTS, SERVER_PAGES_MAX, SLOT_BYTES, Destinations, Location, key_of, soon


def fetch_one(transport, location: Location) -> tuple[int, Destinations]:
    into = Destinations([location])
    result = transport.fetch(into.batch, soon())
    assert result.error is None
    return result.outcomes[0], into


def test_a_hit_has_the_bytes_of_its_key(transport, pages):
    locations = [pages.publish(slot, 1 + slot) for slot in range(N_SLOTS)]
    into = Destinations(locations)
    result = transport.fetch(into.batch, soon())
    assert result.error is None
    assert result.outcomes.tolist() == [Outcome.HIT] * N_SLOTS
    assert all(into.holds(idx) for idx in range(N_SLOTS))


def test_pages_of_different_lengths_fit_in_one_batch(transport, pages):
    into = Destinations([pages.publish(0, 1), pages.publish(1, 1, 4096), pages.publish(2, 1, 8), pages.publish(3, 1)])
    result = transport.fetch(into.batch, soon())
    assert result.outcomes.tolist() == [Outcome.HIT] * 4
    assert all(into.holds(idx) for idx in range(4))
    assert (into.pages[1, 4096:] == 0xEE).all(), "nothing is written beyond a page"


@pytest.mark.parametrize("generation", [1, 3, 0], ids=["older", "newer", "none"])
def test_another_generation_is_stale(transport, pages, generation):
    good = pages.publish(2, 2)
    assert fetch_one(transport, Location(2, generation, good.key))[0] == Outcome.STALE


def test_another_key_is_stale(transport, pages):
    pages.publish(2, 2)
    assert fetch_one(transport, Location(2, 2, key_of(3, 2)))[0] == Outcome.STALE


def test_another_length_is_stale(transport, pages):
    good = pages.publish(2, 2)
    assert fetch_one(transport, Location(2, 2, good.key, SLOT_BYTES // 2))[0] == Outcome.STALE


def test_a_withdrawn_page_is_stale(transport, pages):
    location = pages.publish(2, 2)
    pages.withdraw(location)
    assert fetch_one(transport, location)[0] == Outcome.STALE


def test_a_page_that_is_being_written_is_stale(transport, pages):
    location = pages.publish(2, 2)
    pages.pool.mark_writing(np.array([2], np.uint32), np.array([3], np.uint32))
    assert fetch_one(transport, location)[0] == Outcome.STALE
    assert fetch_one(transport, Location(2, 3, location.key))[0] == Outcome.STALE


@pytest.mark.parametrize("slot", [5, N_SLOTS, 16384, 2**32 - 1], ids=["never_used", "beyond", "other_extent", "last"])
def test_a_slot_without_a_page_is_stale(transport, pages, slot):
    pages.publish(2, 2)
    assert fetch_one(transport, Location(slot, 2, key_of(2, 2)))[0] == Outcome.STALE


@pytest.mark.parametrize("at", [0, SLOT_BYTES // 2, SLOT_BYTES - 1])
def test_a_payload_that_changed_under_a_valid_header_is_corrupt_for_full_and_trusted_by_generation(
    transport, pages, verify, at
):
    location = pages.publish(2, 2)
    pages.flip_byte(location, at)
    outcome, into = fetch_one(transport, location)
    if verify == Verify.FULL:
        assert outcome == Outcome.CORRUPT
    else:
        # Documented: GENERATION trusts the clients of the producer's pod not to scribble over their own pool.
        assert outcome == Outcome.HIT
        assert not into.holds(0)


def test_bad_pages_cost_nothing_but_themselves(transport, pages):
    good = [pages.publish(slot, 1) for slot in range(4)]
    withdrawn = pages.publish(4, 1)
    pages.withdraw(withdrawn)
    mixed = [good[0], withdrawn, good[1], Location(2, 9, good[2].key), good[2], good[3]]
    into = Destinations(mixed)
    result = transport.fetch(into.batch, soon())
    expected = [Outcome.HIT, Outcome.STALE, Outcome.HIT, Outcome.STALE, Outcome.HIT, Outcome.HIT]
    assert result.outcomes.tolist() == expected
    assert all(into.holds(idx) for idx in (0, 2, 4, 5))


def test_an_empty_batch_is_done_at_once(transport):
    result = transport.fetch(Destinations([]).batch, soon())
    assert len(result.outcomes) == 0
    assert result.error is None


def test_a_batch_larger_than_a_request_and_a_chunk_is_cut(transport, pages):
    location = pages.publish(2, 2)
    n = CHUNK_BYTES_MAX // SLOT_BYTES + SERVER_PAGES_MAX + 1
    into = Destinations([location] * n)
    result = transport.fetch(into.batch, soon())
    assert result.outcomes.tolist() == [Outcome.HIT] * n
    assert all(into.holds(idx) for idx in range(n))


def test_after_the_deadline_every_page_is_timeout_and_nothing_was_written(transport, pages):
    into = Destinations([pages.publish(slot, 1) for slot in range(3)])
    result = transport.fetch(into.batch, soon(-1))
    assert result.outcomes.tolist() == [Outcome.TIMEOUT] * 3
    assert result.error is not None
    assert into.is_untouched


def test_an_aborted_fetch_asks_for_nothing(transport, pages):
    into = Destinations([pages.publish(2, 2)])
    abort = threading.Event()
    abort.set()
    result = transport.fetch(into.batch, soon(), abort)
    assert result.outcomes.tolist() == [Outcome.MISS]
    assert into.is_untouched


def test_after_close_every_page_is_a_miss(transport, pages):
    into = Destinations([pages.publish(2, 2)])
    transport.close()
    assert transport.fetch(into.batch, soon()).outcomes.tolist() == [Outcome.MISS]
    assert into.is_untouched


def test_several_threads_fetch_at_the_same_time(transport, pages):
    locations = [pages.publish(slot, 1) for slot in range(N_SLOTS)]
    wrong = []

    def fetch_often() -> None:
        for _ in range(20):
            into = Destinations(locations)
            result = transport.fetch(into.batch, soon())
            wrong.extend(idx for idx in range(N_SLOTS) if result.outcomes[idx] != Outcome.HIT or not into.holds(idx))

    threads = [threading.Thread(target=fetch_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_batch_with_columns_that_do_not_fit_is_refused_by_name():
    one, two = np.zeros(1, np.uint32), np.ones(2, np.uint32)
    with pytest.raises(LocalProtocolError, match="equally many slots"):
        FetchBatch(one, two, bytes(16), one, np.zeros(1, np.uint64))
    with pytest.raises(LocalProtocolError, match="16 key bytes for each"):
        FetchBatch(two, two, bytes(16), two, np.zeros(2, np.uint64))
    with pytest.raises(LocalProtocolError, match="0 bytes"):
        FetchBatch(one, one, bytes(16), one, np.zeros(1, np.uint64))
