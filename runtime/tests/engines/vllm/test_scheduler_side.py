"""The scheduler side against vLLM's rules: what it offers, orders, holds and withdraws. No vLLM in here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from kvpeer.core.chain import Chain, ChainSlice, namespace_digest
from kvpeer.core.sources import Offer
from kvpeer.engines.vllm import patience
from kvpeer.engines.vllm.lanes import START_SHARE, Lane
from kvpeer.engines.vllm.lookups import LOOKUP_THREADS
from kvpeer.engines.vllm.metadata import LoadReport, PageOrder, StepOrders, StepReport
from kvpeer.engines.vllm.scheduler_side import SchedulerSide, StepSchedule
from kvpeer.engines.vllm.settings import Settings
from kvpeer.engines.vllm.tally import Tally
from kvpeer.engines.vllm.worth import Worth
from kvpeer.model import AgentId
from requests_of_vllm import PAGE_TOKENS, FakeRequest

PAGE_BYTES = 4096
FIELDS = {"engine": "vllm", "weights": "test"}


@dataclass
class Located:
    statuses: np.ndarray
    reason: str = ""
    offers: tuple[Offer, ...] = ()


class ScriptedLocator:
    """Answers what the test says, when it says so."""

    def __init__(self) -> None:
        self.healthy = True
        self.answer: Callable[[ChainSlice], list[int]] = lambda chain: [0] * len(chain)
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.asked: list[ChainSlice] = []
        self.n_resets = 0
        self.reason = ""
        self.offers: tuple[Offer, ...] = ()
        self.is_closed = False

    def locate(self, chain: ChainSlice, request: str, deadline_s: float) -> Located:
        self.asked.append(chain)
        assert self.may_answer.wait(10)
        return Located(np.array(self.answer(chain), np.uint8), self.reason, self.offers)

    def reset(self, reason: str) -> None:
        self.n_resets += 1

    def close(self) -> None:
        self.is_closed = True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """Drives a SchedulerSide the way vLLM's scheduler does."""

    def __init__(self, **settings: object) -> None:
        self.locator = ScriptedLocator()
        self.clock = Clock()
        self.tally = Tally()
        nonces = iter(range(1000))
        self.side = SchedulerSide(
            Settings(**{"min_cached_token_delta": 1, **settings}),  # type: ignore[arg-type]
            PAGE_TOKENS,
            self.tally,
            clock=self.clock,
            nonce=lambda: str(next(nonces)),
        )
        self.side.attach(FIELDS, self.locator, PAGE_BYTES)

    def match(self, request: FakeRequest, n_computed: int = 0) -> int:
        """Polls until the lookup is answered."""
        waited = threading.Event()
        for _ in range(2000):
            answer = self.side.match(request, n_computed)
            if answer is not None:
                return answer
            waited.wait(0.005)
        raise AssertionError("the lookup was never answered")

    def allocate(self, request: FakeRequest, n_loaded: int = 0, first_block: int = 1) -> None:
        n_blocks = -(-request.num_tokens // PAGE_TOKENS)
        self.side.allocated(request, lambda: list(range(first_block, first_block + n_blocks)), n_loaded)

    def step(self, *scheduled: tuple[FakeRequest, int, int, int], preempted: tuple[str, ...] = ()) -> StepOrders:
        orders = self.side.take_orders(preempted)
        blocks = {r.request_id: list(range(1, 2 + r.num_tokens // PAGE_TOKENS)) for r, *_ in scheduled}
        self.side.order_publishes(
            orders, StepSchedule([(r.request_id, c, n, d) for r, c, n, d in scheduled], blocks.__getitem__)
        )
        return orders

    def compute(self, request: FakeRequest, seconds: float) -> None:
        """A step that computes the whole prompt."""
        orders = self.step((request, 0, request.num_tokens, 0))
        self.clock.now += seconds
        self.side.step_ended(StepReport(orders.step, []))

    def start(self, request: FakeRequest) -> None:
        """A request that finds nothing and gets its blocks."""
        self.side.request_arrived(request)
        assert self.match(request) == 0
        self.allocate(request)

    def counts(self) -> dict[str, dict[str, float]]:
        return (self.tally.take() or {"counts": {}})["counts"]


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.side.close()


def pages_of(order: PageOrder) -> list[int]:
    return list(range(order.chain.first, order.chain.first + len(order)))


def test_a_request_waits_for_its_lookup_without_blocking_the_scheduler(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 4)
    engine.locator.may_answer.clear()
    engine.locator.answer = lambda chain: [2] * len(chain)
    engine.side.request_arrived(request)
    assert engine.side.match(request, 0) is None
    assert engine.side.match(request, 0) is None
    engine.locator.may_answer.set()
    assert engine.match(request) == 4 * PAGE_TOKENS
    assert len(engine.locator.asked) == 1


def test_an_idle_engine_has_a_quick_answer_in_the_same_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "IDLE_PATIENCE_S", 30.0)
    engine.locator.answer = lambda chain: [2] * len(chain)
    request = FakeRequest.of_pages("r", 4)
    engine.side.request_arrived(request)
    assert engine.side.match(request, 0) == 4 * PAGE_TOKENS


@pytest.mark.parametrize("is_shared", [True, False])
def test_an_engine_that_computed_nothing_yet_to_compare_with_waits_for_no_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    computing, arrived = FakeRequest.of_pages("computing", 4), FakeRequest.of_pages("arrived", 4)
    computing.resumable = not is_shared
    engine.start(computing)
    engine.locator.may_answer.clear()
    monkeypatch.setattr(patience, "IDLE_PATIENCE_S", 30.0)
    engine.side.request_arrived(arrived)
    assert engine.side.match(arrived, 0) is None
    engine.side.finished("computing")
    later = FakeRequest.of_pages("later", 4)
    engine.side.request_arrived(later)
    threading.Timer(0.1, engine.locator.may_answer.set).start()
    assert engine.side.match(later, 0) == 0, "it is idle again, and waits"


def test_an_engine_with_long_steps_has_a_quick_answer_in_the_same_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    computing, arrived = FakeRequest.of_pages("computing", 4), FakeRequest.of_pages("arrived", 4)
    engine.start(computing)
    engine.step((computing, 0, 64, 0))
    engine.locator.answer = lambda chain: [2] * len(chain)
    monkeypatch.setattr(patience, "IDLE_PATIENCE_S", 30.0)
    engine.clock.now += 30 / patience.STEP_SHARE
    engine.step((computing, 64, 1, 0))
    engine.side.request_arrived(arrived)
    assert engine.side.match(arrived, 0) == 4 * PAGE_TOKENS


def test_a_lookup_that_is_not_answered_by_its_deadline_is_a_miss(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 4)
    engine.locator.may_answer.clear()
    engine.side.request_arrived(request)
    assert engine.side.match(request, 0) is None
    engine.clock.now += engine.side.settings.lookup_timeout_s + 0.001
    assert engine.side.match(request, 0) == 0
    assert engine.counts()["lookups"] == {"timeout": 1}
    engine.locator.may_answer.set()


def test_where_nothing_is_ever_found_a_busy_engine_computes_at_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(60):
        missing = FakeRequest.of_pages(f"missing {number}", 64)
        engine.start(missing)
        engine.compute(missing, seconds=0.5)
        engine.side.finished(missing.request_id)
    engine.start(FakeRequest.of_pages("computing", 4))
    learnt = threading.Event()
    learn = Worth.learn
    monkeypatch.setattr(Worth, "learn", lambda *found: (learn(*found), learnt.set()))
    engine.counts()
    engine.locator.answer = lambda chain: [2] * len(chain)
    engine.locator.may_answer.clear()
    late, next_one = FakeRequest.of_pages("late", 64), FakeRequest.of_pages("next", 1024)
    engine.side.request_arrived(late)
    assert engine.side.match(late, 0) == 0
    assert engine.counts()["lookups"] == {"not_awaited": 1}
    engine.locator.may_answer.set()
    assert learnt.wait(10)
    engine.locator.may_answer.clear()
    engine.side.request_arrived(next_one)
    assert engine.side.match(next_one, 0) is None, (
        "an answer with pages came, if too late, so it is waited for the next"
    )
    engine.locator.may_answer.set()


@pytest.mark.parametrize("mode", ["off", "shadow"])
def test_pages_at_peers_are_worth_no_wait_while_they_are_not_pulled(mode: str) -> None:
    engine = Engine(mode=mode)
    engine.locator.answer = lambda chain: [2] * len(chain)
    for number in range(60):
        request = FakeRequest.of_pages(f"declined {number}", 64)
        engine.start(request)
        engine.compute(request, seconds=0.5)
        engine.side.finished(request.request_id)
    engine.start(FakeRequest.of_pages("computing", 4))
    engine.locator.may_answer.clear()
    request = FakeRequest.of_pages("r", 64)
    engine.side.request_arrived(request)
    assert engine.side.match(request, 0) == 0
    engine.locator.may_answer.set()
    engine.side.close()


def test_a_lookup_that_finds_nothing_is_counted_with_its_reason(engine: Engine) -> None:
    engine.locator.reason = "no_members"
    engine.start(FakeRequest.of_pages("r", 4))
    assert engine.counts()["lookups"] == {"no_members": 1}


def test_beyond_the_limit_of_deferred_requests_a_request_is_computed_at_once() -> None:
    engine = Engine(deferred_requests_max=2)
    engine.locator.may_answer.clear()
    requests = [FakeRequest.of_pages(str(n), 4) for n in range(3)]
    for request in requests:
        engine.side.request_arrived(request)
    assert [engine.side.match(request, 0) for request in requests] == [None, None, 0]
    assert engine.counts()["lookups"] == {"deferred_full": 1}
    engine.locator.may_answer.set()
    engine.side.close()


@pytest.mark.parametrize(("extra_tokens", "n_offered"), [(0, 3), (1, 4), (15, 4)])
def test_the_engine_always_computes_at_least_one_token(engine: Engine, extra_tokens: int, n_offered: int) -> None:
    request = FakeRequest.of_pages("r", 4, extra_tokens)
    engine.locator.answer = lambda chain: [1] * len(chain)
    engine.side.request_arrived(request)
    assert engine.match(request) == n_offered * PAGE_TOKENS


def test_pages_that_the_engine_has_are_not_asked_for(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 6)
    engine.locator.answer = lambda chain: [2] * len(chain)
    engine.side.request_arrived(request)
    assert engine.match(request, 2 * PAGE_TOKENS) == 4 * PAGE_TOKENS
    assert [(chain.first, len(chain)) for chain in engine.locator.asked] == [(2, 4)]


def test_only_the_pages_before_the_first_gap_are_offered(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 6)
    engine.locator.answer = lambda chain: [1, 2, 0, 2, 2, 2]
    engine.side.request_arrived(request)
    assert engine.match(request) == 2 * PAGE_TOKENS


@pytest.mark.parametrize(
    ("statuses", "n_offered"),
    [([2, 2, 2, 0], 0), ([2, 2, 2, 2], 4), ([1, 2, 2, 2], 1), ([1, 1, 1, 0], 3)],
    ids=["below the floor", "at the floor", "only the own pool", "the own pool has no floor"],
)
def test_few_tokens_are_not_pulled_from_peers_but_always_from_the_own_pool(statuses: list[int], n_offered: int) -> None:
    engine = Engine(min_cached_token_delta=4 * PAGE_TOKENS)
    request = FakeRequest.of_pages("r", 4)
    engine.locator.answer = lambda chain: statuses
    engine.side.request_arrived(request)
    assert engine.match(request) == n_offered * PAGE_TOKENS
    engine.side.close()


def test_with_pulling_off_the_own_pool_is_still_reloaded() -> None:
    engine = Engine(mode="off")
    request = FakeRequest.of_pages("r", 4)
    engine.locator.answer = lambda chain: [1, 2, 2, 2]
    engine.side.request_arrived(request)
    assert engine.match(request) == PAGE_TOKENS
    assert engine.counts()["declined_tokens"] == {"mode_off": 3 * PAGE_TOKENS}
    engine.side.close()


def test_an_accepted_load_is_ordered_once_with_the_blocks_behind_the_local_hit(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 6)
    engine.locator.answer = lambda chain: [2] * len(chain)
    engine.side.request_arrived(request)
    n_loaded = engine.match(request, 2 * PAGE_TOKENS)
    engine.allocate(request, n_loaded, first_block=10)
    (order,) = engine.step().loads
    assert pages_of(order) == [2, 3, 4, 5]
    assert order.block_ids().tolist() == [12, 13, 14, 15]
    chain = Chain(namespace_digest(FIELDS))
    chain.extend(request.block_hashes)
    assert order.chain == chain.slice(2, 6)
    # vLLM calls again when the load is over, with nothing to load.
    engine.allocate(request, 0, first_block=10)
    assert engine.step().loads == []


def test_a_load_is_offered_once_for_each_attempt(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 4)
    engine.locator.answer = lambda chain: [2] * len(chain)
    engine.side.request_arrived(request)
    engine.allocate(request, engine.match(request))
    engine.step()
    # The load failed: vLLM asks about the same request again, for ever if we offer again.
    assert engine.side.match(request, 0) == 0
    request.num_preemptions += 1
    assert engine.match(request) == 4 * PAGE_TOKENS


def test_an_offer_that_vllm_could_not_use_is_made_again(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 4)
    engine.locator.answer = lambda chain: [2] * len(chain)
    engine.side.request_arrived(request)
    assert engine.match(request) == 4 * PAGE_TOKENS
    assert engine.side.match(request, 0) == 4 * PAGE_TOKENS
    assert len(engine.locator.asked) == 1
    engine.clock.now += 10
    assert engine.match(request) == 4 * PAGE_TOKENS
    assert len(engine.locator.asked) == 2, "an answer this old is asked again"


def test_an_answer_that_came_during_a_long_step_is_used(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 4)
    engine.locator.answer = lambda chain: [2] * len(chain)
    engine.locator.may_answer.clear()
    engine.side.request_arrived(request)
    assert engine.side.match(request, 0) is None
    engine.locator.may_answer.set()
    pause = threading.Event()
    while "lookups" not in engine.counts():  # counted when the answer is there; the test's own deadline ends this
        pause.wait(0.002)
    # Were it too old by then, it would be asked again at every such step, and its request would not run.
    engine.clock.now += 10
    assert engine.side.match(request, 0) == 4 * PAGE_TOKENS


def test_a_longer_local_hit_uses_the_same_answer_and_a_shorter_one_asks_again(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 6)
    engine.locator.answer = lambda chain: [2] * len(chain)
    engine.side.request_arrived(request)
    assert engine.match(request, 2 * PAGE_TOKENS) == 4 * PAGE_TOKENS
    assert engine.side.match(request, 4 * PAGE_TOKENS) == 2 * PAGE_TOKENS
    assert len(engine.locator.asked) == 1
    assert engine.match(request) == 6 * PAGE_TOKENS
    assert len(engine.locator.asked) == 2


@pytest.mark.parametrize("change", [{"lora_request": object()}, {"resumable": True}])
def test_requests_whose_hash_does_not_name_their_content_are_not_shared(
    engine: Engine, change: dict[str, object]
) -> None:
    request = FakeRequest.of_pages("r", 4)
    for name, value in change.items():
        setattr(request, name, value)
    engine.side.request_arrived(request)
    assert engine.side.match(request, 0) == 0
    engine.allocate(request)
    assert engine.step((request, 0, request.num_tokens, 0)).publishes == []
    assert sum(engine.counts()["unshared_requests"].values()) == 1


def test_nothing_is_asked_while_the_agent_is_away(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 4)
    engine.locator.healthy = False
    engine.side.request_arrived(request)
    assert engine.side.match(request, 0) == 0
    assert engine.locator.asked == []


def test_pages_are_published_in_the_step_that_fills_them(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 3, extra_tokens=10)
    engine.start(request)
    chunk = 2 * PAGE_TOKENS + 5
    (first,) = engine.step((request, 0, chunk, 0)).publishes
    assert pages_of(first) == [0, 1]
    assert first.block_ids().tolist() == [1, 2]
    (second,) = engine.step((request, chunk, request.num_tokens - chunk, 0)).publishes
    assert pages_of(second) == [2]


def test_a_generated_page_is_published_after_the_step_that_computes_its_last_token(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 1, extra_tokens=PAGE_TOKENS - 1)
    engine.start(request)
    engine.step((request, 0, request.num_tokens, 0))
    n_computed = request.num_tokens
    request.generate(1)
    # The token that fills page 1 was sampled, but its own KV is computed only in the step that takes it as input.
    assert len(request.block_hashes) == 2
    (order,) = engine.step((request, n_computed, 1, 0)).publishes
    assert pages_of(order) == [1]


def test_a_sampled_token_whose_kv_is_not_computed_yet_keeps_its_page_back(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 2, extra_tokens=0)
    engine.start(request)
    assert [pages_of(o) for o in engine.step((request, 0, 2 * PAGE_TOKENS - 1, 0)).publishes] == [[0]]


def test_a_page_whose_last_token_is_not_known_yet_waits_for_its_hash(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 1, extra_tokens=PAGE_TOKENS - 1)
    engine.start(request)
    # With asynchronous scheduling the next step is planned before the token that this one samples is known.
    assert [pages_of(o) for o in engine.step((request, 0, request.num_tokens, 0)).publishes] == [[0]]
    assert engine.step((request, 2 * PAGE_TOKENS - 1, 1, 0)).publishes == []
    request.generate(2)
    assert [pages_of(o) for o in engine.step((request, 2 * PAGE_TOKENS, 1, 0)).publishes] == [[1]]


def test_draft_tokens_never_fill_a_page(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 2, extra_tokens=0)
    engine.start(request)
    assert [pages_of(o) for o in engine.step((request, 0, 2 * PAGE_TOKENS + 2, 3)).publishes] == [[0]]
    assert [pages_of(o) for o in engine.step((request, 2 * PAGE_TOKENS - 1, 3, 2)).publishes] == [[1]]


def test_pages_that_the_engine_had_are_offered_again_once_after_the_new_ones(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 4)
    engine.start(request)
    new, had = engine.step((request, 3 * PAGE_TOKENS, PAGE_TOKENS + 1, 0)).publishes
    assert pages_of(new) == [3]
    assert pages_of(had) == [0, 1, 2]
    assert [new.blocks, had.blocks] == [
        PageOrder.build("r", each.chain, blocks, 1).blocks for each, blocks in ((new, [4]), (had, [1, 2, 3]))
    ]
    request.generate(PAGE_TOKENS)
    (order,) = engine.step((request, request.num_tokens - PAGE_TOKENS, PAGE_TOKENS, 0)).publishes
    assert pages_of(order) == [4]


def test_pages_that_the_engine_had_are_not_offered_after_a_reset(engine: Engine) -> None:
    """They might be of a request that ran on blocks from before."""
    engine.side.reset()
    request = FakeRequest.of_pages("r", 4)
    engine.start(request)
    (order,) = engine.step((request, 3 * PAGE_TOKENS, PAGE_TOKENS + 1, 0)).publishes
    assert pages_of(order) == [3]


def test_pages_after_a_failed_load_are_published_from_where_computing_begins(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 4)
    engine.locator.answer = lambda chain: [2] * len(chain)
    engine.side.request_arrived(request)
    engine.allocate(request, engine.match(request))
    engine.step()
    engine.allocate(request)
    computed, loaded = engine.step((request, PAGE_TOKENS, 3 * PAGE_TOKENS + 1, 0)).publishes
    assert pages_of(computed) == [1, 2, 3]
    assert pages_of(loaded) == [0]


def test_a_preempted_request_starts_anew(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 3)
    engine.start(request)
    engine.step((request, 0, request.num_tokens, 0))
    request.num_preemptions += 1
    assert engine.step(preempted=("r",)).preempted == ["r"]
    assert engine.match(request) == 0
    engine.allocate(request)
    (order,) = engine.step((request, 0, request.num_tokens, 0)).publishes
    assert pages_of(order) == [0, 1, 2]


def test_blocks_are_held_exactly_when_copies_from_them_may_run(engine: Engine) -> None:
    published, nothing_full, preempted = (
        FakeRequest.of_pages(name, n, 3) for name, n in (("a", 2), ("b", 0), ("c", 2))
    )
    for request in (published, nothing_full, preempted):
        engine.start(request)
        engine.step((request, 0, request.num_tokens, 0))
    preempted.num_preemptions += 1
    assert engine.side.finished("a") is True
    assert engine.side.finished("b") is False
    assert engine.side.finished("c") is False, "its blocks were freed when it was preempted"
    assert engine.step().held == ["a"]
    assert engine.step().held == []


def test_an_aborted_request_with_a_load_under_way_is_not_held(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 4)
    engine.locator.answer = lambda chain: [2] * len(chain)
    engine.side.request_arrived(request)
    engine.allocate(request, engine.match(request))
    assert len(engine.step().loads) == 1
    assert engine.side.finished("r") is False, "its report as received frees it; a second one would end the engine"
    assert engine.step().held == []


def test_a_preempted_request_that_loads_is_not_held_for_the_copies_of_before(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 4)
    engine.start(request)
    assert len(engine.step((request, 0, request.num_tokens, 0)).publishes) == 1
    request.num_preemptions += 1
    engine.locator.answer = lambda chain: [1] * len(chain)
    engine.allocate(request, engine.match(request))
    assert len(engine.step(preempted=("r",)).loads) == 1
    assert engine.side.finished("r") is False
    assert engine.step().held == []


def test_after_a_reset_no_key_of_before_is_used_again(engine: Engine) -> None:
    running, waiting = FakeRequest.of_pages("a", 2), FakeRequest.of_pages("b", 2)
    engine.start(running)
    (before,) = engine.step((running, 0, running.num_tokens, 0)).publishes
    engine.side.request_arrived(waiting)
    engine.side.reset()
    assert engine.locator.n_resets == 1
    running.generate(PAGE_TOKENS)
    tainted = engine.step((running, 2 * PAGE_TOKENS + 1, PAGE_TOKENS, 0)).publishes
    assert tainted == [], "it computes on top of blocks from before the reset"
    assert engine.match(waiting) == 0
    engine.allocate(waiting)
    (after,) = engine.step((waiting, 0, waiting.num_tokens, 0)).publishes
    assert after.chain.keys != before.chain.keys
    engine.side.reset()
    fresh = FakeRequest.of_pages("c", 2)
    engine.start(fresh)
    (again,) = engine.step((fresh, 0, fresh.num_tokens, 0)).publishes
    assert again.chain.keys not in (after.chain.keys, before.chain.keys)


def test_a_request_preempted_by_a_reset_is_shared_again(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 2)
    engine.start(request)
    engine.step((request, 0, request.num_tokens, 0))
    request.num_preemptions += 1
    engine.side.reset()
    assert engine.match(request) == 0
    engine.allocate(request)
    assert len(engine.step((request, 0, request.num_tokens, 0)).publishes) == 1


def test_tokens_are_told_apart_by_where_they_come_from(engine: Engine) -> None:
    request = FakeRequest.of_pages("r", 4)
    engine.locator.answer = lambda chain: [1, 2, 2, 1]
    engine.side.request_arrived(request)
    n_loaded = engine.match(request)
    engine.allocate(request, n_loaded)
    assert engine.side.hit_sources(request, n_loaded) == (2 * PAGE_TOKENS, 2 * PAGE_TOKENS)
    assert engine.counts()["accepted_tokens"] == {"own_pool": 2 * PAGE_TOKENS, "peer": 2 * PAGE_TOKENS}


def accepted(engine: Engine, n: int, statuses: list[int], name: str = "r") -> list[str]:
    """Requests that all come at once, each as vLLM handles one; returns those whose loads were accepted."""
    engine.locator.answer = lambda chain: statuses
    loads = []
    for index in range(n):
        request = FakeRequest.of_pages(f"{name}{index}", 4, prompt=f"{name}{index}")
        engine.side.request_arrived(request)
        n_loaded = engine.match(request)
        engine.allocate(request, n_loaded)
        if n_loaded:
            loads.append(request.request_id)
    assert [order.request for order in engine.step().loads] == loads
    return loads


@pytest.mark.parametrize(("lane", "statuses"), [(Lane.PULL, [2] * 4), (Lane.RELOAD, [1] * 4)])
def test_of_a_burst_only_loads_that_begin_soon_are_accepted_and_the_rest_is_computed_at_once(
    engine: Engine, lane: Lane, statuses: list[int]
) -> None:
    loads = accepted(engine, 40, statuses)
    assert len(loads) == lane.loads_max
    assert engine.counts()["declined_tokens"] == {"busy": (40 - lane.loads_max) * 4 * PAGE_TOKENS}
    engine.side.loads_ended([*loads[:2], "somebody else"])
    assert len(accepted(engine, 5, statuses, "later")) == 2


def test_while_peers_are_slow_the_own_pool_is_still_reloaded(engine: Engine) -> None:
    assert len(accepted(engine, 40, [2] * 4)) == Lane.PULL.loads_max
    engine.counts()
    request = FakeRequest.of_pages("r", 4)
    engine.locator.answer = lambda chain: [1, 2, 2, 2]
    engine.side.request_arrived(request)
    assert engine.match(request) == PAGE_TOKENS
    assert engine.counts()["declined_tokens"] == {"busy": 3 * PAGE_TOKENS}
    engine.allocate(request, PAGE_TOKENS)
    assert [order.lane for order in engine.step().loads] == [Lane.RELOAD]


def test_loads_that_were_never_reported_do_not_close_a_lane_for_good(engine: Engine) -> None:
    assert len(accepted(engine, 40, [2] * 4)) == Lane.PULL.loads_max
    engine.clock.now += 2 * engine.side.settings.load_timeout_s
    assert len(accepted(engine, 40, [2] * 4, "later")) == Lane.PULL.loads_max


@pytest.mark.parametrize("statuses", [[1] * 4000, [2] * 4000])
def test_a_load_and_its_wait_for_a_thread_are_no_longer_than_the_load_timeout(
    engine: Engine, statuses: list[int]
) -> None:
    request = FakeRequest.of_pages("long", 4000)
    engine.locator.answer = lambda chain: statuses[: len(chain)]
    engine.side.request_arrived(request)
    engine.allocate(request, engine.match(request))
    (order,) = engine.step().loads
    assert (1 + START_SHARE) * order.timeout_s == pytest.approx(engine.side.settings.load_timeout_s)


def test_lookups_that_hang_do_not_hold_up_the_next_one(engine: Engine) -> None:
    engine.locator.answer = lambda chain: [2] * len(chain)
    engine.locator.may_answer.clear()
    hanging = [FakeRequest.of_pages(str(n), 4) for n in range(LOOKUP_THREADS - 1)]
    for request in hanging:
        engine.side.request_arrived(request)
        assert engine.side.match(request, 0) is None
    eventually = threading.Event()
    while len(engine.locator.asked) < len(hanging):
        eventually.wait(0.002)
    hang, engine.locator.may_answer = engine.locator.may_answer, threading.Event()
    engine.locator.may_answer.set()
    request = FakeRequest.of_pages("r", 4)
    engine.side.request_arrived(request)
    assert engine.match(request) == 4 * PAGE_TOKENS
    hang.set()


def test_closing_closes_the_locator_and_ends_sharing(engine: Engine) -> None:
    engine.side.close()
    assert engine.locator.is_closed
    request = FakeRequest.of_pages("r", 4)
    engine.side.request_arrived(request)
    assert engine.side.match(request, 0) == 0


# ---- costs


def computed(engine: Engine, n_tokens: int, seconds: float, n_steps: int = 10) -> None:
    """Steps of one request that compute so many tokens each."""
    request = FakeRequest.of_pages("computing", 1)
    for _ in range(n_steps):
        orders = engine.step((request, 0, n_tokens, 0))
        engine.clock.now += seconds
        engine.side.step_ended(StepReport(orders.step))


def pulled(engine: Engine, name: str, n_pages: int, *seconds_of_ranks: float) -> int:
    """A request whose pages are at a peer; returns how many tokens it pulled."""
    engine.locator.answer = lambda chain: [2] * len(chain)
    request = FakeRequest.of_pages(name, n_pages, prompt=name)
    engine.side.request_arrived(request)
    n_tokens = engine.match(request)
    engine.allocate(request, n_tokens)
    orders = engine.step()
    if n_tokens:
        report = StepReport(orders.step)
        for seconds in seconds_of_ranks:
            report.aggregate(StepReport(orders.step, [LoadReport(name, n_pages, seconds, is_aborted=False)]))
        engine.side.step_ended(report)
        engine.side.loads_ended([name])
    engine.side.finished(name)
    return n_tokens


def test_what_steps_and_loads_take_decides_whether_pages_are_pulled(engine: Engine) -> None:
    computed(engine, 1024, seconds=0.01)
    tokens = [pulled(engine, f"slow{n}", 64, 0.4, 0.5) for n in range(30)]
    assert tokens[0] == 64 * PAGE_TOKENS
    assert tokens[8:] == [0] * 22
    counts = engine.counts()
    assert counts["pull_effect"]["lost"] > 3
    assert set(counts["decisions"]) <= {"pull", "not_worth_it", "pair_guarded"}


def test_loads_that_fail_for_a_reason_of_this_engine_turn_nothing_off(engine: Engine) -> None:
    computed(engine, 1024, seconds=0.5)
    for n in range(30):
        request = FakeRequest.of_pages(f"r{n}", 64, prompt=f"r{n}")
        engine.locator.answer = lambda chain: [2] * len(chain)
        engine.side.request_arrived(request)
        assert engine.match(request) == 64 * PAGE_TOKENS
        engine.allocate(request, 64 * PAGE_TOKENS)
        failed = LoadReport(f"r{n}", 0, 1.0, is_aborted=False, is_local_fault=True)
        engine.side.step_ended(StepReport(engine.step().step, [failed]))
        engine.side.loads_ended([f"r{n}"])
        engine.side.finished(f"r{n}")
    assert "pull_effect" not in engine.counts()


def test_pages_whose_pulls_pay_go_on_being_pulled(engine: Engine) -> None:
    computed(engine, 1024, seconds=0.5)
    assert [pulled(engine, f"quick{n}", 64, 0.01) for n in range(30)] == [64 * PAGE_TOKENS] * 30
    assert engine.counts()["pull_effect"]["saved"] > 10


def test_in_shadow_mode_nothing_is_pulled_and_the_saving_is_counted() -> None:
    engine = Engine(mode="shadow")
    try:
        computed(engine, 1024, seconds=0.5)
        assert [pulled(engine, f"r{n}", 64) for n in range(3)] == [0, 0, 0]
        counts = engine.counts()
        assert counts["decisions"] == {"shadow": 3}
        assert counts["shadow_effect"]["saved"] > 1
    finally:
        engine.side.close()


def test_without_measured_costs_the_floor_alone_decides() -> None:
    engine = Engine(measured_costs=False)
    try:
        computed(engine, 1024, seconds=0.001)
        assert [pulled(engine, f"r{n}", 64, 1.0) for n in range(30)] == [64 * PAGE_TOKENS] * 30
    finally:
        engine.side.close()


def test_a_request_that_is_asked_about_again_is_counted_once(engine: Engine) -> None:
    engine.locator.answer = lambda chain: [2] * len(chain)
    request = FakeRequest.of_pages("r", 4)
    engine.side.request_arrived(request)
    for _ in range(5):
        engine.match(request)
    assert engine.counts()["decisions"] == {"pull": 1}


def test_tokens_that_are_declined_are_counted_once_however_often_the_request_is_asked_about() -> None:
    engine = Engine(min_cached_token_delta=1000)
    try:
        engine.locator.answer = lambda chain: [2] * len(chain)
        request = FakeRequest.of_pages("r", 4)
        engine.side.request_arrived(request)
        for _ in range(5):
            assert engine.match(request) == 0
        assert engine.counts()["declined_tokens"] == {"below_floor": 4 * PAGE_TOKENS}
    finally:
        engine.side.close()


A, B = AgentId(b"a" * 16), AgentId(b"b" * 16)


def test_the_load_names_the_producer_that_was_chosen(engine: Engine) -> None:
    engine.locator.offers = (Offer(A, 64, 0),)
    engine.locator.answer = lambda chain: [2] * len(chain)
    request = FakeRequest.of_pages("r", 64)
    engine.side.request_arrived(request)
    engine.allocate(request, engine.match(request))
    (order,) = engine.step().loads
    assert (order.source, order.lane) == (A, Lane.PULL)


def test_steps_that_check_drafts_are_not_learnt_as_prompts(engine: Engine) -> None:
    request = FakeRequest.of_pages("drafting", 1)
    for n_draft, is_learnt in ((199, False), (0, True)):
        orders = engine.step((request, 0, 200, n_draft))
        engine.side.step_ended(StepReport(orders.step))
        assert ("measured" in engine.counts()) is is_learnt


@pytest.mark.parametrize(("statuses", "n_reloads"), [([1, 1, 2, 1], 2), ([2, 1, 1, 2], 0), ([1, 1, 1, 1], 0)])
def test_the_load_says_which_of_its_pages_are_reloaded_before_a_pull(
    engine: Engine, statuses: list[int], n_reloads: int
) -> None:
    engine.locator.answer = lambda chain: statuses
    request = FakeRequest.of_pages("r", 5)
    engine.side.request_arrived(request)
    engine.allocate(request, engine.match(request))
    (order,) = engine.step().loads
    assert order.n_reloads == n_reloads


def test_from_a_slow_producer_nothing_is_pulled_while_another_one_has_the_pages_too(engine: Engine) -> None:
    computed(engine, 1024, seconds=0.1)
    for n in range(12):
        for producer, seconds in ((A, 0.5), (B, 0.01)):
            engine.locator.offers = (Offer(producer, 64, 0),)
            pulled(engine, f"{producer[:1]!r}{n}", 64, seconds)
    engine.counts()
    engine.locator.offers = (Offer(A, 64, 0),)
    assert pulled(engine, "slow alone", 64) == 0
    engine.locator.offers = (Offer(A, 64, 0), Offer(B, 64, 0))
    assert [pulled(engine, f"both {n}", 64, 0.01) for n in range(20)] == [64 * PAGE_TOKENS] * 20
    assert engine.counts()["decisions"] == {"not_worth_it": 1, "pull": 20}
