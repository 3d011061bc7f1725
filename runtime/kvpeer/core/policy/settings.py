"""What an operator sets about pulling: the mode, the floor, the margin, calibrated costs, and when the guard acts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from kvpeer.model import ConfigError

__all__ = ["Calibration", "GuardSettings", "Mode", "PolicySettings"]


class Mode(str, Enum):
    """Whether pulls are made at all. Reloads from the own pool do not depend on it."""

    OFF = "off"
    SHADOW = "shadow"
    """Decide, record what a pull would have saved, and compute."""
    ON = "on"


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a pull and a prefill cost before anything was measured here. The defaults are those of nobody's machines in
    particular; a calibrated one (`is_calibrated`) is trusted until live measurements say otherwise.

    Raises:
        ConfigError: a cost is not positive and finite.
    """

    pull_floor_s: float = 0.02
    """A pull of next to nothing: finding, asking, waking up. Published floors: 22 ms (gpt-oss-120b) to 1.2 s (GLM)."""
    pull_s_per_byte: float = 1e-9
    """1 GB/s: a plain 10 Gbit/s network. RDMA is ten times faster."""
    pull_s_per_pull_in_flight: float = 0.01
    """For each pull from the same producer that is under way at the start."""
    step_s: float = 0.005
    """An engine step with next to no tokens."""
    prefill_s_per_token: float = 1e-4
    """10,000 tokens/s. Published: 29,000 (gpt-oss-120b) to 7,600 (GLM)."""
    prefill_s_per_pair: float = 5e-10
    """For each token that a computed token attends to: the quadratic part. Published fits: 3e-10 to 9e-10, halved
    by n^2/2."""
    is_calibrated: bool = False

    def __post_init__(self) -> None:
        for name in (
            "pull_floor_s",
            "pull_s_per_byte",
            "pull_s_per_pull_in_flight",
            "step_s",
            "prefill_s_per_token",
            "prefill_s_per_pair",
        ):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"calibration.{name} must be a positive number, not {value}")


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """When pulling is turned off because it does harm, and when it is tried again.

    Raises:
        ConfigError: a value makes no sense; the message names it.
    """

    is_on: bool = True
    min_samples: int = 8
    """Pulls that are judged together: one or two slow ones are the network's everyday life. Twice as many for the whole
    engine, so that one bad producer is found out first."""
    window: int = 32
    """The latest pulls that count. Older ones say nothing about now."""
    window_s: float = 600.0
    """Nor do those from longer ago than this."""
    retry_s: float = 30.0
    """After this long one pull is tried; twice as long after each try that did not pay."""
    retry_s_max: float = 600.0
    """A producer that recovered is found again within ten minutes, for one slow request each ten minutes."""
    probes_to_return: int = 3
    """Tries in a row that have to pay before pulling is on again."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_samples <= self.window:
            raise ConfigError(
                f"guard.min_samples ({self.min_samples}) must be at least 1 and at most window ({self.window})"
            )
        if not 0 < self.retry_s <= self.retry_s_max < math.inf:
            raise ConfigError(
                f"guard.retry_s ({self.retry_s}) must be positive and at most retry_s_max ({self.retry_s_max})"
            )
        if self.probes_to_return < 1:
            raise ConfigError(f"guard.probes_to_return must be at least 1, not {self.probes_to_return}")
        if not 0 < self.window_s < math.inf:
            raise ConfigError(f"guard.window_s must be a positive number, not {self.window_s}")


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """When a pull is worth it and how long it may take.

    Raises:
        ConfigError: a value makes no sense; the message names it.
    """

    mode: Mode = Mode.OFF
    min_cached_token_delta: int | None = 512
    """Tokens by which a pull must lengthen the prefix. None (Auto): as few as pay by the measured costs, and 512 as
    long as those are not known."""
    margin: float = 0.25
    """By this part a recompute must take longer than the pull, once both are known: the estimates are not exact, and a
    pull keeps a thread, a network and a producer busy."""
    uses_costs: bool = True
    """Whether measured costs have a say beside the floor. Without, the floor alone decides and nothing is judged."""
    pulls_per_source_max: int = 8
    """Pulls that this engine has under way from one producer. As many as a vLLM connector has under way at all, so that
    only a smaller number limits."""
    pull_base_s: float = 0.05
    """Granted to every pull: locating, connecting, queueing."""
    pull_s_per_token: float = 0.0005
    """Granted for each pulled token: twice what a slow prefill of 4,000 tokens a second needs to recompute it."""
    max_pull_wait_s: float = 5.0
    """No pull may take longer, however long the prompt. 0 allows none."""
    calibration: Calibration = field(default_factory=Calibration)
    guard: GuardSettings = field(default_factory=GuardSettings)

    def __post_init__(self) -> None:
        if self.min_cached_token_delta is not None and self.min_cached_token_delta < 1:
            raise ConfigError(f"policy.min_cached_token_delta must be at least 1, not {self.min_cached_token_delta}")
        if self.pulls_per_source_max < 1:
            raise ConfigError(f"policy.pulls_per_source_max must be at least 1, not {self.pulls_per_source_max}")
        for name in ("margin", "pull_base_s", "pull_s_per_token", "max_pull_wait_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"policy.{name} must be a number of at least 0, not {value}")
