"""The tier's side of vLLM's tiering: which pages of a request can be had, and the jobs that load and publish them.

It decides and remembers; lookups and copies run on threads of their own, so no method here blocks but `drain`, `reset`
and `close`. What vLLM 0.32 demands of a tier (vllm/v1/kv_offload/tiering):

- A key that is asked about is asked again at every step until the answer is yes or no; vLLM has no timeout. So a lookup
  ends by its deadline, as no.
- Yes is followed by a job that loads the page, and after the job by the same question. So a page that did not arrive is
  no for the rest of its request, or the two would go on for ever.
- Each job is reported as over exactly once, and only when nothing reads or writes its rows any more.

Whether pages are loaded at all is decided as in the connector, over all pages that a request asks about in a step. Not
thread-safe: everything runs on the scheduler's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpeer.core.chain import ChainSlice, loose_pages, namespace_digest
from kvpeer.core.policy import Action, Load, RequestFacts, decide, located_tokens, pull_wait_s
from kvpeer.engines.vllm.copies import Loads, PageClient, Publishes
from kvpeer.engines.vllm.lanes import Lane, UnderWay
from kvpeer.engines.vllm.lookups import Locator, Lookups
from kvpeer.engines.vllm.metadata import PageOrder
from kvpeer.engines.vllm.settings import Settings
from kvpeer.engines.vllm.tally import Tally

__all__ = ["Over", "TierClient", "TierSide"]

DRAIN_LOOK_S = 0.002
"""How often a drain looks whether the last job is over. Operators drain, requests do not."""


class TierClient(PageClient, Locator, Protocol):
    """What the tier needs of `kvpeer.client.Client`: the scheduler side's part and a rank's part, in one process."""


@dataclass(frozen=True)
class Over:
    """A job that is over. `arrived`: of a load, the keys whose pages are in their rows now. `is_whole`: whether that is
    so for all its keys; of a publish, whether all its pages can be had now."""

    job_id: int
    arrived: Sequence[bytes]
    is_whole: bool


@dataclass
class _Job:
    job_id: int
    request_id: str
    keys: Sequence[bytes]
    rows: Sequence[int]
    is_load: bool
    arrived: Sequence[bytes] = ()
    n_published: int = 0
    """Set by the publishing thread before the job is over."""

    def published(self, n_there: int) -> None:
        self.n_published = n_there


@dataclass
class _Tracked:
    """What a request asked. A *round* is one lookup of all keys that were new in a step."""

    verdicts: dict[bytes, bool] = field(default_factory=dict)
    wanted: dict[bytes, None] = field(default_factory=dict)
    """Asked about in this step for the first time, in vLLM's order, which is the prompt's."""
    looked_up: dict[bytes, None] = field(default_factory=dict)
    """The round under way; empty when there is none."""
    n_rounds: int = 0
    was_polled: bool = False
    """Whether this step has looked for the round's answer: a long prompt asks thousands of times a step."""
    lane: Lane = Lane.RELOAD


@dataclass
class TierSide:
    """See the module docstring. Everything is a miss until `attach`."""

    settings: Settings
    page_tokens: int
    tally: Tally
    clock: Callable[[], float]
    nonce: Callable[[], str]
    """Makes a value that no other call of any engine makes."""

    _namespace_fields: dict[str, str] = field(default_factory=dict)
    _namespace: bytes = b""
    _client: TierClient | None = None
    _lookups: Lookups | None = None
    _loads: Loads | None = None
    _publishes: Publishes | None = None
    _tracked: dict[str, _Tracked] = field(default_factory=dict)
    _jobs: dict[str, _Job] = field(default_factory=dict)
    _over: set[str] = field(default_factory=set)
    """Jobs that were not begun, or that a drain found over."""

    def __post_init__(self) -> None:
        self._policy = self.settings.policy()
        self._under_way = UnderWay(lost_after_s=2 * self.settings.load_timeout_s)

    # ---- start and end

    def attach(self, namespace_fields: Mapping[str, str], client: TierClient, page_bytes: int) -> None:
        """From now on new requests are shared, under this namespace; `close` will close the client."""
        self._namespace_fields = dict(namespace_fields)
        self._namespace = namespace_digest(self._namespace_fields)
        self._client = client
        self._lookups = Lookups(
            client.locate,
            timeout_s=self.settings.lookup_timeout_s,
            deferred_max=self.settings.deferred_requests_max,
            clock=self.clock,
            tally=self.tally,
        )
        self._loads = Loads(client, _no_fence, part_bytes=page_bytes, clock=self.clock, tally=self.tally)
        self._publishes = Publishes(
            client,
            _no_fence,
            part_bytes=page_bytes,
            queue_pages_max=self.settings.publish_queue_pages_max,
            clock=self.clock,
            tally=self.tally,
        )

    def close(self) -> None:
        """Ends lookups, copies and the connection; bounded, and nothing touches a row afterwards. Jobs are over then;
        idempotent."""
        parts = self._client, self._lookups, self._loads, self._publishes
        self._client = self._lookups = self._loads = self._publishes = None
        for part in parts:  # the client first: whatever waits for the agent ends at once
            if part is not None:
                part.close()
        self._over |= self._jobs.keys()

    def reset(self) -> None:
        """Withdraws this engine's pages and never uses keys of before again. Blocks for at most two seconds.

        As for the connector (`SchedulerSide.reset`): from here on the engine shares with itself only, and requests that
        are under way, which may have blocks of before, not at all.
        """
        if self._client is None or self._lookups is None:
            return
        self._namespace = namespace_digest({**self._namespace_fields, "reset": self.nonce()})
        self._tracked.clear()
        self._lookups.clear()
        self._client.reset("the engine reset its prefix cache")

    # ---- requests

    def request_arrived(self, request_id: str) -> None:
        """Begins to track a request."""
        if self._client is not None:
            self._tracked[request_id] = _Tracked()
        else:
            self.tally.count("unshared_requests", "not_connected")

    def unshare(self, request_id: str, reason: str) -> None:
        """The pages of this request are neither loaded nor published."""
        if self._tracked.pop(request_id, None) is not None:
            self.tally.count("unshared_requests", reason)

    def request_over(self, request_id: str) -> None:
        """Forgets a request; its jobs are still reported."""
        self._tracked.pop(request_id, None)
        if self._lookups is not None:
            self._lookups.forget(request_id)

    def find(self, key: bytes, request_id: str) -> bool | None:
        """Whether this page is to be loaded; None while that is not known, never longer than the lookup timeout."""
        tracked = self._tracked.get(request_id)
        if tracked is None or self._client is None or not self._client.healthy:
            return False
        if tracked.looked_up and not tracked.was_polled:
            tracked.was_polled = True
            self._poll(request_id, tracked)
        verdict = tracked.verdicts.get(key)
        if verdict is None and key not in tracked.looked_up:
            tracked.wanted[key] = None
        return verdict

    def end_step(self) -> None:
        """Begins the lookups of what was asked about in this step."""
        for request_id, tracked in self._tracked.items():
            tracked.was_polled = False
            if tracked.wanted and not tracked.looked_up:
                tracked.looked_up, tracked.wanted = tracked.wanted, {}
                tracked.n_rounds += 1
                self._poll(request_id, tracked)

    def _poll(self, request_id: str, tracked: _Tracked) -> None:
        keys = tracked.looked_up
        if self._lookups is None:
            return
        answer = self._lookups.poll(request_id, tracked.n_rounds, 0, lambda: self._pages(keys))
        if answer is not None:
            n_pages = self._n_to_load(request_id, tracked, len(keys), answer.statuses)
            tracked.verdicts.update((key, place < n_pages) for place, key in enumerate(keys))
            tracked.looked_up = {}

    def _n_to_load(self, request_id: str, tracked: _Tracked, n_asked: int, statuses: npt.NDArray[np.uint8]) -> int:
        """Returns how many of the pages are to be loaded, from the first on; counts those that could be had and are
        not. All may be: vLLM itself leaves a token to compute."""
        now = self.clock()
        located = located_tokens(statuses, 0, self.page_tokens)
        decision = decide(
            RequestFacts(request_id, n_asked * self.page_tokens + 1, self.page_tokens),
            0,
            located,
            self._policy,
            load=Load(
                can_reload=self._under_way.has_room(Lane.RELOAD, now),
                can_pull=self._under_way.has_room(Lane.PULL, now),
            ),
        )
        self.tally.count("decisions", decision.reason.value)
        if located.reachable_tokens > decision.n_tokens:
            n_declined = located.reachable_tokens - decision.n_tokens
            self.tally.count("declined_tokens", decision.reason.value, n_declined)
        tracked.lane = Lane.PULL if decision.action is Action.PULL else Lane.RELOAD
        return decision.n_tokens // self.page_tokens

    # ---- jobs

    def take_job(
        self, job_id: int, request_id: str, keys: Iterable[bytes], rows: Iterable[int], *, is_load: bool
    ) -> None:
        """Takes a job in, which is then to be begun or given up; from here on it will be reported."""
        self._jobs[str(job_id)] = _Job(job_id, request_id, tuple(keys), tuple(rows), is_load)

    def begin(self, job_id: int) -> None:
        """Hands a job to the copying threads, if its request is shared and there is room."""
        name = str(job_id)
        job = self._jobs[name]
        tracked = self._tracked.get(job.request_id)
        if tracked is None or self._loads is None or self._publishes is None:
            self._over.add(name)
        elif job.is_load:
            timeout_s = pull_wait_s(len(job.keys) * self.page_tokens, self._policy)
            order = PageOrder.build(name, self._pages(job.keys), job.rows, timeout_s, tracked.lane)
            self._under_way.begin(name, order.lane, self.clock())
            self._loads.start(order, None)
        elif not self.settings.publish:
            self._over.add(name)
        else:
            order = PageOrder.build(name, self._pages(job.keys), job.rows, self.settings.publish_timeout_s)
            self._publishes.start(order, None, job.published)
            self._publishes.hold(name)

    def give_up(self, job_id: int) -> None:
        """The job could not be begun."""
        self._over.add(str(job_id))

    def collect(self) -> list[Over]:
        """Returns the jobs that are over since the last call. Pages that did not arrive are not to be had any more by
        the request that wanted them."""
        self._look()
        over, self._over = self._over, set()
        return [self._ended(self._jobs.pop(name)) for name in over]

    def drain(self) -> None:
        """Blocks until every job is over, to be collected by the next `collect`. Each ends by its own deadline."""
        pause = threading.Event()
        while self._jobs.keys() - self._over:
            self._look()
            pause.wait(DRAIN_LOOK_S)

    def _look(self) -> None:
        if self._loads is None or self._publishes is None:
            return
        loaded, failed_rows = self._loads.collect()
        self._under_way.end(loaded)
        for name in loaded:
            job = self._jobs[name]
            job.arrived = [key for key, row in zip(job.keys, job.rows, strict=True) if row not in failed_rows]
        self._over |= loaded | self._publishes.collect()

    def _ended(self, job: _Job) -> Over:
        if not job.is_load:
            return Over(job.job_id, (), job.n_published == len(job.keys))
        tracked, arrived = self._tracked.get(job.request_id), frozenset(job.arrived)
        if tracked is not None:
            tracked.verdicts.update((key, False) for key in job.keys if key not in arrived)
        return Over(job.job_id, job.arrived, len(arrived) == len(job.keys))

    def _pages(self, keys: Iterable[bytes]) -> ChainSlice:
        """Where in its prompt a page is, vLLM tells of some and not of others: each is its own anchor."""
        return loose_pages(self._namespace, keys)


def _no_fence(fence: object) -> None:
    """Rows are in host memory: vLLM hands them out when its own copies are over."""
