"""How many of a prompt's pages SGLang is told of: those in the own pool always, those at peers when a pull is wanted.

SGLang gives a backend keys and nothing else: not the request, not what the engine has of the prompt already, not how
long a step took. So each question is decided by itself, by the mode, the floor and calibrated costs; nothing is learnt,
and no guard judges what came of it. Thread-safe: it keeps no state.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvpeer.core.policy import (
    Decision,
    Estimate,
    Load,
    Mode,
    PolicySettings,
    PrefillCosts,
    PullCosts,
    RequestFacts,
    decide,
    located_tokens,
)
from kvpeer.core.reasons import DecisionReason

__all__ = ["PullGate"]

_OWN_POOL = 1


class _CalibratedCosts:
    """See `kvpeer.core.policy.Costs`."""

    def __init__(self, settings: PolicySettings) -> None:
        self._pulls = PullCosts(settings.calibration)
        self._prefills = PrefillCosts(settings.calibration)

    def pull(self, producer: bytes, n_bytes: int, n_in_flight: int) -> Estimate:
        return self._pulls.estimate(producer, n_bytes, n_in_flight)

    def prefill(self, n_tokens: int, n_context: int) -> Estimate:
        return self._prefills.estimate(n_tokens, n_context)


class PullGate:
    """See the module docstring. count: takes a metric of `kvpeer.metrics.policy`, a label and an amount."""

    def __init__(self, settings: PolicySettings, count: Callable[[str, str, float], None]) -> None:
        self._settings = settings
        self._count = count
        self._costs = _CalibratedCosts(settings) if settings.calibration.is_calibrated else None

    def usable_states(self, statuses: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Returns which pages of a pool without prefixes (states of a window, say) to tell SGLang of, bool [n]: those
        at peers when pulls are made at all. statuses as for `usable_pages`."""
        usable: npt.NDArray[np.bool_] = statuses != 0 if self._settings.mode is Mode.ON else statuses == _OWN_POOL
        return usable

    def usable_pages(self, statuses: npt.NDArray[np.uint8], page_tokens: int, page_bytes: int) -> int:
        """Returns how many of the first pages to tell SGLang of. statuses as for `decide`."""
        return self.decide(statuses, page_tokens, page_bytes).n_tokens // page_tokens

    def decide(self, statuses: npt.NDArray[np.uint8], page_tokens: int, page_bytes: int) -> Decision:
        """Returns what is to be made of these pages, and why. statuses u8 [n]: 0 nowhere, 1 in the own pool, 2 at a
        peer."""
        located = located_tokens(statuses, 0, page_tokens)
        # One token more than there are: these pages are all that is asked about, and SGLang computes what follows.
        request = RequestFacts("", len(statuses) * page_tokens + 1, page_tokens, page_bytes)
        decision = decide(request, 0, located, self._settings, costs=self._costs, load=Load())
        self._count("decisions", decision.reason.value, 1)
        if decision.reason is DecisionReason.SHADOW and decision.estimates is not None:
            saved_s = decision.estimates.saved_s
            self._count("shadow_effect", "saved" if saved_s >= 0 else "lost", abs(saved_s))
        return decision
