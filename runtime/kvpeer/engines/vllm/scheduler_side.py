"""The connector's scheduler side: which pages a request loads, which it publishes, and when its blocks may be freed.

It decides and remembers; copies are the workers' business and lookups run in threads of their own, so no method here
blocks (but `reset`, which an operator calls, and `match`, for as long as `Patience` allows). What vLLM 0.32 demands
of it (vllm/v1/core/sched/scheduler.py):

- An accepted load must be reported as finished once by each rank, aborted or not: a second report trips an assertion
  that ends the engine, a missing one keeps its blocks for ever.
- A failed load is recomputed and its request is asked about again, so a load is offered once per (request,
  preemptions).
- At least one token of a request must be computed by the engine, which samples from it.
- A request that returns True from `request_finished` must be reported as sent once. One that is loading must return
  False: its report as received already frees it.

Requests are vLLM's `Request`, read by duck typing. Not thread-safe: everything runs on the scheduler's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpeer.core.chain import Chain, ChainSlice, namespace_digest
from kvpeer.core.policy import Action, Candidate, Load, Mode, RequestFacts, located_tokens, pull_wait_s
from kvpeer.core.policy.costs import STEP_TOKENS
from kvpeer.engines.policy import EnginePolicy
from kvpeer.engines.told_settings import ToldSettings
from kvpeer.engines.traces import NO_TRACES, DecisionTraces, Lookup
from kvpeer.engines.vllm.lanes import Lane, UnderWay
from kvpeer.engines.vllm.lookups import Answer, Located, Locator, Lookups
from kvpeer.engines.vllm.metadata import PageOrder, StepOrders, StepReport
from kvpeer.engines.vllm.patience import Patience
from kvpeer.engines.vllm.settings import ENVIRONMENT_PREFIX, LIVE, Settings
from kvpeer.engines.vllm.sharing import unshared_reason
from kvpeer.engines.vllm.tally import Tally
from kvpeer.engines.vllm.tracked import NO_OFFER, Offer, Tracked

__all__ = ["SchedulerSide", "StepSchedule"]

RESET_TIMEOUT_S = 2.0
"""What an operator's reset waits for the agent. Keys change in any case, so a late answer is harmless."""

NOWHERE, OWN_POOL = 0, 1
"""Statuses of a located page; 2 is at a peer."""

_logger = logging.getLogger("vllm.kvpeer")


@dataclass(frozen=True)
class StepSchedule:
    """One step as vLLM scheduled it: per request (id, tokens computed before, tokens in this step, draft tokens among
    them)."""

    requests: Sequence[tuple[str, int, int, int]]
    block_ids: Callable[[str], Sequence[int]]


@dataclass
class SchedulerSide:
    """See the module docstring. Serves without peers until `attach`."""

    settings: Settings
    page_tokens: int
    tally: Tally
    clock: Callable[[], float]
    nonce: Callable[[], str]
    """Makes a value that no other call of any engine makes."""
    step_tokens: int = STEP_TOKENS
    """As many as the engine computes in a step at most."""
    traces: DecisionTraces = NO_TRACES

    _page_bytes: int = 0
    _namespace_fields: dict[str, str] = field(default_factory=dict)
    _namespace: bytes = b""
    _locator: Locator | None = None
    _lookups: Lookups | None = None
    _tracked: dict[str, Tracked] = field(default_factory=dict)
    _untracked: set[str] = field(default_factory=set)
    _orders: StepOrders = field(default_factory=StepOrders)
    _n_steps: int = 0
    _is_reset: bool = False

    def __post_init__(self) -> None:
        policy, common = self.settings.policy(), (self.tally, self.clock, _logger)
        self._policy = EnginePolicy(policy, *common, self.step_tokens, traces=self.traces)
        # No load takes that long, see `Settings.load_timeout_s`; twice, because a copy that runs is finished.
        self._loads = UnderWay(lost_after_s=2 * self.settings.load_timeout_s)
        self._patience = Patience(self.clock, self._policy.pace)
        self._told = ToldSettings(self.settings, ENVIRONMENT_PREFIX, LIVE, _logger)

    # ---- start and end

    def attach(self, namespace_fields: Mapping[str, str], locator: Locator, page_bytes: int) -> None:
        """From now on new requests are shared, under this namespace; `close` will close the locator. page_bytes: of all
        ranks together."""
        self._page_bytes = page_bytes
        self._namespace_fields = dict(namespace_fields)
        self._namespace = namespace_digest(self._namespace_fields)
        self._locator = locator
        self._lookups = Lookups(
            locator.locate,
            timeout_s=self.settings.lookup_timeout_s,
            deferred_max=self.settings.deferred_requests_max,
            clock=self.clock,
            tally=self.tally,
            learn=self._learn,
        )

    def close(self) -> None:
        """Ends lookups and the connection; idempotent."""
        lookups, self._lookups = self._lookups, None
        locator, self._locator = self._locator, None
        if lookups is not None:
            lookups.close()
        if locator is not None:
            locator.close()

    def reset(self) -> None:
        """Withdraws this engine's pages and never uses keys of before again. Blocks for at most `RESET_TIMEOUT_S`.

        An engine is reset when its weights may have changed, which its namespace cannot show. So from here on its
        keys have a random nonce in them: it shares with itself only, until it is restarted.
        """
        if not self._namespace:
            return
        self._namespace = namespace_digest({**self._namespace_fields, "reset": self.nonce()})
        self._is_reset = True
        if self._lookups is not None:
            self._lookups.clear()
        for tracked in self._tracked.values():
            tracked.chain, tracked.offer = Chain(self._namespace), None
            tracked.is_tainted = tracked.holds_blocks
        if self._locator is not None:
            self._locator.reset("the engine reset its prefix cache")

    # ---- requests

    def request_arrived(self, request: Any) -> None:
        """Begins to track a request, if its pages may be shared."""
        reason = unshared_reason(request) if self._namespace else "not_connected"
        if reason:
            self.tally.count("unshared_requests", reason)
            self.traces.unasked(request.request_id, request.num_tokens, self.page_tokens, reason)
            self._untracked.add(request.request_id)
            return
        self._tracked[request.request_id] = Tracked(request, Chain(self._namespace))

    def match(self, request: Any, n_computed_tokens: int) -> int | None:
        """Returns how many tokens beyond `n_computed_tokens` can be loaded, or None while a lookup is under way.

        vLLM asks again at every step as long as the request cannot be scheduled.
        """
        tracked = self._tracked.get(request.request_id)
        self._heed_policy()
        if tracked is None or self._lookups is None or request.skip_reading_prefix_cache:
            return 0
        if tracked.offered_attempt == request.num_preemptions or self._locator is None:
            return 0
        if not self._locator.healthy:
            return self._undecided(tracked, "no_agent")
        first = n_computed_tokens // self.page_tokens
        # The engine must compute one token itself, so a page that ends the request is never loaded.
        stop = min((request.num_tokens - 1) // self.page_tokens, len(request.block_hashes))
        if first >= stop:
            return self._undecided(tracked, "local_hit" if first else "too_short")
        patience = self._patience.of_request((stop - first) * self.page_tokens, is_idle=self._is_idle())
        answer = self._lookups.poll(
            *(request.request_id, request.num_preemptions, first),
            lambda: self._slice(tracked, first, stop),
            wait=patience.wait,
            may_wait=patience.may_return,
        )
        if answer is None:
            return None
        tracked.offer = self._decide(tracked, answer, first)
        return len(tracked.offer.chain) * self.page_tokens

    def allocated(self, request: Any, block_ids: Callable[[], Sequence[int]], n_loaded_tokens: int) -> None:
        """Takes note of the request's blocks; orders the load when vLLM accepted the offer (`n_loaded_tokens` > 0)."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if not tracked.holds_blocks:
            tracked.allocated_attempt = request.num_preemptions
            tracked.n_settled, tracked.has_copies, tracked.is_tainted = None, False, False
        if n_loaded_tokens == 0:
            return
        offer = tracked.offer or NO_OFFER
        tracked.offered_attempt = request.num_preemptions
        if self._lookups is not None:
            self._lookups.forget(request.request_id)
        # What does not fit together is still ordered: a rank reports such a load as failed, and not never.
        first, n_pages = offer.chain.first, n_loaded_tokens // self.page_tokens
        blocks = block_ids()[first : first + n_pages]
        for source, n_tokens in zip(("own_pool", "peer"), self.hit_sources(request, n_loaded_tokens), strict=True):
            if n_tokens:
                self.tally.count("accepted_tokens", source, n_tokens)
        self._loads.begin(request.request_id, offer.lane, self.clock())
        if offer.decision is not None:
            self._policy.begun(self._facts(request), offer.decision)
        producer = offer.decision.producer if offer.decision is not None else b""
        ordered = (offer.chain, blocks, offer.timeout_s, offer.lane, producer, offer.n_reloads)
        self._orders.loads.append(PageOrder.build(request.request_id, *ordered))

    def loads_ended(self, requests: Iterable[str]) -> None:
        """All ranks have reported the loads of these requests."""
        requests = list(requests)
        self._loads.end(requests)
        self._policy.ended(requests)

    def step_ended(self, report: StepReport) -> None:
        """The output of a step is here. Comes before `loads_ended` with what it says of the same loads."""
        self._policy.step_ended(report.step)
        for load in report.loads:
            n_tokens = load.n_pages * self.page_tokens
            is_void = load.is_aborted or load.is_local_fault
            self._policy.reported(load.request, n_tokens, load.seconds, is_void=is_void)

    def hit_sources(self, request: Any, n_tokens: int) -> tuple[int, int]:
        """Returns how many of the `n_tokens` just accepted come from (the own pool, peers)."""
        tracked = self._tracked.get(request.request_id)
        offer = tracked.offer if tracked is not None else None
        n_own = min(n_tokens, offer.n_own_pool * self.page_tokens) if offer is not None else 0
        return n_own, n_tokens - n_own

    def finished(self, request_id: str) -> bool:
        """Ends tracking a request; returns whether its blocks must wait for copies, which the ranks then report as
        sent. Nothing is published from here: with drafts in flight vLLM's counts of what is computed do not hold, and
        where the model runner collects before it publishes, the blocks would be free by then."""
        if self._lookups is not None:
            self._lookups.forget(request_id)
        self._policy.forget(request_id)
        self._untracked.discard(request_id)
        tracked = self._tracked.pop(request_id, None)
        if tracked is None or not (tracked.has_copies and tracked.holds_blocks):
            return False
        self._orders.held.append(request_id)
        return True

    # ---- steps

    def take_orders(self, preempted: Iterable[str]) -> StepOrders:
        """Returns the orders gathered for this step, without publishes. Does not fail: an order that got lost would
        hang its request."""
        orders, self._orders = self._orders, StepOrders()
        orders.preempted.extend(preempted)
        self._n_steps += 1
        orders.step = self._n_steps
        self._patience.step_scheduled()
        return orders

    def order_publishes(self, orders: StepOrders, step: StepSchedule) -> None:
        """Adds the publishes of this step to its orders, and takes note of when it was scheduled. Takes up a changed
        policy first, so that it holds for requests that ask for nothing, too."""
        self._heed_policy()
        self._policy.step_scheduled(orders.step, [(had, n, drafts) for _, had, n, drafts in step.requests])
        if not self.settings.publish:
            return
        for request_id, n_computed, n_scheduled, n_draft in step.requests:
            tracked = self._tracked.get(request_id)
            if tracked is not None and not tracked.is_tainted:
                self._publish_full_pages(orders, tracked, step, (n_computed, n_scheduled, n_draft))

    def _publish_full_pages(
        self, orders: StepOrders, tracked: Tracked, step: StepSchedule, tokens: tuple[int, int, int]
    ) -> None:
        """Orders the pages whose last token's KV this step computes, and once those before them. Ranks copy them
        after the step's forward pass.

        A page has a hash only once all its tokens are known, so drafts that may yet be rejected are never in one;
        they are also left out of the count of computed tokens.
        """
        request_id, (n_computed, n_scheduled, n_draft) = tracked.request.request_id, tokens
        n_full = min((n_computed + n_scheduled - n_draft) // self.page_tokens, len(tracked.request.block_hashes))
        if tracked.n_settled is None:
            n_had, blocks = min(n_computed // self.page_tokens, n_full), step.block_ids(request_id)
            self._order_publish(orders, tracked, blocks, n_had, n_full)
            # What the engine had may be gone from the pool: evicted, or lost with its agent. What is there costs one
            # question, and its answer keeps the pages of the hottest prefixes, which are never loaded, from being
            # evicted. After a reset it might be a page of a tainted request.
            if not self._is_reset:
                self._order_publish(orders, tracked, blocks, 0, n_had)
            tracked.n_settled = n_full
        elif n_full > tracked.n_settled:
            self._order_publish(orders, tracked, step.block_ids(request_id), tracked.n_settled, n_full)
            tracked.n_settled = n_full

    def _order_publish(
        self, orders: StepOrders, tracked: Tracked, blocks: Sequence[int], first: int, stop: int
    ) -> None:
        if first >= stop:
            return
        tracked.has_copies = True
        what = (tracked.request.request_id, self._slice(tracked, first, stop), blocks[first:stop])
        orders.publishes.append(PageOrder.build(*what, self.settings.publish_timeout_s))

    # ---- decisions

    def _heed_policy(self) -> None:
        """Takes up what the agent was told since it was asked last."""
        told = self._locator.policy if self._locator is not None else None
        if (changed := self._told.changed(told)) is not None:
            self.settings = changed
            self._policy.change(changed.policy())
            self._loads.lost_after_s = 2 * changed.load_timeout_s

    def _undecided(self, tracked: Tracked, reason: str) -> int:
        """Nothing is loaded, and nobody is asked."""
        self.traces.unasked(tracked.request.request_id, tracked.request.num_tokens, self.page_tokens, reason)
        return 0

    def _is_idle(self) -> bool:
        """Whether no request computes anything. Those that do are the oldest, so that a busy engine looks at one."""
        return not self._untracked and not any(each.holds_blocks for each in self._tracked.values())

    def _learn(self, located: Located) -> None:
        """On a lookup's thread: what answers are worth."""
        is_pulling = self._policy.settings.mode is Mode.ON
        self._patience.worth.learn(located.statuses != NOWHERE if is_pulling else located.statuses == OWN_POOL)

    def _decide(self, tracked: Tracked, answer: Answer, first: int) -> Offer:
        """Returns the pages to load from `first` on; counts the tokens that could be had and are not loaded."""
        request, page_tokens, now = tracked.request, self.page_tokens, self.clock()
        is_counted = tracked.decided_attempt != request.num_preemptions
        tracked.decided_attempt = request.num_preemptions
        statuses = answer.statuses[first - answer.first :]
        located = located_tokens(statuses, first * page_tokens, page_tokens)
        decision = self._policy.decide(
            self._facts(request),
            first * page_tokens,
            located,
            [
                Candidate(offer.producer, (answer.first + offer.n_pages) * page_tokens, n_waiting=offer.n_in_flight)
                for offer in answer.offers
            ],
            Load(can_reload=self._loads.has_room(Lane.RELOAD, now), can_pull=self._loads.has_room(Lane.PULL, now)),
            is_counted=is_counted,
            lookup=Lookup(answer.seconds, answer.reason),
        )
        if is_counted and (n_declined := located.reachable_tokens - first * page_tokens - decision.n_tokens):
            self.tally.count("declined_tokens", decision.reason.value, n_declined)
        is_pull = decision.action is Action.PULL
        n_pages = decision.n_tokens // page_tokens
        return Offer(
            self._slice(tracked, first, first + n_pages),
            n_own_pool=int(np.count_nonzero(statuses[:n_pages] == OWN_POOL)),
            timeout_s=decision.wait_s if is_pull else pull_wait_s(decision.n_tokens, self._policy.settings),
            lane=Lane.PULL if is_pull else Lane.RELOAD,
            decision=decision,
            n_reloads=located.resident_tokens // page_tokens - first if is_pull else 0,
        )

    def _facts(self, request: Any) -> RequestFacts:
        return RequestFacts(request.request_id, request.num_tokens, self.page_tokens, self._page_bytes)

    def _slice(self, tracked: Tracked, first: int, stop: int) -> ChainSlice:
        hashes = tracked.request.block_hashes
        tracked.chain.extend(hashes[len(tracked.chain) : stop])
        return tracked.chain.slice(first, stop)
