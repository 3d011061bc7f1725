"""The calls of engines that are under way, and whether each is answered by its deadline."""

from __future__ import annotations

from dataclasses import dataclass

from kvpeer.sim.agent import Agent
from kvpeer.sim.world import World

__all__ = ["Calls"]

LATE_S = 1e-6
"""Rounding of clocks; an answer is due at the deadline itself, in a world where computing takes no time."""

AFTER_DISTURBANCE_S = 0.1
"""An agent that was stopped, or whose clock went forward, answers this soon after it goes on, if that is later."""


@dataclass(frozen=True, slots=True)
class _Call:
    """`deadline` is on the agent's own clock, by which it judges."""

    kind: str
    agent: Agent
    deadline: float


class Calls:
    """Not thread-safe; numbers name calls."""

    def __init__(self, world: World) -> None:
        self.n_ended = 0
        self._world = world
        self._open: dict[int, _Call] = {}
        self._last = 0

    def begin(self, kind: str, agent: Agent, wait_s: float) -> int:
        """A call that must end within this time."""
        self._last += 1
        self._open[self._last] = _Call(kind, agent, agent.process.clock() + wait_s)
        return self._last

    def end(self, number: int) -> None:
        """The agent has answered."""
        call = self._open.pop(number, None)
        if call is not None:
            self.n_ended += 1
            self._check(call)

    def drop(self, number: int) -> None:
        """Nobody waits for the answer any more: the asker is dead."""
        self._open.pop(number, None)

    def check(self) -> None:
        """Looks for calls that should have ended; forgets those of agents that are dead."""
        for number, call in list(self._open.items()):
            if call.agent.process.is_dead or (not call.agent.process.is_frozen and self._check(call)):
                del self._open[number]

    def _check(self, call: _Call) -> bool:
        """Whether the call is late, which breaks the promise unless its agent was stopped a moment ago."""
        process = call.agent.process
        late_s = process.clock() - call.deadline
        is_late = late_s > LATE_S and self._world.kernel.now > process.disturbed_at + AFTER_DISTURBANCE_S
        if is_late:
            self._world.violate("a call outlived its deadline", call.kind, call.agent.name, f"by {late_s:.6f} s")
        return is_late
