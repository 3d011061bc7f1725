"""Puts this folder on the import path, so that tests of every part can use `oracles`, and sets up property tests."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

# No time limits: speed is not what a property is about, and these tests run on busy machines. CI tries the same
# examples each time, so that a change is red for what it did; everybody else's runs look for new ones.
settings.register_profile(
    "kvpeer", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvpeer")

# For runs that repeat the tests very often (mutants) or slow them down (coverage): few examples, always the same ones,
# and no search for the smallest one, because nobody looks at it.
settings.register_profile(
    "quick", settings.get_profile("kvpeer"), max_examples=20, derandomize=True, phases=[Phase.explicit, Phase.generate]
)
