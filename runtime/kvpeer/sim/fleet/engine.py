"""An engine of the fleet: steps that batch prefills and decodes, a device and a host pool, and the policy's decisions.

Like vLLM's scheduler: requests are looked at in their order, while a step has tokens left; only then it is decided what
to reload or to pull, and one that loads is set aside with its pages allocated. A step decodes one token of every
running request, and computes prompts with the rest of its budget. Requests are never preempted: what they will generate
is allocated with them.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpeer.core.policy import Action, Candidate, Decision, Ledger, Load, Located, PolicySettings, RequestFacts
from kvpeer.core.policy.costs import PROMPT_TOKENS_MIN
from kvpeer.core.reasons import DecisionReason
from kvpeer.model import LocalProtocolError
from kvpeer.sim.fleet.cache import PrefixCache
from kvpeer.sim.fleet.profile import EngineProfile, LinkProfile
from kvpeer.sim.fleet.pull import Line, Pull
from kvpeer.sim.fleet.workload import Outcome, Request
from kvpeer.sim.kernel import Kernel

__all__ = ["Engine"]

PULLS_MAX = 8
"""Pulls that an engine has under way: as many as kvpeer's connector for vLLM begins."""


@dataclass(slots=True, eq=False)
class _Job:
    """A request in the engine; the first `there_tokens` of its prompt are on the device."""

    request: Request
    there_tokens: int = 0
    local_tokens: int = 0
    reloaded_tokens: int = 0
    pulled_tokens: int = 0
    is_ready: bool = False
    reason: DecisionReason = DecisionReason.NOTHING_FOUND
    first_token_at: float = 0.0

    @property
    def own(self) -> str:
        """What only this request has: its question, and what is generated."""
        return f"of {self.request.name}"


class Engine:
    """See the module docstring. `peers`: all engines of the fleet, to be set before the first request."""

    def __init__(
        self,
        kernel: Kernel,
        idx: int,
        profile: EngineProfile,
        link: LinkProfile,
        settings: PolicySettings,
        on_ended: Callable[[Outcome], None],
    ) -> None:
        self.idx = idx
        self.producer = idx.to_bytes(16, "big")
        self.profile = profile
        self.peers: Sequence[Engine] = ()
        self.host = PrefixCache(profile.host_tokens)
        self.device = PrefixCache(profile.device_tokens)
        self.line = Line()
        self._kernel, self._link, self._on_ended = kernel, link, on_ended
        self._ledger = Ledger(settings, profile.step_tokens)
        self._waiting: deque[_Job] = deque()
        self._prefilling: list[_Job] = []
        self._decoding: list[tuple[int, int, _Job]] = []  # a heap of (last step, number, job)
        self._joined: dict[str, list[_Job]] = {}  # by prefix that is being pulled: who waits for the same one
        self._n_loading = 0
        self._n_jobs = 0
        self._n_read_tokens = 0
        self._n_steps = 0
        self._is_idle = True
        self._at_step_end: list[Callable[[], None]] = []

    # ---- what the router sees

    @property
    def n_waiting(self) -> int:
        """Requests that compute nothing yet."""
        return len(self._waiting) + self._n_loading + sum(map(len, self._joined.values()))

    @property
    def device_use(self) -> float:
        """The part of the device's pages that running requests use."""
        return self.device.pinned_tokens / self.device.capacity_tokens

    def submit(self, request: Request) -> None:
        """Takes a request in.

        Raises:
            LocalProtocolError: it would not fit into the device if it were alone.
        """
        if request.prompt_tokens + request.output_tokens > self.profile.device_tokens:
            raise LocalProtocolError(f"request {request.name!r} is larger than the device")
        self._kernel.at(self._kernel.now + self.profile.request_s, lambda: self._take_in(_Job(request)))

    # ---- steps

    def between_steps(self, action: Callable[[], None]) -> None:
        """Runs the action when the step that is running is over, or now if there is none."""
        if self._is_idle:
            self._kernel.at(self._kernel.now, action)
        else:
            self._at_step_end.append(action)

    def _take_in(self, job: _Job) -> None:
        self._waiting.append(job)
        self._wake()

    def _wake(self) -> None:
        if self._is_idle:
            self._is_idle = False
            self._kernel.at(self._kernel.now, self._begin_step)

    def _begin_step(self) -> None:
        n_decoding, n_read_tokens = len(self._decoding), self._n_read_tokens
        chunks = self._schedule(self.profile.step_tokens - n_decoding)
        n_prompt_tokens = sum(n_tokens for _, n_tokens in chunks)
        if not n_decoding and not n_prompt_tokens:
            self._is_idle = True
            self._run_between_steps()
            return
        n_pairs = sum(n_tokens * (job.there_tokens + n_tokens / 2) for job, n_tokens in chunks)
        n_tokens = n_prompt_tokens + n_decoding
        seconds = self.profile.step_duration_s(n_tokens, n_pairs, n_read_tokens)

        def end() -> None:
            if n_prompt_tokens >= PROMPT_TOKENS_MIN:
                self._ledger.computed(n_tokens, n_pairs + n_read_tokens, seconds)
            self._end_step(chunks, n_decoding)

        self._kernel.at(self._kernel.now + seconds, end)

    def _schedule(self, budget_tokens: int) -> list[tuple[_Job, int]]:
        """Which prompts the step computes, and how many tokens of each."""
        chunks: list[tuple[_Job, int]] = []

        def take(job: _Job) -> None:
            nonlocal budget_tokens
            n_tokens = min(budget_tokens, job.request.prompt_tokens - job.there_tokens)
            budget_tokens -= n_tokens
            chunks.append((job, n_tokens))

        for job in self._prefilling:
            if budget_tokens > 0:
                take(job)
        while budget_tokens > 0 and self._waiting and self._n_running < self.profile.running_max:
            job = self._waiting[0]
            if not job.is_ready and not self._prepare(job):
                break
            self._waiting.popleft()
            if job.is_ready:
                self._prefilling.append(job)
                take(job)
        return chunks

    def _end_step(self, chunks: Sequence[tuple[_Job, int]], n_decoded: int) -> None:
        self._n_steps += 1
        self._n_read_tokens += n_decoded
        for job, n_tokens in chunks:
            self._computed(job, n_tokens)
        while self._decoding and self._decoding[0][0] <= self._n_steps:
            self._end(heapq.heappop(self._decoding)[2])
        self._run_between_steps()
        self._begin_step()

    def _run_between_steps(self) -> None:
        actions, self._at_step_end = self._at_step_end, []
        for action in actions:
            action()

    def _computed(self, job: _Job, n_tokens: int) -> None:
        request = job.request
        job.there_tokens += n_tokens
        self._hold(job)
        if job.there_tokens < request.prompt_tokens:
            return
        self._prefilling.remove(job)
        job.first_token_at = self._kernel.now
        self._n_jobs += 1
        self._n_read_tokens += request.prompt_tokens + 1
        heapq.heappush(self._decoding, (self._n_steps + request.output_tokens - 1, self._n_jobs, job))

    def _end(self, job: _Job) -> None:
        request = job.request
        self._n_read_tokens -= request.prompt_tokens + request.output_tokens
        n_own_tokens = request.question_tokens + request.output_tokens
        self.device.fill(job.own, n_own_tokens)
        self.host.put(job.own, n_own_tokens)
        self.device.release(job.own)
        self.device.release(request.prefix)
        self._on_ended(
            Outcome(
                request,
                self.idx,
                job.reason,
                job.local_tokens,
                job.reloaded_tokens,
                job.pulled_tokens,
                job.first_token_at,
                self._kernel.now,
            )
        )

    @property
    def _n_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    def _hold(self, job: _Job) -> None:
        """What is on the device of the job's prefix can be reused, and is in the host pool too."""
        n_tokens = min(job.there_tokens, job.request.prefix_tokens)
        self.device.fill(job.request.prefix, n_tokens)
        self.host.put(job.request.prefix, n_tokens)

    # ---- loads

    def _prepare(self, job: _Job) -> bool:
        """Allocates the job's pages and decides where they come from; False if there is no room now. Afterwards it is
        ready, or set aside until it was loaded."""
        request = job.request
        if request.prefix in self._joined:
            self._joined[request.prefix].append(job)
            return True
        if not self._reserve(job):
            return False
        local_tokens = self._whole_pages(min(self.device.tokens(request.prefix), request.prompt_tokens - 1))
        facts, decision, resident_tokens = self._decide(request, local_tokens)
        job.reason = decision.reason
        job.there_tokens = job.local_tokens = local_tokens
        if decision.action is Action.NONE:
            job.is_ready = True
            return True
        self._n_loading += 1
        pulled_tokens = decision.n_tokens - (resident_tokens - local_tokens) if decision.action is Action.PULL else 0
        self._reload(job, resident_tokens - local_tokens, lambda: self._loaded(job) if not pulled_tokens else None)
        if pulled_tokens:
            self._pull(job, facts, decision, resident_tokens)
        return True

    def _decide(self, request: Request, local_tokens: int) -> tuple[RequestFacts, Decision, int]:
        """The decision, and how far the prefix reaches with the own host pool."""
        page_tokens = self.profile.page_tokens
        facts = RequestFacts(
            request.name, request.prompt_tokens, page_tokens, page_tokens * self.profile.kv_bytes_per_token
        )
        usable_tokens = self._whole_pages(min(request.prefix_tokens, request.prompt_tokens - 1))
        resident_tokens = max(local_tokens, min(usable_tokens, self._whole_pages(self.host.tokens(request.prefix))))
        candidates = [
            Candidate(
                peer.producer,
                self._whole_pages(peer.host.tokens(request.prefix)),
                n_waiting=peer.n_waiting if self._link.by_engines else 0,
            )
            for peer in self.peers
            if peer is not self and peer.host.tokens(request.prefix) > resident_tokens
        ]
        reachable_tokens = max([each.reachable_tokens for each in candidates], default=resident_tokens)
        decision = self._ledger.decide(
            facts,
            local_tokens,
            Located(resident_tokens, reachable_tokens),
            candidates,
            Load(can_pull=len(self._joined) < PULLS_MAX),
            self._kernel.now,
        )
        return facts, decision, resident_tokens

    def _reserve(self, job: _Job) -> bool:
        request = job.request
        if not self.device.reserve(request.prefix, request.prefix_tokens):
            return False
        if self.device.reserve(job.own, request.question_tokens + request.output_tokens):
            return True
        self.device.release(request.prefix)
        return False

    def _reload(self, job: _Job, n_tokens: int, then: Callable[[], None]) -> None:
        """Copies tokens from the host pool; they count at once, the request goes on when they are there."""
        job.reloaded_tokens = n_tokens
        job.there_tokens += n_tokens
        self._kernel.at(self._kernel.now + self.profile.reload_s(n_tokens), lambda: self.between_steps(then))

    def _pull(self, job: _Job, facts: RequestFacts, decision: Decision, resident_tokens: int) -> None:
        request, now = job.request, self._kernel.now
        self._joined[request.prefix] = []
        self._ledger.begun(facts, decision, now)
        source = next(peer for peer in self.peers if peer.producer == decision.producer)

        def ended(n_pulled_tokens: int) -> None:
            job.pulled_tokens = n_pulled_tokens
            job.there_tokens += n_pulled_tokens
            n_loaded_tokens = job.reloaded_tokens + n_pulled_tokens
            self._ledger.ended(request.name, n_loaded_tokens, self._kernel.now - now, self._kernel.now)
            self._loaded(job)
            self._waiting.extendleft(reversed(self._joined.pop(request.prefix)))

        goal_tokens = job.local_tokens + decision.n_tokens
        Pull(self._kernel, self._link, self, source, request.prefix, resident_tokens, goal_tokens, ended).begin(
            decision.wait_s
        )

    def _loaded(self, job: _Job) -> None:
        self._n_loading -= 1
        self._hold(job)
        job.is_ready = True
        self._waiting.appendleft(job)
        self._wake()

    def _whole_pages(self, n_tokens: int) -> int:
        return n_tokens // self.profile.page_tokens * self.profile.page_tokens
