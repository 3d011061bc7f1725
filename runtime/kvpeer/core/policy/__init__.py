"""Deciding to pull: what it costs (`costs`), whether it pays (`decision`), from whom (`sampling`), and what to do when
it did not (`guard`); `ledger` keeps what one engine has seen. Pure: times come in as arguments."""

from kvpeer.core.policy.costs import PrefillCosts, PullCosts
from kvpeer.core.policy.decision import (
    AUTO_FLOOR_TOKENS,
    PREFIX_BAND_PAGES,
    Action,
    Candidate,
    Costs,
    Decision,
    Estimates,
    Load,
    Located,
    RequestFacts,
    decide,
    located_tokens,
    pull_wait_s,
)
from kvpeer.core.policy.fit import Estimate, Fit
from kvpeer.core.policy.guard import Guard, GuardChange, Guards
from kvpeer.core.policy.ledger import Ledger, PullOutcome
from kvpeer.core.policy.sampling import lot
from kvpeer.core.policy.settings import Calibration, GuardSettings, Mode, PolicySettings

__all__ = [
    "AUTO_FLOOR_TOKENS",
    "PREFIX_BAND_PAGES",
    "Action",
    "Calibration",
    "Candidate",
    "Costs",
    "Decision",
    "Estimate",
    "Estimates",
    "Fit",
    "Guard",
    "GuardChange",
    "GuardSettings",
    "Guards",
    "Ledger",
    "Load",
    "Located",
    "Mode",
    "PolicySettings",
    "PrefillCosts",
    "PullCosts",
    "PullOutcome",
    "RequestFacts",
    "decide",
    "located_tokens",
    "lot",
    "pull_wait_s",
]
