"""How fast an engine computes at present: what a step takes, and what a token of a prompt takes.

Averages of the latest steps, cheap enough to be asked for every request. What decides about pulls is fitted with more
care (`kvpeer.core.policy.costs`); this tells whether a wait is long or short.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Pace"]

_NEW_SHARE = 1 / 8
"""Weight of the newest step: an engine that becomes busy is known to be so within some ten steps."""


@dataclass
class Pace:
    """Seconds. Nothing is known at first: a step takes no time then, and a token for ever. Not thread-safe."""

    step_s: float = 0.0
    token_s: float = math.inf

    def step_took(self, seconds: float, n_tokens: int, *, has_prompt: bool) -> None:
        """A step computed so many tokens, at least one. has_prompt: many of them were of prompts; other steps take long
        for each token, and say nothing about prompts."""
        self.step_s = _averaged(self.step_s or seconds, seconds)
        if has_prompt:
            token_s = seconds / n_tokens
            self.token_s = token_s if math.isinf(self.token_s) else _averaged(self.token_s, token_s)


def _averaged(old: float, new: float) -> float:
    return old + _NEW_SHARE * (new - old)
