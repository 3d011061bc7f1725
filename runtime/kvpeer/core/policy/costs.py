"""What pulls and prefills cost here and now, learnt from those that were made.

A pull from a producer: a floor, so much a byte, so much for each pull from it that is already under way. A prefill: so
much a step, a token, and a pair of tokens of which one attends to the other (the quadratic part).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from kvpeer.core.policy.fit import Estimate, Fit
from kvpeer.core.policy.settings import Calibration

__all__ = ["PAIRS_MAX", "PROMPT_TOKENS_MIN", "STEP_TOKENS", "PrefillCosts", "PullCosts"]

PAIRS_MAX = 1024
"""Producers whose pulls have a model of their own: as many as a cluster has members. Beyond, the one that was pulled
from longest ago is forgotten, and estimated like all others."""

STEP_TOKENS = 2048
"""Tokens that an engine computes in a step, where nobody says: vLLM's default for chunked prefills."""

PROMPT_TOKENS_MIN = 128
"""A step with fewer tokens of prompts takes what any step takes. It says nothing about computing a prompt, and there
are so many of them that they would make what does be forgotten: whoever reports steps leaves those out."""


class PullCosts:
    """One model for each producer, started from the one over all of them. Not thread-safe."""

    def __init__(self, start: Calibration) -> None:
        costs = (start.pull_floor_s, start.pull_s_per_byte, start.pull_s_per_pull_in_flight)
        self._least = tuple(cost / 10 for cost in costs)
        self._all = Fit(costs, is_calibrated=start.is_calibrated)
        self._pairs: OrderedDict[bytes, Fit] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pairs)

    def estimate(self, producer: bytes, n_bytes: int, n_in_flight: int) -> Estimate:
        """How long a pull of so many bytes from this producer takes while others from it are under way."""
        # A producer that was pulled from is judged by its own pulls alone, however few: what others take says nothing
        # against it. But where all of them are known, nobody needs eight more slow pulls to believe one.
        estimate = self._pairs.get(producer, self._all).estimate((1, n_bytes, n_in_flight))
        return replace(estimate, is_known=estimate.is_known or self._all.is_known)

    def observe(self, producer: bytes, n_bytes: int, n_in_flight: int, seconds: float) -> None:
        """A pull took so long, with so many others under way at its start."""
        if producer not in self._pairs:
            # A cost that is 0 among all, because nothing told it apart, may well not be 0 here.
            self._pairs[producer] = Fit([max(pair) for pair in zip(self._all.costs, self._least, strict=True)])
            if len(self._pairs) > PAIRS_MAX:
                self._pairs.popitem(last=False)
        self._pairs.move_to_end(producer)
        for fit in (self._pairs[producer], self._all):
            fit.observe((1, n_bytes, n_in_flight), seconds)


class PrefillCosts:
    """One model an engine. Not thread-safe. step_tokens: as many as the engine computes in one step at most."""

    def __init__(self, start: Calibration, step_tokens: int = STEP_TOKENS) -> None:
        self._step_tokens = step_tokens
        costs = (start.step_s, start.prefill_s_per_token, start.prefill_s_per_pair)
        self._fit = Fit(costs, is_calibrated=start.is_calibrated)

    def estimate(self, n_tokens: int, n_context: int) -> Estimate:
        """What computing so many tokens behind a context adds to a request that computes some token in any case.

        0 for no tokens and convex in their number, so that what pays for some tokens pays for more.
        """
        return self._fit.estimate((n_tokens / self._step_tokens, n_tokens, n_tokens * (n_context + n_tokens / 2)))

    def step_s(self, n_tokens: int, n_pairs: float) -> float:
        """How long a step takes that computes so many tokens, which attend to so many others in all. Made for every
        step, so that it does not wait for a new fit."""
        return self._fit.seconds_by_last_fit((1, n_tokens, n_pairs))

    def observe(self, n_tokens: int, n_pairs: float, seconds: float) -> None:
        """A step that computed so many tokens took so long."""
        self._fit.observe((1, n_tokens, n_pairs), seconds)
