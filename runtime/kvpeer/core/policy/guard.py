"""Does no harm: turns pulling off while it costs more time than it saves, and tries it again later.

on --the last pulls together lost time--> off --retry_s over: one pull is tried--> it paid, some times in a row --> on
                                           ^                                       |
                                           +-----------it did not, retry_s x 2-----+
                                           (x 2 also when it is off again soon after it was on)

A pull's *saving* is the time that computing its tokens would have taken, less the time that it took; a pull that failed
took its time for nothing. Savings, unlike estimates, are measured after the fact, so that the guard acts however wrong
the estimate was that led to the pull.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from kvpeer.core.policy.settings import GuardSettings

__all__ = ["GUARDED_PAIRS_MAX", "Guard", "GuardChange", "Guards"]

GUARDED_PAIRS_MAX = 1024
"""Producers that are judged one by one: as many as a cluster has members. Beyond, the one that was judged longest ago
is forgotten, which turns it on: that costs `min_samples` slow pulls."""

TRY_TIMEOUT_S = 30.0
"""A try whose outcome nobody reported says nothing; after this long another one is let through."""

LOSS_MIN = 0.05
"""Pulling is turned off when it lost at least this part of the time that the pulls took. Less is within the error of
what computing would have taken."""


@dataclass(frozen=True, slots=True)
class GuardChange:
    """Pulling was turned off or on: from one producer, or (None) from all. `saved_s`: what the pulls saved that decided
    it, negative if they did harm."""

    producer: bytes | None
    is_off: bool
    saved_s: float
    n_pulls: int
    retry_s: float

    def __str__(self) -> str:
        where = "every producer" if self.producer is None else f"producer {self.producer.hex()[:12] or '(unnamed)'}"
        if self.is_off:
            return (
                f"pulling from {where} is off: its last {self.n_pulls} pulls took {-self.saved_s:.3f} s longer than "
                f"computing; tried again in {self.retry_s:.0f} s"
            )
        return f"pulling from {where} is on again: {self.n_pulls} tries in a row saved {self.saved_s:.3f} s"


@dataclass(frozen=True, slots=True)
class _Outcome:
    at: float
    producer: bytes
    saved_s: float
    seconds: float


class Guard:
    """The guard of one producer, or of an engine: that one acts only on harm that no producer alone explains, and
    judges twice as many pulls together. Not thread-safe."""

    def __init__(self, settings: GuardSettings, *, is_of_engine: bool = False) -> None:
        self._settings = settings
        self._is_of_engine = is_of_engine
        self._min_samples = settings.min_samples * (2 if is_of_engine else 1)
        self._outcomes: deque[_Outcome] = deque(maxlen=max(settings.window, self._min_samples))
        self._retry_s = settings.retry_s
        self._retry_at = 0.0
        self._try_until: float | None = None
        self._n_good, self._good_s = 0, 0.0
        self._on_since = -math.inf
        self.is_off = False

    def may_try(self, now: float) -> bool:
        """Whether, while pulling is off, one pull may be made to see whether it pays by now."""
        return self.is_off and now >= self._retry_at and (self._try_until is None or now >= self._try_until)

    def is_forsaken(self, now: float) -> bool:
        """Whether a try has been due for longer than any wait for one, so that nobody seems to offer these pages."""
        return self.may_try(now - self._settings.retry_s_max)

    def try_begun(self, now: float) -> None:
        """A try is under way: none but this one, until its outcome is known."""
        self._try_until = now + TRY_TIMEOUT_S

    def judge(self, outcome: _Outcome) -> tuple[bool, float, int] | None:
        """Takes in an outcome; returns (is_off, saved_s, n_pulls) if that turned pulling off or on."""
        return self._judge_try(outcome.saved_s, outcome.at) if self.is_off else self._judge_pull(outcome)

    def forget(self, producer: bytes) -> None:
        """Leaves out what this producer did: it is dealt with by itself."""
        kept = [outcome for outcome in self._outcomes if outcome.producer != producer]
        self._outcomes.clear()
        self._outcomes.extend(kept)

    @property
    def retry_s(self) -> float:
        """From now to the next try, when pulling was just turned off."""
        return self._retry_s

    def _judge_pull(self, latest: _Outcome) -> tuple[bool, float, int] | None:
        now = latest.at
        self._outcomes.append(latest)
        while now - self._outcomes[0].at > self._settings.window_s:
            self._outcomes.popleft()
        total_s, n_pulls = sum(outcome.saved_s for outcome in self._outcomes), len(self._outcomes)
        allowed_s = LOSS_MIN * sum(outcome.seconds for outcome in self._outcomes)
        if n_pulls < self._min_samples or total_s - self._explained_s() >= -allowed_s:
            return None
        # Soon off again after the tries had paid: they were luck, and the next ones come as late as after a bad one.
        is_relapse = now - self._on_since < self._settings.window_s
        retry_s = 2 * self._retry_s if is_relapse else self._settings.retry_s
        self.is_off, self._retry_s = True, min(retry_s, self._settings.retry_s_max)
        self._wait_for_a_try(now)
        return True, total_s, n_pulls

    def _judge_try(self, saved_s: float, now: float) -> tuple[bool, float, int] | None:
        if self._try_until is None:
            return None  # a pull from before
        self._try_until = None
        if saved_s <= 0:
            self._retry_s = min(2 * self._retry_s, self._settings.retry_s_max)
            self._wait_for_a_try(now)
            return None
        self._n_good += 1
        self._good_s += saved_s
        if self._n_good < self._settings.probes_to_return:
            return None
        self.is_off, self._on_since = False, now
        return False, self._good_s, self._n_good

    def _explained_s(self) -> float:
        """The harm that is the doing of one producer, 0 or less; 0 where just one is judged."""
        if not self._is_of_engine:
            return 0.0
        by_producer: dict[bytes, float] = {}
        for outcome in self._outcomes:
            by_producer[outcome.producer] = by_producer.get(outcome.producer, 0.0) + outcome.saved_s
        return min(0.0, *by_producer.values())

    def _wait_for_a_try(self, now: float) -> None:
        self._outcomes.clear()
        self._retry_at, self._try_until = now + self._retry_s, None
        self._n_good, self._good_s = 0, 0.0


class Guards:
    """The guards of an engine: one for each producer, and one over all of them. Not thread-safe."""

    def __init__(self, settings: GuardSettings) -> None:
        self._settings = settings
        self.engine = Guard(settings, is_of_engine=True)
        self._pairs: OrderedDict[bytes, Guard] = OrderedDict()

    def n_pairs_off(self, now: float) -> int:
        """Producers from which nothing is pulled but tries; without those that seem gone, see `Guard.is_forsaken`."""
        return sum(guard.is_off and not guard.is_forsaken(now) for guard in self._pairs.values())

    def is_off(self, producer: bytes) -> bool:
        """Whether pulling from this producer is off."""
        guard = self._pairs.get(producer)
        return guard is not None and guard.is_off

    def may_try(self, producer: bytes, now: float) -> bool:
        """See `Guard.may_try`."""
        guard = self._pairs.get(producer)
        return guard is not None and guard.may_try(now)

    def begun(self, producer: bytes, now: float) -> None:
        """A pull was begun; while pulling is off, it is a try."""
        for guard in (self._pairs.get(producer), self.engine):
            if guard is not None and guard.is_off:
                guard.try_begun(now)

    def judge(self, producer: bytes, saved_s: float, now: float, *, seconds: float) -> list[GuardChange]:
        """Takes in what a pull saved that took so long, negative if it lost time; returns what that changed."""
        if not self._settings.is_on:
            return []
        pair = self._pairs.pop(producer, None) or Guard(self._settings)
        self._pairs[producer] = pair
        if len(self._pairs) > GUARDED_PAIRS_MAX:
            self._pairs.popitem(last=False)
        changes = []
        was_off, outcome = pair.is_off, _Outcome(now, producer, saved_s, seconds)
        if (changed := pair.judge(outcome)) is not None:
            changes.append(GuardChange(producer, *changed, pair.retry_s))
        if pair.is_off and not was_off:
            self.engine.forget(producer)
            return changes
        counts = self.engine.is_off or not was_off  # tries of a producer that is off say nothing of the others
        if counts and (changed := self.engine.judge(outcome)) is not None:
            changes.append(GuardChange(None, *changed, self.engine.retry_s))
        return changes
