"""One batch's questions to the directory: who holds these pages? See `plan.LocatePlan`."""

from kvpeer.core.locate.owners import PREVIOUS_RING_S, LocateRings
from kvpeer.core.locate.plan import Ask, LocatePlan, LocateQuestion, LocateResult

__all__ = [
    "PREVIOUS_RING_S",
    "Ask",
    "LocatePlan",
    "LocateQuestion",
    "LocateResult",
    "LocateRings",
]
