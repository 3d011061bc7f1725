"""A mistake put back into the machines is found within SEEDS_MAX seeds, and the same seeds are green without it."""

from __future__ import annotations

from functools import cache

import pytest
from kvpeer.sim import profile_named, simulate

from sim.mutants import MUTANTS, Mutant

SEEDS_MAX = 200
PROFILE = profile_named("standard")


@cache
def is_green_without_mutant(seed: int) -> bool:
    return simulate(seed, PROFILE).is_green


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_simulation_finds(mutant: Mutant):
    found_at = None
    for seed in range(SEEDS_MAX):
        with pytest.MonkeyPatch.context() as patch:
            mutant(patch)
            result = simulate(seed, PROFILE)
        if not result.is_green:
            found_at = seed
            break
    assert found_at is not None, f"{SEEDS_MAX} seeds did not find {mutant.__name__}"
    assert is_green_without_mutant(found_at), "found something else"
