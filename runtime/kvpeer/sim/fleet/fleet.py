"""A fleet of engines behind a router, in virtual time: what is asked of it, and what became of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from kvpeer.core.policy import PolicySettings
from kvpeer.sim.fleet.engine import Engine
from kvpeer.sim.fleet.placement import Placement, by_load
from kvpeer.sim.fleet.profile import EngineProfile, LinkProfile
from kvpeer.sim.fleet.workload import Outcome, Request
from kvpeer.sim.kernel import Kernel

__all__ = ["Fleet", "FleetProfile", "UndrainedError"]

DRAIN_S_MAX = 3600.0
"""After the last arrival all requests end within this, or the fleet does not serve."""


class UndrainedError(Exception):
    """Requests were left over when nothing happened any more, or after DRAIN_S_MAX."""


@dataclass(frozen=True, slots=True)
class FleetProfile:
    """How many engines of which kind, how they pull from each other, and where requests go."""

    n_engines: int
    engine: EngineProfile
    link: LinkProfile
    settings: PolicySettings
    placement: Placement[Engine] = by_load


class Fleet:
    """See the module docstring. The seed decides what chance decides."""

    def __init__(self, profile: FleetProfile, seed: int = 0) -> None:
        self.kernel = Kernel()
        self.rng = Random(seed)  # noqa: S311 - chance of a simulation
        self._placement = profile.placement
        self._outcomes: list[Outcome] = []
        self.engines = [
            Engine(self.kernel, idx, profile.engine, profile.link, profile.settings, self._outcomes.append)
            for idx in range(profile.n_engines)
        ]
        for engine in self.engines:
            engine.peers = self.engines

    def serve(self, requests: Sequence[Request]) -> list[Outcome]:
        """Serves the requests, each from its arrival on, until all have ended; outcomes in the order of their ends.

        Raises:
            UndrainedError: some did not end.
        """
        self._outcomes.clear()
        for request in requests:
            self.kernel.at(request.arrived_at, lambda request=request: self._arrive(request))  # type: ignore[misc]
        limit = max([request.arrived_at for request in requests], default=0.0) + DRAIN_S_MAX
        while len(self._outcomes) < len(requests):
            if self.kernel.now >= limit:
                raise UndrainedError(f"{len(requests) - len(self._outcomes)} requests did not end by {limit:.0f} s")
            self.kernel.run_until(self.kernel.now + 1.0)
        return list(self._outcomes)

    def _arrive(self, request: Request) -> None:
        self._placement(request, self.engines, self.rng).submit(request)
