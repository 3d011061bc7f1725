"""Bringing pages of peers into the own pool: one pull for all who want a page. See `plan.PullPlan`, `pulls.Pulls`."""

from kvpeer.core.pull.effects import (
    Ask,
    Commit,
    Effect,
    Fetch,
    FetchAnswer,
    GiveBack,
    Locate,
    Portion,
    Promote,
    ReportCorrupt,
    ReportStale,
    Reserve,
    Touched,
)
from kvpeer.core.pull.plan import FETCH_S_MIN, PullPlan, PullQuestion
from kvpeer.core.pull.pulls import Pulls, Wanted

__all__ = [
    "FETCH_S_MIN",
    "Ask",
    "Commit",
    "Effect",
    "Fetch",
    "FetchAnswer",
    "GiveBack",
    "Locate",
    "Portion",
    "Promote",
    "PullPlan",
    "PullQuestion",
    "Pulls",
    "ReportCorrupt",
    "ReportStale",
    "Reserve",
    "Touched",
    "Wanted",
]
