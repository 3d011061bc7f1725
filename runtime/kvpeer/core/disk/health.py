"""Whether the disk is in use, why not, and when it is tried again."""

from __future__ import annotations

from enum import Enum

__all__ = ["RETRY_S_MAX", "RETRY_S_MIN", "Condition", "DiskHealth"]

RETRY_S_MIN = 1.0
RETRY_S_MAX = 60.0
"""Pause before a disk that failed is tried again: doubles from the first to the second. Opening one reads its whole
index, and a disk that comes and goes would have the directory follow it each time."""

SETTLED_S = 60.0
"""A disk that worked for this long is a good one again: its next failure is its first."""


class Condition(str, Enum):
    """The state of the disk tier, as metrics and log name it. Only OK and FULL serve pages."""

    OFF = "off"
    """None is configured."""
    OPENING = "opening"
    """It is being opened for the first time."""
    OK = "ok"
    FULL = "full"
    """The file system had no room for what the tier may use. It goes on with what it has, if it has anything."""
    LOCKED = "locked"
    """Another agent uses the folder."""
    READ_ONLY = "read_only"
    VANISHED = "vanished"
    """The folder is not there any more, or is another one."""
    SLOW = "slow"
    """One operation did not come back in time."""
    FAILING = "failing"
    """Errors of any other kind."""


class DiskHealth:
    """Times are monotonic seconds. Not thread-safe."""

    def __init__(self) -> None:
        self.condition = Condition.OPENING
        self.retry_at = 0.0
        """When a disk that is not in use is to be opened."""
        self._pause_s = RETRY_S_MIN
        self._opened_at = 0.0

    def opened(self, now: float) -> None:
        """It is in use."""
        self.condition = Condition.OK
        self._opened_at = now

    def failed(self, condition: Condition, now: float) -> bool:
        """It is out of use. True if that is news, and not the same as at the last try."""
        was_serving = self.condition in (Condition.OK, Condition.FULL)
        if was_serving and now - self._opened_at >= SETTLED_S:
            self._pause_s = RETRY_S_MIN
        is_news = was_serving or condition is not self.condition
        self.condition = condition
        self.retry_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, RETRY_S_MAX)
        return is_news
