"""The faults that can be injected, and when each is in force. Plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from kvpeer.model import ConfigError

__all__ = ["TRIAL_BYTES", "Direction", "Fault", "FaultKind"]

TRIAL_BYTES = 1024
"""A `probability` is tried once for each KiB of a stream: about a packet, or a few messages of the control channel.
Counted by position in the stream, not by reads, so that a seed strikes at the same bytes however they are cut."""

PROBABILITY_MIN = 1e-9
"""Once in a TiB; anything less is a mistake."""

DELAY_MS_MAX = 600_000
"""No deadline of the agents is longer."""


class Direction(str, Enum):
    """Of a stream of bytes, as seen from the agent behind the proxy; BOTH: of a fault."""

    TO_AGENT = "to_agent"
    FROM_AGENT = "from_agent"
    BOTH = "both"


class FaultKind(str, Enum):
    """What happens to a stream."""

    DELAY = "delay"
    """All bytes arrive later, in order."""
    FREEZE = "freeze"
    """Nothing is forwarded; afterwards it goes on with the next byte, as with a process that was stopped."""
    BLACKHOLE = "blackhole"
    """From one byte on everything is swallowed, and the connection stays open: nobody is told."""
    RESET = "reset"
    """The connection ends at one byte by a reset (RST)."""
    TRUNCATE = "truncate"
    """The connection ends at one byte in order (FIN), as if the sender had nothing more to say."""
    CORRUPT = "corrupt"
    """One bit of one byte is flipped."""

    @property
    def strikes(self) -> bool:
        """Whether it happens at a byte; the others last for a time."""
        return self not in (FaultKind.DELAY, FaultKind.FREEZE)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a route. In force from `from_s` to `until_s`, in seconds since it was set.

    A kind that strikes does so with `probability` in each KiB that passes; nothing strikes before `after_bytes` bytes
    of the stream passed since the fault was set or the connection opened. Without a probability it strikes exactly
    there, once a connection.

    Raises:
        ConfigError: the values make no fault; the message begins with the name of the one that is wrong.
    """

    kind: FaultKind
    direction: Direction = Direction.BOTH
    probability: float | None = None
    after_bytes: int | None = None
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    from_s: float = 0.0
    until_s: float = math.inf

    def __post_init__(self) -> None:
        if self.probability is not None and not PROBABILITY_MIN <= self.probability <= 1:
            raise ConfigError(f"probability is {self.probability}, but must be from {PROBABILITY_MIN:g} to 1")
        if self.after_bytes is not None and self.after_bytes < 0:
            raise ConfigError(f"after_bytes is {self.after_bytes}, but must not be negative")
        for name in ("delay_ms", "jitter_ms"):
            if not 0 <= getattr(self, name) <= DELAY_MS_MAX:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be from 0 to {DELAY_MS_MAX}")
        if not 0 <= self.from_s < self.until_s:
            raise ConfigError(f"until_s is {self.until_s}, but must be after from_s, which is {self.from_s}")
        self._check_kind()

    def _check_kind(self) -> None:
        is_placed = self.probability is not None or self.after_bytes is not None
        is_delay = self.delay_ms > 0 or self.jitter_ms > 0
        if self.kind.strikes and not is_placed:
            raise ConfigError(f"probability is missing: {self.kind.value} needs it, or after_bytes, or both")
        if not self.kind.strikes and is_placed:
            name = "probability" if self.probability is not None else "after_bytes"
            raise ConfigError(
                f"{name} has no meaning for {self.kind.value}, which lasts for a time: use from_s, until_s"
            )
        if self.kind is FaultKind.DELAY and not is_delay:
            raise ConfigError("delay_ms is missing: delay needs it, or jitter_ms, or both")
        if self.kind is not FaultKind.DELAY and is_delay:
            raise ConfigError(f"delay_ms and jitter_ms have no meaning for {self.kind.value}, only for delay")
