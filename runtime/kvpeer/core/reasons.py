"""Why pages were not found, and why a pull was or was not made: the closed lists that metrics, logs and answers use."""

from __future__ import annotations

from enum import Enum

from kvpeer.model import KvPeerError

__all__ = ["DecisionReason", "MissReason", "NotAskedError", "UnaskedReason"]


class MissReason(str, Enum):
    """Why a key of a locate has no usable location."""

    MISS = "miss"
    """A synced owner knows no holder (or only this agent's own pool, which no longer has the page)."""
    NEGATIVE = "negative"
    """It was asked for a moment ago, or its locations failed: not asked again yet."""
    UNSURE = "unsure"
    """Every owner that answered has yet to be repaired after it took the partition over."""
    LATE = "late"
    """No answer by the deadline."""
    FAILED = "failed"
    """Every owner failed: its link is down, or it refused."""
    GARBLED = "garbled"
    """An owner's answer did not fit the question."""
    NO_HOLDER = "no_holder"
    """None of its known holders may be asked for it: they ended, fail repeatedly, or just failed for this page."""
    BREAKER_OPEN = "breaker_open"
    """Every owner is being avoided because it failed repeatedly."""
    NO_OWNER = "no_owner"
    """The ring names no owner for the partition."""
    NO_MEMBERS = "no_members"
    """There is no other agent to ask."""


class UnaskedReason(str, Enum):
    """Why no producer was asked for a page that was to be pulled."""

    NO_SOURCE = "no_source"
    """Nobody is known to hold it who is alive and not avoided."""
    BREAKER_OPEN = "breaker_open"
    """Its producer failed repeatedly, and somebody else is just trying it."""
    OTHER_SIZE = "other_size"
    """What its holder has under this key is of another size than the namespace's pages."""
    NO_ROOM = "no_room"
    """The own pool has no slot for it."""
    WRITING = "writing"
    """An engine of this pod is just writing it itself."""
    BUSY = "busy"
    """As many fetches from its producer as may run at a time ran until the deadline."""
    NOT_PROMOTED = "not_promoted"
    """Its producer did not bring it from its disk in time, or at all."""
    LATE = "late"
    """No thread was free before the deadline, or locating took all the time."""


class NotAskedError(KvPeerError):
    """A producer was not asked, for a reason on this side: it says nothing about the producer."""

    retryable = True

    def __init__(self, reason: UnaskedReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class DecisionReason(str, Enum):
    """Why a request reloads, pulls or does nothing."""

    LOCAL_HIT = "local_hit"
    """The engine itself has all that can be reused."""
    NOTHING_FOUND = "nothing_found"
    """No page beyond the engine's own is in the pool or at a peer."""
    RELOAD = "reload"
    """Pages in the own pool continue the engine's prefix, and peers have nothing beyond them."""
    PULL = "pull"
    """Peers have enough beyond the local reach."""
    MODE_OFF = "mode_off"
    """Peers have pages, but pulling is turned off."""
    BELOW_FLOOR = "below_floor"
    """What peers have beyond the local reach is less than `min_cached_token_delta`."""
    BUSY = "busy"
    """As many loads of that kind are under way as are begun without a long wait."""
    NO_TIME = "no_time"
    """No wait is allowed for a pull."""
    NOT_WORTH_IT = "not_worth_it"
    """Computing takes no longer than the pull and the margin, by what both were measured to take."""
    SOURCE_BUSY = "source_busy"
    """As many pulls as may be (`pulls_per_source_max`) are under way from each producer that has the pages."""
    PAIR_GUARDED = "pair_guarded"
    """The guard turned off pulling from each producer that has the pages."""
    ENGINE_GUARDED = "engine_guarded"
    """The guard turned off pulling altogether."""
    PROBE = "probe"
    """A pull that is made to see whether it pays by now."""
    CONTROL = "control"
    """A pull might pay, but nobody knows how long computing takes: this request is computed to find out."""
    SHADOW = "shadow"
    """It would be pulled; the mode is Shadow."""
