"""A fleet of engines in virtual time: prefills and decodes with fitted costs, a router, and the real policy of `core`.

What is real and what is modelled: docs/simulation.md.
"""

from kvpeer.sim.fleet.experiments import Runs, planned
from kvpeer.sim.fleet.fleet import Fleet, FleetProfile, UndrainedError
from kvpeer.sim.fleet.pool import run_pool
from kvpeer.sim.fleet.report import page

__all__ = ["Fleet", "FleetProfile", "Runs", "UndrainedError", "page", "planned", "run_pool"]
