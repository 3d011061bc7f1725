"""A whole cluster in one thread under a seed: the real machines of `core` with a hostile network, clock and memory.

What is real and what is modelled: docs/simulation.md.
"""

from kvpeer.sim.profile import PROFILES, Profile, profile_named
from kvpeer.sim.run import RunResult, simulate

__all__ = ["PROFILES", "Profile", "RunResult", "profile_named", "simulate"]
