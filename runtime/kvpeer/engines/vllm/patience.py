"""How long answers to lookups are waited for: within a step, and by a request that comes back at a later one.

A request whose answer is missing is asked about again at the next step, and while it waits the engine computes one
request fewer than it could. So waiting a little within a step gains a whole step of that request; but all others wait
with it. And no request waits longer than the answer is worth, see `kvpeer.engines.vllm.worth`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvpeer.engines.pace import Pace
from kvpeer.engines.vllm.worth import Worth

__all__ = ["IDLE_PATIENCE_S", "STEP_SHARE", "Patience", "RequestPatience"]

IDLE_PATIENCE_S = 0.003
"""What a step waits at most; as a rule the answer takes 1 to 2 ms. An engine that has nothing to compute waits so
long, because coming back costs more there: vLLM passes an empty step through its workers, sleeps for 1 ms, and between
the two keeps the interpreter from the thread that has the answer."""

STEP_SHARE = 0.02
"""Of the step before, for all lookups of the present one: waiting costs an engine that computes no more than this."""


@dataclass
class Patience:
    """Of one engine. Not thread-safe, but for `worth`. Seconds of `clock`."""

    clock: Callable[[], float]
    pace: Pace
    worth: Worth = field(default_factory=Worth)
    _step_began_at: float | None = None
    _left_s: float = 0.0

    def step_scheduled(self) -> None:
        """A step is on its way; what waits from here on holds up the next one."""
        now = self.clock()
        took_s = now - self._step_began_at if self._step_began_at is not None else 0.0
        self._step_began_at = now
        self._left_s = min(IDLE_PATIENCE_S, STEP_SHARE * took_s)

    def of_request(self, n_tokens: int, *, is_idle: bool) -> RequestPatience:
        """For a request that asks where the pages of so many tokens are. is_idle: nothing else is computed."""
        return RequestPatience(self, self.worth.seconds(n_tokens * self.pace.token_s), is_idle)

    def wait(self, waiting: Callable[[float], object], worth_s: float, *, is_idle: bool) -> None:
        """Calls `waiting` with the time that there is, if there is any, which it must keep to. worth_s: more than this
        is not waited for this one."""
        left_s = min(worth_s, IDLE_PATIENCE_S if is_idle else self._left_s)
        if left_s <= 0:
            return
        began_at = self.clock()
        waiting(left_s)
        self._left_s = max(0.0, self._left_s - (self.clock() - began_at))


@dataclass(frozen=True)
class RequestPatience:
    """How long one request waits at one step."""

    engine: Patience
    worth_s: float
    is_idle: bool

    def wait(self, waiting: Callable[[float], object]) -> None:
        """Within the step; see `Patience.wait`."""
        self.engine.wait(waiting, self.worth_s, is_idle=self.is_idle)

    def may_return(self, waited_s: float) -> bool:
        """Whether a request that has waited so long may come back at the next step, which is when the present one is
        over."""
        return waited_s + (0.0 if self.is_idle else self.engine.pace.step_s) <= self.worth_s
