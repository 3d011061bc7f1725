"""Single flight: what is being pulled is not pulled a second time; who wants it as well waits for the same plan."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpeer.core.located import RecentLocations
from kvpeer.core.producers import Producers
from kvpeer.core.pull.plan import PullPlan, PullQuestion
from kvpeer.model import KEY_BYTES, Outcome

__all__ = ["Pulls", "Wanted"]

Places = npt.NDArray[np.intp]


class Wanted:
    """What somebody asked for: `fresh` is the plan that the asker runs, None if all pages are in plans of others;
    `joined`, those plans."""

    def __init__(self, n_pages: int, fresh: PullPlan | None, parts: dict[PullPlan, tuple[Places, Places]]) -> None:
        self._n_pages = n_pages
        self._parts = parts  # by plan: places among the pages that were asked for, and in the plan
        self.fresh = fresh
        self.joined = tuple(plan for plan in parts if plan is not fresh)

    @property
    def outcomes(self) -> npt.NDArray[np.uint8]:
        """The outcome of each page, u8 [n], now: TIMEOUT where its plan has not ended, unless it is here already."""
        outcomes = np.full(self._n_pages, Outcome.TIMEOUT, dtype=np.uint8)
        for plan, (ours, theirs) in self._parts.items():
            so_far = plan.outcomes[theirs]
            if not plan.is_closed:
                so_far = np.where(so_far == Outcome.HIT, so_far, np.uint8(Outcome.TIMEOUT))
            outcomes[ours] = so_far
        return outcomes


class Pulls:
    """The plans under way of one agent. Not thread-safe."""

    def __init__(self, producers: Producers, recent: RecentLocations) -> None:
        self._producers = producers
        self._recent = recent
        self._under_way: dict[bytes, tuple[PullPlan, int]] = {}  # by key; with the key's place in the plan

    def __len__(self) -> int:
        """Pages that are being pulled."""
        return len(self._under_way)

    def ask(self, question: PullQuestion) -> Wanted:
        """Who pulls these pages. The caller runs the fresh plan, and says `end` whatever became of it."""
        keys = _split(question.keys)
        shared: dict[PullPlan, list[tuple[int, int]]] = {}
        fresh: list[int] = []
        for place, key in enumerate(keys):
            under_way = self._under_way.get(key)
            if under_way is None:
                fresh.append(place)
            else:
                shared.setdefault(under_way[0], []).append((place, under_way[1]))
        parts = {plan: tuple(np.array(places, dtype=np.intp).T) for plan, places in shared.items()}
        if not fresh:
            return Wanted(len(keys), None, parts)
        ours = np.array(fresh, dtype=np.intp)
        plan = PullPlan(question.at(ours), self._producers, self._recent)
        self._under_way.update((keys[place], (plan, number)) for number, place in enumerate(fresh))
        return Wanted(len(keys), plan, {plan: (ours, np.arange(len(fresh))), **parts})

    def end(self, plan: PullPlan) -> None:
        """Nobody runs the plan any more: its outcomes are final, its pages may be pulled anew."""
        plan.close()
        for key in _split(plan.question.keys):
            self._under_way.pop(key, None)


def _split(packed: bytes) -> list[bytes]:
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
