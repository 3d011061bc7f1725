"""Every change is looked at soon, bursts are one look, and what fails is repeated at growing distances."""

from __future__ import annotations

from kvpeer_operator.work import COALESCE_S, RETRY_FIRST_S, RETRY_LAST_S, WAIT_MAX_S, ClusterKey, WorkQueue

A, B = ClusterKey("models", "a"), ClusterKey("models", "b")


def test_a_burst_of_events_is_one_look() -> None:
    queue = WorkQueue()
    for i in range(100):
        queue.changed(A, i * 0.009)
    assert queue.take(COALESCE_S - 0.01) is None
    assert queue.take(COALESCE_S) == A
    assert queue.take(100.0) is None


def test_events_that_never_end_do_not_put_the_look_off() -> None:
    queue = WorkQueue()
    queue.changed(A, 0.0)
    queue.changed(A, COALESCE_S * 0.9)
    assert queue.take(COALESCE_S) == A


def test_an_event_during_a_look_leads_to_another() -> None:
    queue = WorkQueue()
    queue.changed(A, 0.0)
    assert queue.take(1.0) == A
    queue.changed(A, 1.5)
    queue.done(A, 2.0, again_s=60.0)
    assert queue.take(2.5) == A


def test_what_was_looked_at_is_looked_at_again_after_a_while_unless_it_is_gone() -> None:
    queue = WorkQueue()
    queue.done(A, 0.0, again_s=60.0)
    queue.done(B, 0.0, again_s=None)
    assert queue.wait_s(0.0) == 60.0
    assert queue.take(59.9) is None
    assert queue.take(60.0) == A
    assert queue.take(1000.0) is None
    assert queue.wait_s(1000.0) == WAIT_MAX_S


def test_the_next_look_comes_no_later_for_having_been_due_late_before() -> None:
    queue = WorkQueue()
    queue.done(A, 0.0, again_s=300.0)
    queue.done(A, 1.0, again_s=5.0)
    assert queue.take(6.0) == A


def test_failures_are_repeated_at_growing_distances_whatever_events_come() -> None:
    queue = WorkQueue()
    now, waits = 0.0, []
    for _ in range(10):
        waits.append(queue.failed(A, now))
        queue.changed(A, now)  # events of a broken cluster make no hot loop
        assert queue.take(now + waits[-1] - 0.01) is None
        now += waits[-1]
        assert queue.take(now) == A
    assert waits[:3] == [RETRY_FIRST_S, 2 * RETRY_FIRST_S, 4 * RETRY_FIRST_S]
    assert waits[-1] == RETRY_LAST_S
    queue.done(A, now, again_s=60.0)
    queue.changed(A, now)
    assert queue.take(now + COALESCE_S) == A


def test_one_cluster_that_fails_holds_no_other() -> None:
    queue = WorkQueue()
    queue.failed(A, 0.0)
    queue.changed(B, 0.0)
    assert queue.wait_s(0.0) == COALESCE_S
    assert queue.take(COALESCE_S) == B
