"""One pull: from whom, in which order and until when pages are fetched, and what each answer means.

The pages are located (or were, a moment ago), then asked for in rounds. In a round all chosen producers are asked for
their portions side by side: slots are reserved, the portion is fetched into them, and what came verified is committed.
What did not come is asked of others in the next round, never again of a producer that failed. A slot is given back only
when the answer to its fetch is here, because until then something may write into it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvpeer.core.chain import ChainSlice, take_keys
from kvpeer.core.located import LocatedPages, RecentLocations
from kvpeer.core.producers import Producers
from kvpeer.core.pull.effects import (
    Ask,
    Commit,
    Effect,
    Fetch,
    FetchAnswer,
    GiveBack,
    Indices,
    Locate,
    Portion,
    Promote,
    ReportCorrupt,
    Reserve,
    Touched,
)
from kvpeer.core.pull.stale import stale_reports
from kvpeer.core.reasons import NotAskedError, UnaskedReason
from kvpeer.core.slot_effects import PageShape, Reservation, ReserveStatus
from kvpeer.core.sources import Source, choose_sources
from kvpeer.model import AgentId, LocalProtocolError, Outcome, Tier

__all__ = ["FETCH_MARGIN_S", "FETCH_S_MIN", "FIRST_SHARE", "ROUNDS_MAX", "PullPlan", "PullQuestion"]

ROUNDS_MAX = 2
"""Sources for one page: the best one, and another one when that failed. More would cost the time that a recompute
needs."""

FETCH_MARGIN_S = 0.002
"""A fetch's deadline is this much earlier than the request's: to commit and to answer."""

FETCH_S_MIN = 0.005
"""With less time than this left nothing is asked any more: a healthy producer might not answer either, and its breaker
would count that."""

FIRST_SHARE = 0.5
"""Of the time that is left, for sources that others could replace: a silent one must leave them a chance. What arrived
by then is kept."""


PROMOTE_SHARE = 0.7
"""Of the time for a source, for its disk; the rest is for the way. What it has promoted by then is pulled."""


@dataclass(frozen=True, slots=True, eq=False)
class PullQuestion:
    """Pages to be pulled by `deadline`: `indices` i64 [n], places in `chain`, ascending; pages of this shape. `request`
    is the id that the pages were located under. `source`: the producer to ask first, if it has the first page."""

    chain: ChainSlice
    indices: npt.NDArray[np.int64]
    shape: PageShape
    request: str
    deadline: float
    source: AgentId | None = None

    @property
    def keys(self) -> bytes:
        """Packed, [n]."""
        return take_keys(self.chain.keys, self.indices)

    def at(self, places: npt.NDArray[np.intp]) -> PullQuestion:
        """These pages of it alone."""
        return PullQuestion(self.chain, self.indices[places], self.shape, self.request, self.deadline, self.source)


class PullPlan:
    """Call `start`, perform the effects, and answer each that wants an answer with the event of its name, or with
    `broke`; each call returns more effects. Over when `done`: by the deadline, if everybody answers by the deadlines of
    the effects. Not thread-safe; single use.

    Every event raises LocalProtocolError, and changes nothing, if it answers no effect that waits for an answer.
    """

    def __init__(self, question: PullQuestion, producers: Producers, recent: RecentLocations) -> None:
        self.question = question
        self.outcomes = np.full(len(question.indices), Outcome.MISS, dtype=np.uint8)
        """One a page; final when done. HIT is final at once: the page is committed in the own pool."""
        self.asked: Counter[Outcome] = Counter()
        """Pages that a producer was asked for, by outcome. One asked of two producers counts twice."""
        self.unasked: Counter[UnaskedReason] = Counter()
        """Pages that no producer was asked for."""
        self._producers = producers
        self._recent = recent
        self._keys = question.keys
        self._partitions = question.chain.partitions()[question.indices]
        self._positions = question.chain.first + question.indices
        self._located: LocatedPages | None = None
        self._failed: set[AgentId] = set()  # gave no answer or a garbled one
        self._waiting: set[Effect] = set()  # for an answer
        self._n_rounds = 0
        self._is_ending = False
        self.is_closed = False

    @property
    def done(self) -> bool:
        """Whether nothing is under way any more, and nothing will be."""
        return self._is_ending and not self._waiting

    # ---- events

    def start(self, now: float) -> list[Effect]:
        """What was located a moment ago for the same request is not asked for again."""
        question = self.question
        self._located = self._recent.recall(question.request, self._positions, self._keys, now)
        return [self._await(Locate())] if self._located is None else self._go_on(now)

    def located(self, locate: Locate, located: LocatedPages, now: float) -> list[Effect]:
        """Where the pages lie; covers all of them."""
        self._end(locate)
        self._located = located
        return self._go_on(now)

    def promoted(
        self, promote: Promote, outcomes: npt.NDArray[np.uint8], holders: npt.NDArray[np.void], now: float
    ) -> list[Effect]:
        """What became of the pages, u8 [n], and where they lie in the producer's pool, HOLDER_DTYPE [n], where the
        outcome is HIT. MISS: the disk does not have it any more. TIMEOUT: there was no answer for it."""
        self._end(promote)
        portion = promote.portion
        outcomes = np.where(outcomes == Outcome.MISS, np.uint8(Outcome.STALE), outcomes)
        others, hit = np.flatnonzero(outcomes != Outcome.HIT), np.flatnonzero(outcomes == Outcome.HIT)
        self.outcomes[portion.places[others]] = outcomes[others]
        self._not_asked(UnaskedReason.NOT_PROMOTED, len(others))
        # What is corrupt on a disk its own agent has found and dropped.
        learned = np.where(outcomes == Outcome.CORRUPT, np.uint8(Outcome.STALE), outcomes)
        effects = self._learn(portion.at(others), learned[others], now)
        if (outcomes == Outcome.TIMEOUT).all():
            self._failed.add(portion.producer)
        if portion.producer in self._failed:  # perhaps by a fetch from its pool meanwhile
            self._not_asked(UnaskedReason.NOT_PROMOTED, len(hit))
        elif len(hit):
            there = replace(portion.at(hit), holders=holders[hit])
            effects += self._reserve(there, promote.read_until, now)
        return effects + self._go_on(now)

    def reserved(self, reserve: Reserve, reservation: Reservation, now: float) -> list[Effect]:
        """What of the own pool the pages may be written to."""
        self._end(reserve)
        portion, statuses = reserve.portion, reservation.statuses
        is_refused = statuses == ReserveStatus.NO_ROOM
        self.outcomes[portion.places[statuses == ReserveStatus.PRESENT]] = Outcome.HIT
        self.outcomes[portion.places[is_refused]] = Outcome.REFUSED
        self._not_asked(UnaskedReason.NO_ROOM, int(is_refused.sum()))
        self._not_asked(UnaskedReason.WRITING, int((statuses == ReserveStatus.BUSY).sum()))
        given = np.flatnonzero(statuses == ReserveStatus.WRITE)
        if not len(given):
            self._producers.breakers.not_sent(portion.producer)
            return self._go_on(now)
        fetch = Fetch(
            portion.at(given),
            reservation.slots[given],
            reservation.generations[given],
            reservation.offsets[given],
            reserve.deadline - FETCH_MARGIN_S,
        )
        if fetch.deadline - now < FETCH_S_MIN:
            return [*self._not_begun(fetch, UnaskedReason.LATE), *self._go_on(now)]
        if portion.producer in self._failed:  # by another fetch from it meanwhile
            return [*self._not_begun(fetch, UnaskedReason.NO_SOURCE), *self._go_on(now)]
        return [self._await(fetch)]

    def fetched(self, fetch: Fetch, answer: FetchAnswer, now: float) -> list[Effect]:
        """What came of the pages. Nothing writes into the slots of the fetch any more."""
        self._end(fetch)
        outcomes = answer.outcomes.copy()
        outcomes[(outcomes == Outcome.HIT) & (answer.n_parts != self.question.shape.n_parts)] = Outcome.STALE
        is_hit = outcomes == Outcome.HIT
        hit, others = np.flatnonzero(is_hit), np.flatnonzero(~is_hit)
        self.outcomes[fetch.portion.places[others]] = outcomes[others]
        self._judge(fetch, answer, now)
        effects: list[Effect] = []
        if len(others):
            effects.append(GiveBack(fetch.slots[others], fetch.generations[others]))
            asked = others[others < answer.n_asked]
            for outcome, n_pages in zip(*np.unique(outcomes[asked], return_counts=True), strict=True):
                self._count(Outcome(outcome), int(n_pages))
            effects += self._learn(fetch.portion.at(asked), outcomes[asked], now)
        if len(hit):
            return [*effects, self._await(Commit(fetch, hit, answer.parts))]
        return effects + self._go_on(now)

    def committed(self, commit: Commit, accepted: npt.NDArray[np.bool_], now: float) -> list[Effect]:
        """Which of the pages can be read now, bool [n]: not those whose reservation had expired."""
        self._end(commit)
        portion = commit.fetch.portion.at(commit.indices)
        self.outcomes[portion.places] = np.where(accepted, np.uint8(Outcome.HIT), np.uint8(Outcome.TIMEOUT))
        n_accepted = int(accepted.sum())
        self._count(Outcome.HIT, n_accepted)
        self._count(Outcome.TIMEOUT, len(accepted) - n_accepted)
        effects: list[Effect] = []
        if n_accepted:
            read = portion.holders[accepted]
            effects.append(Touched(portion.producer, read["slot"].copy(), read["generation"].copy()))
        return effects + self._go_on(now)

    def broke(self, ask: Ask, now: float) -> list[Effect]:
        """The agent itself failed to perform this: the plan ends with what is under way. Of a fetch this says as well
        that nothing writes into its slots any more."""
        self._end(ask)
        self._is_ending = True
        if isinstance(ask, Locate | Promote):
            return []
        self._producers.breakers.not_sent(ask.portion.producer)
        return [GiveBack(ask.slots, ask.generations)] if isinstance(ask, Fetch) else []

    def close(self) -> None:
        """Nobody runs it any more: whatever is under way, nothing new is begun."""
        self.is_closed = self._is_ending = True

    # ---- rounds

    def _await(self, effect: Effect) -> Effect:
        self._waiting.add(effect)
        return effect

    def _end(self, effect: Effect) -> None:
        if effect not in self._waiting:
            raise LocalProtocolError(f"a {type(effect).__name__} was answered that nobody waits for")
        self._waiting.remove(effect)

    def _go_on(self, now: float) -> list[Effect]:
        """Begins the next round when the one before is over; a round in which nobody can be asked is over at once."""
        effects: list[Effect] = []
        while not self._waiting and not self._is_ending:
            places = np.flatnonzero(self.outcomes != Outcome.HIT)
            sources, until = self._choose(places, now)
            for source in sources:
                effects += self._ask(source, places, until, now)
            self._n_rounds += 1
            self._is_ending = not sources or self._n_rounds == ROUNDS_MAX
        return effects

    def _choose(self, places: Indices, now: float) -> tuple[list[Source], float]:
        """Whom to ask for which of these pages, and until when."""
        question, is_first = self.question, self._n_rounds == 0
        left_s = question.deadline - now
        if left_s < FETCH_S_MIN:
            if is_first:
                self.outcomes[places] = Outcome.TIMEOUT
                self._not_asked(UnaskedReason.LATE, len(places))
            return [], now
        assert self._located is not None  # noqa: S101 - no round before
        keys = take_keys(self._keys, places)
        holding = self._producers.holding(self._located, self._positions[places], keys, now, self._failed)
        sources = choose_sources(holding, self._producers.lot_name(question.request, self._keys), question.source)
        if is_first:
            self._not_asked(UnaskedReason.NO_SOURCE, len(places) - sum(len(source.indices) for source in sources))
        is_last = self._n_rounds + 1 == ROUNDS_MAX or not holding.has_alternatives
        return sources, question.deadline if is_last else question.deadline - left_s * (1 - FIRST_SHARE)

    def _ask(self, source: Source, places: Indices, until: float, now: float) -> list[Effect]:
        """Begins with one source; `source.indices` index `places`, which index the pull. What is of another size is not
        pulled, and for a while not located there either."""
        wanted = places[source.indices]
        portion = Portion(
            source.producer, wanted, take_keys(self._keys, wanted), self._partitions[wanted], source.holders
        )
        fits = source.holders["length"] == self.question.shape.page_bytes
        if not fits.all():
            others = portion.at(np.flatnonzero(~fits))
            self.outcomes[others.places] = Outcome.STALE
            self._not_asked(UnaskedReason.OTHER_SIZE, len(others))
            self._producers.remember_failed(others.producer, others.keys, others.holders, now)
            portion = portion.at(np.flatnonzero(fits))
        return self._begin_with(portion, until, now)

    def _begin_with(self, portion: Portion, until: float, now: float) -> list[Effect]:
        """What is in the producer's pool need not wait for what is on its disk."""
        is_on_disk = portion.holders["tier"] == Tier.DISK
        in_pool, on_disk = portion.at(np.flatnonzero(~is_on_disk)), portion.at(np.flatnonzero(is_on_disk))
        effects = self._reserve(in_pool, until, now) if len(in_pool) else []
        if len(on_disk):
            effects.append(self._await(Promote(on_disk, now + (until - now) * PROMOTE_SHARE, until)))
        return effects

    def _reserve(self, portion: Portion, until: float, now: float) -> list[Effect]:
        """Begins with what the producer has in its pool, if its breaker lets a fetch through."""
        if not self._producers.breakers.admit(portion.producer, now):
            self._not_asked(UnaskedReason.BREAKER_OPEN, len(portion))
            return []
        return [self._await(Reserve(portion, until))]

    def _not_begun(self, fetch: Fetch, reason: UnaskedReason) -> list[Effect]:
        """Slots came when nothing can be fetched into them any more."""
        portion = fetch.portion
        self.outcomes[portion.places] = Outcome.TIMEOUT
        self._not_asked(reason, len(portion))
        self._producers.breakers.not_sent(portion.producer)
        self._failed.add(portion.producer)
        return [GiveBack(fetch.slots, fetch.generations)]

    # ---- what an answer means

    def _judge(self, fetch: Fetch, answer: FetchAnswer, now: float) -> None:
        """Tells the producer's breaker what the fetch says about it: nothing, where the fault is on this side."""
        producer, error = fetch.portion.producer, answer.error
        if error is not None:
            self._failed.add(producer)
        if isinstance(error, NotAskedError):
            self._not_asked(error.reason, len(fetch.portion) - answer.n_asked)
            if not answer.n_asked:
                self._producers.breakers.not_sent(producer)
                return
        elif error is not None:
            if self._producers.view.info(producer) is not None:  # an agent that ended has no breaker any more
                self._producers.breakers.failed(producer, now)
            return
        self._producers.breakers.succeeded(producer)

    def _learn(self, portion: Portion, outcomes: npt.NDArray[np.uint8], now: float) -> list[Effect]:
        """Remembers which locations failed; tells the owners what is stale, and the producer what came corrupt."""
        is_corrupt, is_stale = outcomes == Outcome.CORRUPT, outcomes == Outcome.STALE
        bad = portion.at(np.flatnonzero(is_stale | is_corrupt | (outcomes == Outcome.REFUSED)))
        if not len(bad):
            return []
        self._producers.remember_failed(bad.producer, bad.keys, bad.holders, now)
        effects: list[Effect] = [*stale_reports(portion.at(np.flatnonzero(is_stale)), self._producers.view.ring)]
        rotten = portion.at(np.flatnonzero(is_corrupt))
        if len(rotten):
            slots, generations = rotten.holders["slot"].copy(), rotten.holders["generation"].copy()
            effects.append(ReportCorrupt(rotten.producer, rotten.keys, slots, generations))
        return effects

    def _count(self, outcome: Outcome, n_pages: int) -> None:
        if n_pages:
            self.asked[outcome] += n_pages

    def _not_asked(self, reason: UnaskedReason, n_pages: int) -> None:
        if n_pages:
            self.unasked[reason] += n_pages
