"""`Stream`: what becomes of the bytes of one direction of one connection.

    read bytes --take--> steps --(wait until step.at, and while held_until(now) > now)--> perform

Where a fault strikes depends on the seed and on the position in the stream alone, neither on how the bytes were cut
into reads nor on time: the same seed and the same bytes are struck in the same places. (Whether the fault is in force
at that moment is a question of time.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from kvpeer.chaos.faults import TRIAL_BYTES, Direction, Fault, FaultKind
from kvpeer.core.rng import Rng

__all__ = ["End", "Step", "Stream"]


class End(Enum):
    """How a stream ends."""

    HALF = "half"
    """Its sender has nothing more to say; the other direction goes on."""
    SILENT = "silent"
    """Its sender is gone, and the receiver is not told."""
    CLOSE = "close"
    """The connection ends in order, both directions."""
    RESET = "reset"
    """The connection ends by a reset."""


@dataclass(frozen=True, slots=True)
class Step:
    """Not before `at`: send `data`, then end as `end` says."""

    at: float
    data: bytes = b""
    end: End | None = None


_ENDS = {FaultKind.RESET: End.RESET, FaultKind.TRUNCATE: End.CLOSE}


@dataclass(slots=True)
class _Striker:
    """Where in the stream a fault strikes next. `block`: where the KiB that was tried last begins."""

    fault: Fault
    block: int
    at: float = math.inf

    def place(self, block: int, rng: Rng) -> None:
        """Draws the next place in or after the KiB that begins at `block`."""
        probability = self.fault.probability
        if probability is None:
            self.at = block
            return
        n_spared = 0 if probability == 1 else int(math.log1p(-rng.random()) / math.log1p(-probability))
        self.block = block + n_spared * TRIAL_BYTES
        self.at = self.block + rng.randrange(TRIAL_BYTES)

    def struck(self, rng: Rng) -> None:
        """Goes on to the next place, if there is one."""
        if self.fault.probability is None:
            self.at = math.inf
        else:
            self.place(self.block + TRIAL_BYTES, rng)


class Stream:
    """One direction of one connection. `rng` places the strikes, `jitter` draws delays; `counts` is added to, a fault
    at a time. Times are monotonic seconds. Not thread-safe."""

    def __init__(
        self,
        direction: Direction,
        faults: Iterable[Fault],
        since: float,
        rng: Rng,
        jitter: Rng,
        counts: Counter[FaultKind],
    ) -> None:
        self.direction = direction
        self._rng = rng
        self._jitter = jitter
        self._counts = counts
        self._position = 0
        self._released_at = -math.inf
        self._is_blackholed = False
        self._was_held = False
        self.change(faults, since)

    def change(self, faults: Iterable[Fault], since: float) -> None:
        """From now on these faults, set at `since`. What was swallowed stays so."""
        self._since = since
        ours = [fault for fault in faults if fault.direction in (self.direction, Direction.BOTH)]
        self._delays = [fault for fault in ours if fault.kind is FaultKind.DELAY]
        self._freezes = [fault for fault in ours if fault.kind is FaultKind.FREEZE]
        self._strikers = [_Striker(fault, self._position) for fault in ours if fault.kind.strikes]
        for striker in self._strikers:
            striker.place(self._position + (striker.fault.after_bytes or 0), self._rng)

    def take(self, chunk: bytes, now: float) -> list[Step]:
        """What to do with the next bytes, which are not empty. After a step with an `end` nothing more is taken."""
        start, self._position = self._position, self._position + len(chunk)
        if self._is_blackholed:
            return []
        at = self._release_at(now)
        self._counts[FaultKind.DELAY] += at > now
        while (striker := self._next_striker()) is not None:
            kind, idx = striker.fault.kind, int(striker.at) - start
            bit = self._rng.randrange(8) if kind is FaultKind.CORRUPT else 0
            striker.struck(self._rng)
            if not self._is_in_force(striker.fault, now):
                continue
            self._counts[kind] += 1
            if kind is FaultKind.CORRUPT:
                chunk = chunk[:idx] + bytes([chunk[idx] ^ 1 << bit]) + chunk[idx + 1 :]
                continue
            self._is_blackholed = kind is FaultKind.BLACKHOLE
            return [Step(at, chunk[:idx], _ENDS.get(kind))]
        return [Step(at, chunk)]

    def finish(self, now: float) -> list[Step]:
        """What to do when the sender has nothing more to say."""
        return [Step(self._release_at(now), end=End.SILENT if self._is_blackholed else End.HALF)]

    def broke(self, now: float) -> list[Step]:
        """What to do when the sender's side ended by an error."""
        return [Step(self._release_at(now), end=End.SILENT if self._is_blackholed else End.RESET)]

    def held_until(self, now: float) -> float:
        """Nothing may be performed before then; `now` when it may. Ask again at that time, and after a change."""
        ends = [self._since + fault.until_s for fault in self._freezes if self._is_in_force(fault, now)]
        if ends and not self._was_held:
            self._counts[FaultKind.FREEZE] += 1
        self._was_held = bool(ends)
        return max(ends, default=now)

    # ---- inside

    def _next_striker(self) -> _Striker | None:
        """The one that strikes first among the bytes that have come."""
        first = min(self._strikers, key=lambda striker: striker.at, default=None)
        return first if first is not None and first.at < self._position else None

    def _is_in_force(self, fault: Fault, now: float) -> bool:
        return fault.from_s <= now - self._since < fault.until_s

    def _release_at(self, now: float) -> float:
        delays = [fault for fault in self._delays if self._is_in_force(fault, now)]
        delay_ms = sum(fault.delay_ms + fault.jitter_ms * self._jitter.random() for fault in delays)
        self._released_at = max(self._released_at, now + delay_ms / 1000)
        return self._released_at
