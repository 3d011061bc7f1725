"""Drives a scheduler side as vLLM's scheduler does, with a locator that answers what a test says. No vLLM in here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from kvpeer.core.chain import ChainSlice
from kvpeer.core.sources import Offer
from kvpeer.engines.traces import DecisionTraces
from kvpeer.engines.vllm.metadata import PageOrder, StepOrders, StepReport
from kvpeer.engines.vllm.scheduler_side import SchedulerSide, StepSchedule
from kvpeer.engines.vllm.settings import Settings
from kvpeer.engines.vllm.tally import Tally
from kvpeer.wire.messages import PolicyTold, RequestTrace
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
        self.policy: PolicyTold | None = None

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
        self.told: list[RequestTrace] = []
        nonces = iter(range(1000))
        self.side = SchedulerSide(
            Settings(**{"min_cached_token_delta": 1, **settings}),  # type: ignore[arg-type]
            PAGE_TOKENS,
            self.tally,
            clock=self.clock,
            nonce=lambda: str(next(nonces)),
            traces=DecisionTraces(lambda trace, at: self.told.append(trace), self.clock),
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


def pages_of(order: PageOrder) -> list[int]:
    return list(range(order.chain.first, order.chain.first + len(order)))
