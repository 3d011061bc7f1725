"""Virtual time: order, clocks that differ, processes that stop, and waits that end."""

from __future__ import annotations

import pytest
from kvpeer.model import PeerUnavailableError
from kvpeer.sim.kernel import INSTANT_EVENTS_MAX, Future, Kernel, Process, StuckError


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def process(kernel: Kernel) -> Process:
    return Process(kernel, "p")


def ringing(process: Process, at: float) -> list[float]:
    """The world's times at which a timer rang that was set to `at` on the own clock."""
    rang: list[float] = []
    process.call_at(at, lambda: rang.append(process.kernel.now))
    return rang


def test_events_come_in_the_order_of_time_and_then_of_scheduling(kernel):
    seen = []
    for number, time in enumerate((2.0, 1.0, 1.0)):
        kernel.at(time, lambda number=number: seen.append(number))
    kernel.run_until(3.0)
    assert seen == [1, 2, 0]
    assert kernel.now == 3.0


def test_time_that_does_not_pass_is_an_error(kernel):
    def again() -> None:
        kernel.at(kernel.now, again)

    again()
    with pytest.raises(StuckError, match=str(INSTANT_EVENTS_MAX)):
        kernel.run_until(1.0)


def test_a_clock_that_jumps_makes_timers_ring_earlier_in_the_world(kernel, process):
    rang = ringing(process, 5.0)
    kernel.at(1.0, lambda: process.jump(3.0))
    kernel.run_until(10.0)
    assert rang == [pytest.approx(2.0)]
    assert process.clock() == 13.0


def test_when_a_timer_rings_the_own_clock_shows_its_time_whatever_the_offset(kernel, process):
    early = []

    def check(at: float) -> None:
        if process.clock() < at:
            early.append(at)

    process.jump(0.6010520302698084)
    for number in range(200):
        at = 1.0 + number / 7
        process.call_at(at, lambda at=at: check(at))
    kernel.run_until(50.0)
    assert early == []


def test_a_clock_that_stands_still_makes_them_ring_later(kernel, process):
    rang = ringing(process, 5.0)
    kernel.at(1.0, process.stop_clock)
    kernel.at(4.0, process.start_clock)
    kernel.run_until(10.0)
    assert rang == [pytest.approx(8.0)]


def test_a_frozen_process_does_everything_when_it_goes_on(kernel, process):
    rang, came = ringing(process, 1.0), []
    kernel.at(0.5, process.freeze)
    kernel.at(2.0, lambda: process.post(lambda: came.append(kernel.now)))
    kernel.at(3.0, process.thaw)
    kernel.run_until(5.0)
    assert (rang, came) == ([3.0], [3.0])


def test_a_killed_process_does_nothing_more_and_its_tasks_end(kernel, process):
    ended = []

    async def wait() -> None:
        try:
            await process.sleep(1.0)
        finally:
            ended.append(kernel.now)

    task = process.spawn(wait())
    rang = ringing(process, 1.0)
    kernel.at(0.5, process.kill)
    kernel.run_until(5.0)
    assert (ended, rang) == ([0.5], [])
    with pytest.raises(PeerUnavailableError):
        task.result()


@pytest.mark.parametrize(("set_at", "woken_at"), [(1.0, 1.0), (9.0, 2.0)])
def test_a_wait_ends_with_the_future_or_at_its_time(kernel, process, set_at, woken_at):
    future: Future[int] = Future()
    kernel.at(set_at, lambda: future.set(1))

    async def wait() -> float:
        await process.wait_any([future], until=2.0)
        return kernel.now

    task = process.spawn(wait())
    kernel.run_until(10.0)
    assert task.result() == woken_at
