"""What the answer to a lookup is worth: the time that pages found lately would have saved the request that asks.

No request waits longer for an answer than that. So where nothing is ever found (prompts that share nothing, an agent
without peers) requests soon stop waiting, and where prompts are found they wait for it. Answers that come too late are
learnt from as well: when pages begin to be found, the first of them are missed, and the next ones waited for.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

__all__ = ["SHARE_MIN", "Worth"]

SHARE_MIN = 0.001
"""Of the time that computing a request takes, what it may wait even where nothing was ever found: next to nothing, and
for a very long prompt enough for an answer."""

_NEW_SHARE = 1 / 16
"""Weight of the newest answer. After 16 answers without pages a request waits for 36 % of its own computing time, after
64 for 1.6 %; one answer with all pages brings back 6 %, and more than a lookup takes as a rule."""


class Worth:
    """The share of the asked pages that was found lately; all of them at first. Thread-safe: answers come on threads of
    their own."""

    def __init__(self) -> None:
        self._share = 1.0
        self._lock = threading.Lock()

    def learn(self, is_found: npt.NDArray[np.bool_]) -> None:
        """Takes note of an answer; is_found: bool [n], page by page. What lies behind a missing page is of no use."""
        if len(is_found) == 0:
            return
        share = float(np.logical_and.accumulate(is_found).mean())
        with self._lock:
            self._share = max(SHARE_MIN, self._share + _NEW_SHARE * (share - self._share))

    def seconds(self, compute_s: float) -> float:
        """How long a request may wait that takes `compute_s` to compute. Never blocks for long."""
        with self._lock:
            return self._share * compute_s
