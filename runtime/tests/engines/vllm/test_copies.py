"""A rank's copies: every load is reported once, and no copy is committed from blocks that were taken back."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from kvpeer.core.chain import Chain, ChainSlice
from kvpeer.engines.vllm.copies import LOAD_BATCH_PAGES, PUBLISH_BATCH_PAGES
from kvpeer.engines.vllm.lanes import START_SHARE, Lane
from kvpeer.engines.vllm.metadata import LoadReport, PageOrder, StepOrders
from kvpeer.engines.vllm.settings import Settings
from kvpeer.engines.vllm.tally import Tally
from kvpeer.engines.vllm.worker_side import Collected, WorkerSide
from kvpeer.model import Outcome
from requests_of_vllm import page_hashes

DEADLINE_S = 10.0


@dataclass
class Published:
    n_written: int
    n_present: int = 0
    n_refused: int = 0


class SteppedClient:
    """A client whose copies stop half-way until the test lets them go on."""

    def __init__(self) -> None:
        self.healthy = True
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.is_copying = threading.Event()
        self.outcome: Callable[[int], Outcome] = lambda page: Outcome.HIT
        self.fetched: list[int] = []
        self.sources: list[bytes] = []
        self.stuck: set[str] = set()
        self.deadlines_s: dict[str, float] = {}
        self.committed: list[int] = []
        self.error: Exception | None = None
        self.is_closed = False

    def _copy(self) -> None:
        self.is_copying.set()
        assert self.may_go_on.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error

    def fetch(
        self, chain: ChainSlice, blocks: np.ndarray, request: str, deadline_s: float, *, source: bytes = b""
    ) -> np.ndarray:
        self.sources.append(source)
        assert len(blocks) == len(chain)
        assert deadline_s > 0
        self.deadlines_s[request] = deadline_s
        if request in self.stuck:
            assert self.may_go_on.wait(DEADLINE_S)
        else:
            self._copy()
        pages = range(chain.first, chain.first + len(chain))
        self.fetched.extend(pages)
        return np.array([self.outcome(page) for page in pages], np.uint8)

    def publish(
        self, chain: ChainSlice, blocks: np.ndarray, deadline_s: float, is_current: Callable[[], bool]
    ) -> Published:
        assert len(blocks) == len(chain)
        self._copy()
        if not is_current():
            return Published(0, n_refused=len(chain))
        self.committed.extend(range(chain.first, chain.first + len(chain)))
        return Published(len(chain))

    def close(self) -> None:
        self.is_closed = True


class Fences:
    """Counts marks; a copy that does not wait for its mark fails the test."""

    def __init__(self) -> None:
        self.n_marks = 0
        self.waited: list[object] = []
        self.seconds_since_work: Callable[[], float] = lambda: math.inf
        self.error: Exception | None = None

    def fence(self) -> object:
        if self.error is not None:
            raise self.error
        self.n_marks += 1
        return self.n_marks

    def wait_for(self, fence: object) -> None:
        self.waited.append(fence)

    def seconds_since(self, fence: object) -> float:
        return self.seconds_since_work()


class Rank:
    """One rank of an engine, driven step by step as vLLM's model runner does."""

    def __init__(
        self, *, is_writer: bool = True, clock: Callable[[], float] = time.monotonic, **settings: object
    ) -> None:
        self.client = SteppedClient()
        self.fences = Fences()
        self.tally = Tally()
        self.side = WorkerSide(
            self.client,
            self.fences,
            part_bytes=4096,
            is_writer=is_writer,
            settings=Settings(**settings),  # type: ignore[arg-type]
            clock=clock,
            tally=self.tally,
        )

    def step(self, orders: StepOrders | None = None, finished: tuple[str, ...] = ()) -> Collected:
        orders = orders or StepOrders()
        self.side.begin_step(orders)
        self.side.load(orders)
        self.side.publish(orders)
        return self.side.collect(orders, finished)

    def steps_until(
        self, is_over: Callable[[Collected], bool], orders: StepOrders | None = None, finished: tuple[str, ...] = ()
    ) -> Collected:
        """A step with these orders, then empty ones until it is over, merged; then one that must collect nothing."""
        merged = Collected(set(), set(), set())
        pause = threading.Event()
        for n in range(int(DEADLINE_S / 0.002)):
            collected = self.step(orders, finished) if n == 0 else self.step()
            assert not merged.sent & collected.sent
            assert not merged.received & collected.received
            merged = Collected(
                merged.sent | collected.sent,
                merged.received | collected.received,
                merged.failed_blocks | collected.failed_blocks,
            )
            if is_over(merged):
                after = self.step()
                assert not after.sent
                assert not after.received
                return merged
            pause.wait(0.002)
        raise AssertionError("it was never collected")

    def counts(self, metric: str) -> dict[str, float]:
        return (self.tally.take() or {"counts": {}})["counts"].get(metric, {})


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.client.may_go_on.set()
    rank.side.close()


def order(
    request: str,
    n_pages: int,
    timeout_s: float = DEADLINE_S,
    first_block: int = 100,
    lane: Lane = Lane.RELOAD,
) -> PageOrder:
    chain = Chain(b"n" * 32)
    chain.extend(page_hashes(n_pages, request))
    blocks = range(first_block, first_block + n_pages)
    return PageOrder.build(request, chain.slice(0, n_pages), blocks, timeout_s, lane)


def received(request: str) -> Callable[[Collected], bool]:
    return lambda collected: request in collected.received


def sent(request: str) -> Callable[[Collected], bool]:
    return lambda collected: request in collected.sent


def test_a_load_is_reported_once_when_all_its_pages_are_there(rank: Rank) -> None:
    n_pages = LOAD_BATCH_PAGES + 3
    collected = rank.steps_until(received("r"), StepOrders(loads=[order("r", n_pages)]))
    assert collected.failed_blocks == set()
    assert rank.client.fetched == list(range(n_pages))
    assert rank.fences.waited == [1], "blocks may still be in use by work that the engine queued before"


def test_a_step_does_not_wait_for_copies(rank: Rank) -> None:
    rank.client.may_go_on.clear()
    started = time.monotonic()
    rank.step(StepOrders(loads=[order("r", 3)], publishes=[order("w", 3)]))
    rank.step(StepOrders(preempted=["w"], held=["w"]), finished=("r", "w"))
    assert time.monotonic() - started < DEADLINE_S / 10


@pytest.mark.parametrize("failing_page", [0, 5, LOAD_BATCH_PAGES])
def test_from_the_first_missing_page_on_all_blocks_are_reported_failed(rank: Rank, failing_page: int) -> None:
    n_pages = LOAD_BATCH_PAGES + 5
    rank.client.outcome = lambda page: Outcome.CORRUPT if page == failing_page else Outcome.HIT
    collected = rank.steps_until(received("r"), StepOrders(loads=[order("r", n_pages, first_block=100)]))
    assert collected.failed_blocks == set(range(100 + failing_page, 100 + n_pages))
    counts = rank.counts("loaded_pages")
    assert counts["corrupt"] == n_pages - failing_page
    assert counts.get("hit", 0) == failing_page


def test_failed_blocks_are_not_reported_after_their_request(rank: Rank) -> None:
    rank.client.outcome = lambda page: Outcome.MISS
    pause = threading.Event()
    for n in range(5000):
        collected = rank.step(StepOrders(loads=[order("r", 4)]) if n == 0 else None)
        if collected.received:
            assert collected.failed_blocks == {100, 101, 102, 103}
            return
        assert collected.failed_blocks == set()
        pause.wait(0.002)
    raise AssertionError("the load was never collected")


def test_an_unexpected_error_is_a_failed_load_and_not_a_lost_one(rank: Rank) -> None:
    rank.client.error = RuntimeError("a bug")
    assert rank.steps_until(received("r"), StepOrders(loads=[order("r", 4)])).failed_blocks == {100, 101, 102, 103}
    assert rank.counts("errors") == {"load": 1}


def test_loads_that_could_not_be_started_are_failed_and_not_lost(rank: Rank) -> None:
    rank.fences.error = RuntimeError("the device is in trouble")
    orders = StepOrders(loads=[order("a", 2, first_block=100), order("b", 2, first_block=200)])
    with pytest.raises(RuntimeError, match="in trouble"):
        rank.side.load(orders)
    assert rank.client.fetched == []
    collected = rank.steps_until(lambda c: c.received == {"a", "b"})
    assert collected.failed_blocks == {100, 101, 200, 201}


def test_an_order_whose_pages_and_blocks_do_not_fit_is_reported_and_not_tried(rank: Rank) -> None:
    good = order("r", 3)
    bad = StepOrders(loads=[PageOrder("r", good.chain.part(0, 2), good.blocks, DEADLINE_S)])
    assert rank.steps_until(received("r"), bad).failed_blocks == {100, 101, 102}
    assert rank.client.fetched == []


def test_an_abort_stops_a_load_at_the_next_batch_and_it_is_still_reported(rank: Rank) -> None:
    rank.client.may_go_on.clear()
    rank.step(StepOrders(loads=[order("r", 3 * LOAD_BATCH_PAGES)]))
    assert rank.client.is_copying.wait(DEADLINE_S)
    assert rank.step(finished=("r",)).received == set(), "its blocks may still be written"
    rank.client.may_go_on.set()
    rank.steps_until(received("r"))
    assert rank.client.fetched == list(range(LOAD_BATCH_PAGES))


def test_a_load_past_its_deadline_is_given_up(rank: Rank) -> None:
    late = StepOrders(loads=[order("r", 3, timeout_s=0.0)])
    assert rank.steps_until(received("r"), late).failed_blocks == {100, 101, 102}
    assert rank.counts("loaded_pages") == {"timeout": 3}


@pytest.mark.parametrize(("seconds_after_work", "n_loaded"), [(0.0, 2), (7.9, 2), (8.0, 1)])
def test_a_loads_time_does_not_begin_before_the_engines_work_is_over(seconds_after_work: float, n_loaded: int) -> None:
    """The first batch takes 100 s, because the step in flight does; it was over so many seconds before the batch."""
    now = [100.0]
    rank = Rank(clock=lambda: now[0])
    try:
        rank.fences.seconds_since_work = lambda: 0.0
        rank.client.may_go_on.clear()
        rank.step(StepOrders(loads=[order("r", 2 * LOAD_BATCH_PAGES, timeout_s=8.0, lane=Lane.PULL)]))
        assert rank.client.is_copying.wait(DEADLINE_S)
        assert rank.client.deadlines_s["r"] == 8.0
        now[0] += 100.0
        rank.fences.seconds_since_work = lambda: seconds_after_work
        rank.client.may_go_on.set()
        rank.steps_until(received("r"))
        assert rank.side.report(StepOrders()).loads == [
            LoadReport("r", n_loaded * LOAD_BATCH_PAGES, seconds_after_work, is_aborted=False)
        ]
    finally:
        rank.side.close()


def test_the_time_of_a_pull_does_not_contain_its_reloads() -> None:
    now = [100.0]
    n_reloads, n_pages = LOAD_BATCH_PAGES + 3, 2 * LOAD_BATCH_PAGES
    rank = Rank(clock=lambda: now[0])

    def outcome(page: int) -> Outcome:
        now[0] += 1.0 if page < n_reloads else 0.01
        return Outcome.HIT

    try:
        rank.client.outcome = outcome
        pull = replace(order("r", n_pages, timeout_s=100.0, lane=Lane.PULL), n_reloads=n_reloads)
        rank.steps_until(received("r"), StepOrders(loads=[pull]))
        (report,) = rank.side.report(StepOrders()).loads
        assert (report.n_pages, report.seconds) == (n_pages, pytest.approx((n_pages - n_reloads) * 0.01))
        assert rank.client.fetched == list(range(n_pages))
    finally:
        rank.side.close()


def occupied(rank: Rank, lane: Lane, timeout_s: float = DEADLINE_S) -> list[str]:
    """Every thread of the lane runs a load that goes on when the test says so; returns their requests."""
    requests = [f"{lane.name} {n}" for n in range(lane.n_threads)]
    rank.client.may_go_on.clear()
    rank.client.stuck.update(requests)
    rank.step(StepOrders(loads=[order(request, 1, timeout_s, lane=lane) for request in requests]))
    pause = threading.Event()
    while not rank.client.deadlines_s.keys() >= set(requests):
        pause.wait(0.002)
    return requests


def test_slow_peers_hold_up_no_reload_from_the_own_pool(rank: Rank) -> None:
    occupied(rank, Lane.PULL)
    rank.client.may_go_on, stuck_go_on = threading.Event(), rank.client.may_go_on
    rank.client.may_go_on.set()
    assert rank.steps_until(received("local"), StepOrders(loads=[order("local", 3)])).failed_blocks == set()
    stuck_go_on.set()


@pytest.mark.parametrize("lane", list(Lane))
def test_a_loads_time_begins_when_a_thread_takes_it(lane: Lane) -> None:
    now = [100.0]
    rank = Rank(clock=lambda: now[0])
    occupied(rank, lane)
    rank.step(StepOrders(loads=[order("late", 2, timeout_s=8.0, lane=lane)]))
    now[0] += 8.0 * START_SHARE - 0.001
    rank.client.may_go_on.set()
    assert rank.steps_until(received("late")).failed_blocks == set()
    assert rank.client.deadlines_s["late"] == 8.0
    rank.side.close()


@pytest.mark.parametrize("lane", list(Lane))
def test_a_load_that_no_thread_takes_in_time_is_given_up_while_the_threads_are_still_busy(lane: Lane) -> None:
    now = [100.0]
    rank = Rank(clock=lambda: now[0])
    busy = occupied(rank, lane)
    assert rank.step(StepOrders(loads=[order("late", 2, timeout_s=8.0, lane=lane)])).received == set()
    now[0] += 8.0 * START_SHARE
    assert rank.steps_until(received("late")).failed_blocks == {100, 101}
    assert "late" not in rank.client.deadlines_s
    rank.client.may_go_on.set()
    rank.steps_until(lambda collected: collected.received == set(busy))
    rank.side.close()


def test_an_abort_of_a_load_that_waits_is_reported_at_once(rank: Rank) -> None:
    occupied(rank, Lane.PULL)
    rank.step(StepOrders(loads=[order("waits", 2, lane=Lane.PULL)]))
    over = rank.step(finished=("waits",))
    assert (over.received, over.failed_blocks) == ({"waits"}, {100, 101})
    rank.client.may_go_on.set()
    assert "waits" not in rank.steps_until(received("PULL 0")).received


@pytest.mark.parametrize("lane", list(Lane))
def test_a_rank_lets_as_many_loads_wait_as_the_scheduler_side_accepts(rank: Rank, lane: Lane) -> None:
    n_loads = lane.loads_max + len(occupied(rank, lane))
    waiting = [order(f"waits {n}", 1, first_block=200 + n, lane=lane) for n in range(lane.loads_max)]
    too_many = rank.step(StepOrders(loads=[*waiting, order("too many", 1, lane=lane)]))
    assert (too_many.received, too_many.failed_blocks) == ({"too many"}, {100})
    rank.client.may_go_on.set()
    rank.steps_until(lambda collected: len(collected.received) == n_loads)
    assert rank.counts("loaded_pages") == {"hit": n_loads, "refused": 1}


def test_a_held_request_is_reported_once_when_its_copies_are_over(rank: Rank) -> None:
    rank.client.may_go_on.clear()
    rank.step(StepOrders(publishes=[order("r", 3)]))
    assert rank.client.is_copying.wait(DEADLINE_S)
    assert rank.step(StepOrders(held=["r"]), finished=("r",)).sent == set()
    rank.client.may_go_on.set()
    rank.steps_until(sent("r"))
    assert rank.client.committed == [0, 1, 2]


def test_a_held_request_without_copies_is_reported_in_the_same_step(rank: Rank) -> None:
    assert rank.step(StepOrders(held=["r"]), finished=("r",)).sent == {"r"}
    assert rank.step().sent == set()


def test_a_publish_that_fails_still_frees_its_blocks(rank: Rank) -> None:
    rank.client.error = RuntimeError("a bug")
    rank.step(StepOrders(publishes=[order("r", 3)]))
    rank.steps_until(sent("r"), StepOrders(held=["r"]), finished=("r",))
    assert rank.counts("errors") == {"publish": 1}


@pytest.mark.parametrize("how", ["preempted", "finished and not held"])
def test_nothing_is_committed_from_blocks_that_were_taken_back(rank: Rank, how: str) -> None:
    rank.client.may_go_on.clear()
    rank.step(StepOrders(publishes=[order("r", 2 * PUBLISH_BATCH_PAGES)]))
    assert rank.client.is_copying.wait(DEADLINE_S)
    if how == "preempted":
        rank.step(StepOrders(preempted=["r"]))
    else:
        rank.step(finished=("r",))
    rank.client.may_go_on.set()
    # The request computes its pages again and publishes them from its new blocks; that works.
    rank.step(StepOrders(publishes=[order("r", 1)]))
    rank.step(StepOrders(held=["r"]))
    pause = threading.Event()
    for _ in range(5000):
        if rank.client.committed:
            break
        pause.wait(0.002)
    assert rank.client.committed == [0]
    assert rank.counts("published_pages")["revoked"] == PUBLISH_BATCH_PAGES


def test_a_preempted_request_is_not_held_by_its_old_copies(rank: Rank) -> None:
    rank.client.may_go_on.clear()
    rank.step(StepOrders(publishes=[order("r", 2)]))
    assert rank.client.is_copying.wait(DEADLINE_S)
    assert rank.step(StepOrders(preempted=["r"], held=["r"]), finished=("r",)).sent == {"r"}


def test_pages_beyond_the_queue_are_dropped_and_counted() -> None:
    rank = Rank(publish_queue_pages_max=5)
    rank.client.may_go_on.clear()
    rank.step(StepOrders(publishes=[order("a", 3), order("b", 3), order("c", 2)]))
    assert rank.counts("published_pages") == {"queue_full": 3}
    assert rank.step(StepOrders(held=["b"]), finished=("b",)).sent == {"b"}
    rank.client.may_go_on.set()
    rank.steps_until(lambda c: c.sent == {"a", "c"}, StepOrders(held=["a", "c"]), finished=("a", "c"))
    assert len(rank.client.committed) == 5
    rank.side.close()


def test_a_publish_that_waited_past_its_deadline_is_not_begun(rank: Rank) -> None:
    rank.step(StepOrders(publishes=[order("r", 3, timeout_s=0.0)]))
    rank.steps_until(sent("r"), StepOrders(held=["r"]), finished=("r",))
    assert rank.client.committed == []
    assert rank.counts("published_pages") == {"timeout": 3}


def test_without_an_agent_nothing_waits(rank: Rank) -> None:
    rank.client.healthy = False
    rank.client.may_go_on.clear()
    assert rank.step(StepOrders(publishes=[order("r", 3)], held=["r"]), finished=("r",)).sent == {"r"}
    assert rank.counts("published_pages") == {"no_agent": 3}


def test_a_rank_that_holds_a_copy_of_another_ranks_part_does_not_write_it() -> None:
    rank = Rank(is_writer=False)
    assert rank.step(StepOrders(publishes=[order("r", 3)], held=["r"]), finished=("r",)).sent == {"r"}
    rank.steps_until(received("l"), StepOrders(loads=[order("l", 3)]))
    assert rank.client.committed == []
    rank.side.close()
    assert rank.client.is_closed


# ---- what the scheduler side is told


def test_each_load_is_reported_once_with_what_it_brought_and_took() -> None:
    now = 100.0
    rank = Rank(clock=lambda: now)
    try:
        rank.client.outcome = lambda page: Outcome.MISS if page == 5 else Outcome.HIT
        rank.client.may_go_on.clear()
        loads = [PageOrder.build("r", order("r", 8).chain, range(8), DEADLINE_S, Lane.PULL, b"p" * 16)]
        rank.step(StepOrders(step=7, loads=loads))
        assert rank.client.is_copying.wait(DEADLINE_S)
        now += 2.5
        rank.client.may_go_on.set()
        rank.steps_until(received("r"))
        report = rank.side.report(StepOrders(step=8))
        assert (report.step, report.loads) == (8, [LoadReport("r", 5, 2.5, is_aborted=False)])
        assert rank.client.sources == [b"p" * 16]
        assert rank.side.report(StepOrders(step=9)).loads == []
    finally:
        rank.side.close()


@pytest.mark.parametrize(
    ("outcome", "n_reloads", "is_local_fault"),
    [
        (Outcome.REFUSED, 0, True),
        (Outcome.TIMEOUT, 0, False),
        (Outcome.MISS, 0, False),
        (Outcome.MISS, 4, False),
        (Outcome.MISS, 5, True),
        (Outcome.HIT, 5, False),
    ],
)
def test_a_load_that_ended_early_says_whether_its_producer_did_it(
    rank: Rank, outcome: Outcome, n_reloads: int, is_local_fault: bool
) -> None:
    rank.client.outcome = lambda page: outcome if page == 4 else Outcome.HIT
    rank.steps_until(received("r"), StepOrders(loads=[replace(order("r", 8, lane=Lane.PULL), n_reloads=n_reloads)]))
    (load,) = rank.side.report(StepOrders()).loads
    assert load.is_local_fault is is_local_fault


def test_what_was_never_begun_or_failed_here_is_no_producers_doing(rank: Rank) -> None:
    rank.client.error = RuntimeError("a bug")
    rank.steps_until(received("bug"), StepOrders(loads=[order("bug", 4)]))
    rank.steps_until(received("late"), StepOrders(loads=[order("late", 4, timeout_s=0.0)]))
    assert [load.is_local_fault for load in rank.side.report(StepOrders()).loads] == [True, True]


def test_an_aborted_load_is_reported_as_such(rank: Rank) -> None:
    rank.client.may_go_on.clear()
    rank.step(StepOrders(loads=[order("r", 3 * LOAD_BATCH_PAGES)]))
    assert rank.client.is_copying.wait(DEADLINE_S)
    rank.step(finished=("r",))
    rank.client.may_go_on.set()
    rank.steps_until(received("r"))
    (load,) = rank.side.report(StepOrders()).loads
    assert (load.request, load.is_aborted) == ("r", True)
