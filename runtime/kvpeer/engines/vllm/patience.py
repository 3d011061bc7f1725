"""How long a step may wait for answers to lookups, so that a request need not come back one step later.

A request whose answer is missing is asked about again at the next step, and while it waits the engine computes one
request fewer than it could. So waiting a little gains a whole step of that request; but all others wait with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["IDLE_PATIENCE_S", "STEP_SHARE", "Patience"]

IDLE_PATIENCE_S = 0.003
"""What a step waits at most; as a rule the answer takes 1 to 2 ms. An engine that has nothing to compute waits so
long, because coming back costs more there: vLLM passes an empty step through its workers, sleeps for 1 ms, and between
the two keeps the interpreter from the thread that has the answer."""

STEP_SHARE = 0.02
"""Of the step before, for all lookups of the present one: waiting costs an engine that computes no more than this."""


@dataclass
class Patience:
    """Not thread-safe. Seconds of `clock`."""

    clock: Callable[[], float]
    _step_began_at: float | None = None
    _left_s: float = 0.0

    def step_scheduled(self) -> None:
        """A step is on its way; what waits from here on holds up the next one."""
        now = self.clock()
        took_s = now - self._step_began_at if self._step_began_at is not None else 0.0
        self._step_began_at = now
        self._left_s = min(IDLE_PATIENCE_S, STEP_SHARE * took_s)

    def wait(self, waiting: Callable[[float], object], *, is_idle: bool) -> None:
        """Calls `waiting` with the time that there is, if there is any, which it must keep to."""
        left_s = IDLE_PATIENCE_S if is_idle else self._left_s
        if left_s <= 0:
            return
        began_at = self.clock()
        waiting(left_s)
        self._left_s = max(0.0, self._left_s - (self.clock() - began_at))
