"""Whatever happens to overlapping pulls: each page gets one outcome by the deadline, and each slot ends once."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpeer.core.pull import Ask, Commit, Effect, Fetch, GiveBack, Locate, Promote, PullPlan, Pulls, Reserve, Wanted
from kvpeer.core.reasons import NotAskedError, UnaskedReason
from kvpeer.core.slot_effects import ReserveStatus
from kvpeer.model import KEY_BYTES, AgentId, Outcome, PeerUnavailableError
from pulling import Answer, Cluster, chain_slice, located_of, question_of, slots_for

CHAIN_PAGES = 12


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


@dataclass
class Agent:
    """Performs effects at random moments, always by their deadlines, and asserts what must never happen."""

    rng: Random
    broken_share: float = 0.05
    cluster: Cluster = field(default_factory=lambda: Cluster(n_peers=4))

    def __post_init__(self) -> None:
        self.pulls = Pulls(self.cluster.producers, self.cluster.recent)
        self.now = 0.0
        self.n_slots = 0
        self.writable: set[int] = set()  # slots of fetches under way
        self.held: set[int] = set()  # slots that wait to be committed or given back
        self.fetched_keys: Counter[bytes] = Counter()  # being fetched
        self.right: set[tuple[int, int]] = set()  # (id of a fetch, page of it) that came verified and whole
        self.failed: dict[PullPlan, set[AgentId]] = {}
        self.here: set[bytes] = set()  # committed, or found here when a slot was to be reserved
        self.present: set[bytes] = set()  # the latter
        self._agenda: list[tuple[float, int, PullPlan, Ask]] = []
        self._n = 0

    def ask(self, n: int, first: int, deadline: float) -> Wanted:
        request = f"r{self.rng.random()}"
        question = question_of(chain_slice(n, first), request=request, deadline=deadline)
        if self.rng.random() < 0.5:
            self.cluster.recent.remember(request, self.locate(question))
        wanted = self.pulls.ask(question)
        if wanted.fresh is not None:
            self.failed[wanted.fresh] = set()
            self.perform(wanted.fresh, wanted.fresh.start(self.now))
        return wanted

    def run_until(self, time: float) -> None:
        while self._agenda and self._agenda[0][0] <= time:
            self.now, _, plan, ask = heapq.heappop(self._agenda)
            self.answer(plan, ask)
        self.now = time

    def perform(self, plan: PullPlan, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Ask):
                self.schedule(plan, effect)
            elif isinstance(effect, GiveBack):
                self.settle(effect.slots)
            elif isinstance(effect, Commit):
                assert all((id(effect.fetch), idx) in self.right for idx in effect.indices.tolist())
                self.settle(effect.slots)
                accepted = np.array([self.rng.random() < 0.9 for _ in effect.indices], dtype=np.bool_)
                keys = split(effect.fetch.portion.at(effect.indices).keys)
                self.here |= {key for key, is_in in zip(keys, accepted, strict=True) if is_in}
                self.perform(plan, plan.committed(effect, accepted, self.now))
        if plan.done and not plan.is_closed:
            self.pulls.end(plan)

    def schedule(self, plan: PullPlan, ask: Ask) -> None:
        limit = plan.question.deadline if isinstance(ask, Locate) else ask.deadline
        assert limit <= plan.question.deadline
        if not isinstance(ask, Locate):
            assert ask.portion.producer not in self.failed[plan], "a failed producer is asked again"
        if isinstance(ask, Fetch):
            assert not self.writable & set(ask.slots.tolist()), "two fetches into one slot"
            self.writable |= set(ask.slots.tolist())
            self.fetched_keys.update(split(ask.portion.keys))
            assert max(self.fetched_keys.values()) == 1, "a page is fetched twice at a time"
        is_slow = self.rng.random() < 0.2
        when = limit if is_slow else self.now + max(0.0, limit - self.now) * self.rng.random() ** 3
        self._n += 1
        heapq.heappush(self._agenda, (max(when, self.now), self._n, plan, ask))

    def answer(self, plan: PullPlan, ask: Ask) -> None:
        if isinstance(ask, Fetch):
            self.writable -= set(ask.slots.tolist())
            self.fetched_keys.subtract(split(ask.portion.keys))
        if self.rng.random() < self.broken_share:
            effects = plan.broke(ask, self.now)
        elif isinstance(ask, Locate):
            effects = plan.located(ask, self.locate(plan.question), self.now)
        elif isinstance(ask, Reserve):
            weights = [8, 1, 1, 1]
            statuses = self.rng.choices(list(ReserveStatus), weights, k=len(ask.portion))
            reservation = slots_for(*statuses, first=self.n_slots)
            self.n_slots += len(statuses)
            self.held |= set(reservation.slots[reservation.statuses == ReserveStatus.WRITE].tolist())
            present = [status == ReserveStatus.PRESENT for status in statuses]
            self.present |= {key for key, is_in in zip(split(ask.portion.keys), present, strict=True) if is_in}
            self.here |= self.present
            effects = plan.reserved(ask, reservation, self.now)
        elif isinstance(ask, Promote):
            outcomes = np.array(self.rng.choices(list(Outcome), [8, 1, 1, 1, 2, 1], k=len(ask.portion)), dtype=np.uint8)
            effects = plan.promoted(ask, outcomes, ask.portion.holders, self.now)
        else:
            effects = plan.fetched(ask, self.fetch(plan, ask), self.now)
        self.perform(plan, effects)

    def locate(self, question):
        held = [set(self.rng.sample(range(1, 6), self.rng.randrange(4))) for _ in question.indices]  # 5 is no member
        on_disk = [position for position in range(2 * CHAIN_PAGES) if self.rng.random() < 0.3]
        return located_of(question, held, on_disk=on_disk)

    def fetch(self, plan: PullPlan, fetch: Fetch) -> Answer:
        n = len(fetch.portion)
        outcomes = np.array([self.rng.choice(list(Outcome)) for _ in range(n)], dtype=np.uint8)
        n_parts = np.array([self.rng.choice([2, 2, 2, 1]) for _ in range(n)], dtype=np.uint16)
        error, n_asked = None, n
        kind = self.rng.random()
        if kind < 0.2:
            error = PeerUnavailableError("the connection broke")
        elif kind < 0.4:
            error, n_asked = NotAskedError(UnaskedReason.LATE, "no time"), self.rng.randrange(n + 1)
            outcomes[n_asked:] = Outcome.TIMEOUT
        if error is not None:
            self.failed[plan].add(fetch.portion.producer)
        self.right |= {(id(fetch), idx) for idx in range(n) if outcomes[idx] == Outcome.HIT and n_parts[idx] == 2}
        return Answer(outcomes, n_parts, n_asked, error)

    def settle(self, slots: np.ndarray) -> None:
        for slot in slots.tolist():
            assert slot not in self.writable, "something may still write into it"
            self.held.remove(slot)  # a KeyError: it ended twice, or was never given


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_each_page_gets_one_outcome_by_the_deadline_and_each_slot_ends_once(seed: int, n_pulls: int):
    rng = Random(seed)
    here = Agent(rng)
    asked: list[tuple[float, Wanted, bytes]] = []
    for _ in range(n_pulls):
        first = rng.randrange(CHAIN_PAGES)
        deadline = here.now + 0.01 + rng.random()
        n = rng.randrange(1, CHAIN_PAGES - first + 1)
        asked.append((deadline, here.ask(n, first, deadline), chain_slice(n, first).keys))
        here.run_until(here.now + rng.random() / 4)
    for deadline, wanted, keys in sorted(asked, key=lambda each: each[0]):
        here.run_until(max(here.now, deadline))
        assert wanted.fresh is None or wanted.fresh.done
        told = wanted.outcomes
        assert len(told) == len(split(keys))
        hits = {key for key, outcome in zip(split(keys), told.tolist(), strict=True) if outcome == Outcome.HIT}
        assert hits <= here.here
    here.run_until(100.0)
    assert (len(here.pulls), here.held, here.writable) == (0, set(), set())


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32))
def test_no_page_ends_without_being_counted(seed: int):
    here = Agent(Random(seed), broken_share=0.0)
    plan = here.ask(CHAIN_PAGES, 0, 1.0).fresh
    here.run_until(1.0)
    n_counted = sum(plan.asked.values()) + sum(plan.unasked.values())
    assert n_counted + len(here.present) >= CHAIN_PAGES
    assert plan.asked[Outcome.HIT] + len(here.present) == len(here.here)
