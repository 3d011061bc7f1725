"""The queue of writes is bounded, and a disk that fails is tried again ever less often."""

from __future__ import annotations

import pytest
from kvpeer.core.disk import Condition, DiskHealth, Offer, PageFacts, WriteQueue
from kvpeer.core.disk.health import RETRY_S_MAX, RETRY_S_MIN, SETTLED_S
from kvpeer.core.disk.write_queue import BATCH_BYTES_MAX, BATCH_PAGES_MAX, QUEUE_PAGES_MAX


def offer(number: int, length: int = 4096, namespace: bytes = b"n" * 32, slot: int = 0) -> Offer:
    return Offer(PageFacts(number.to_bytes(16, "big"), 0, namespace, length, 1), slot, 1, 4096, b"")


def test_a_full_queue_refuses_and_keeps_what_waits() -> None:
    queue = WriteQueue()
    assert all(queue.put(offer(number)) for number in range(QUEUE_PAGES_MAX))
    assert not queue.put(offer(QUEUE_PAGES_MAX))
    assert queue.put(offer(7, slot=9)), "what waits already may have moved"
    assert len(queue) == QUEUE_PAGES_MAX
    taken = []
    while batch := queue.take_batch():
        assert len(batch) <= BATCH_PAGES_MAX
        taken += batch
    assert [each.facts.key for each in taken] == [offer(number).facts.key for number in range(QUEUE_PAGES_MAX)]
    assert taken[7].slot == 9


def test_a_batch_is_bounded_in_bytes_but_for_a_page_that_is_larger_alone() -> None:
    queue = WriteQueue()
    for number, length in enumerate([BATCH_BYTES_MAX + 1, BATCH_BYTES_MAX // 2, BATCH_BYTES_MAX // 2, 1]):
        queue.put(offer(number, length))
    assert [len(queue.take_batch()) for _ in range(4)] == [1, 2, 1, 0]


def test_a_namespace_that_is_forgotten_waits_no_more() -> None:
    queue = WriteQueue()
    queue.put(offer(1, namespace=b"a" * 32))
    queue.put(offer(2, namespace=b"b" * 32))
    queue.forget(b"a" * 32)
    assert [each.facts.namespace for each in queue.take_batch()] == [b"b" * 32]
    queue.put(offer(3))
    assert queue.clear() == 1
    assert not queue.take_batch()


def test_a_disk_that_fails_is_tried_again_ever_less_often() -> None:
    health, now, pauses = DiskHealth(), 0.0, []
    for _ in range(9):
        health.failed(Condition.FAILING, now)
        pauses.append(health.retry_at - now)
        now = health.retry_at
    assert pauses[:3] == [RETRY_S_MIN, 2 * RETRY_S_MIN, 4 * RETRY_S_MIN]
    assert pauses[-1] == RETRY_S_MAX


@pytest.mark.parametrize(("worked_s", "pause_s"), [(SETTLED_S, RETRY_S_MIN), (SETTLED_S / 2, 2 * RETRY_S_MIN)])
def test_only_a_disk_that_worked_for_a_while_is_a_good_one_again(worked_s: float, pause_s: float) -> None:
    health = DiskHealth()
    health.failed(Condition.FULL, 0.0)
    health.opened(10.0)
    health.failed(Condition.FULL, 10.0 + worked_s)
    assert health.retry_at == 10.0 + worked_s + pause_s


def test_the_same_failure_is_news_once() -> None:
    health = DiskHealth()
    assert health.failed(Condition.VANISHED, 0.0)
    assert not health.failed(Condition.VANISHED, 1.0)
    assert health.failed(Condition.READ_ONLY, 2.0)
    health.opened(3.0)
    assert health.failed(Condition.READ_ONLY, 4.0)
