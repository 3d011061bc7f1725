"""A linear model of a duration that learns while it is used, and that no sample can blow up.

seconds = sum of (cost of one unit of size i) * (size i), with all costs at least 0. Each cost is learnt as a multiple
of the one it started from, and each sample is divided by what the start says about its sizes. So the regressors are
shares that add up to 1, whatever the units, and a little weight on the start keeps the equations well conditioned
whatever the samples are.

Fitted to the latest samples, the newer the heavier, by iteratively reweighted least squares with Huber's weights and
relative errors (Huber, "Robust estimation of a location parameter", Ann. Math. Statist. 35, 1964; Holland and Welsch,
"Robust regression using iteratively reweighted least-squares", Comm. Statist. A6, 1977): outliers move little as long
as they are few, and once they are the majority they are what is so. Taking a sample in costs next to nothing; the fit,
about a millisecond, is made when somebody asks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpeer.model import LocalProtocolError

__all__ = ["KNOWN_AFTER_SAMPLES", "SAMPLES_MAX", "Estimate", "Fit"]

SAMPLES_MAX = 48
"""Samples that are kept; the oldest has 3 % of the weight of the newest."""

KNOWN_AFTER_SAMPLES = 8
"""With fewer samples an estimate decides nothing, unless it was calibrated: three costs need some."""

SIZE_MAX = 1e15
"""A petabyte, or more tokens than there are. Larger sizes count as this."""

SECONDS_MAX = 3600.0
"""A longer duration is a machine that slept, and counts as this."""

_KEEP = 0.93
"""A sample's weight as a part of the next newer one's: 7 new samples outweigh all before them."""

_START_WEIGHT = 1e-4
"""Of the start, in samples. Every sample overrules it, even in a cost that is a hundredth of the whole; it keeps what
no sample says anything about, and all equations solvable."""

_START_EVIDENCE = 0.02
"""Of the start, in samples, where it is asked how much is known: sizes whose shares differ by a tenth from those of the
samples count as seen, since a wrong cost of so small a share hardly matters."""

_ROUNDS = 4
_HUBER = 1.5
_RATIO_MIN, _RATIO_MAX = 1e-3, 1e4
_MISS_MIN, _MISS_GUESSED, _MISS_CALIBRATED = 0.05, 1.0, 0.3
"""How far off an estimate is, as a part of it: at least; where no sample said anything and the start was a guess; where
it was calibrated."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A duration and its standard deviation. Not `is_known`: little more than a guess, which must decide nothing.
    `support`: how many samples' worth of evidence there is about just these sizes; below 1 it is extrapolated."""

    seconds: float
    deviation_s: float
    is_known: bool
    support: float = math.inf


class Fit:
    """See the module docstring. Not thread-safe."""

    def __init__(self, start: Sequence[float], *, is_calibrated: bool = False) -> None:
        """start: what one unit of each size costs, in seconds.

        Raises:
            LocalProtocolError: a cost is not positive and finite.
        """
        if not start or not all(0 < cost < math.inf for cost in start):
            raise LocalProtocolError(f"costs must be positive and finite, not {list(start)}")
        self._start = tuple(start)
        self._miss_unseen = _MISS_CALIBRATED if is_calibrated else _MISS_GUESSED
        self._n_samples = KNOWN_AFTER_SAMPLES if is_calibrated else 0
        self._samples: deque[tuple[list[float], float]] = deque(maxlen=SAMPLES_MAX)
        self._is_fitted = True
        self._factors = np.ones(len(start))
        self._miss = 0.0
        self._information = _START_EVIDENCE * np.eye(len(start))

    @property
    def costs(self) -> tuple[float, ...]:
        """What one unit of each size costs now, in seconds, each at least 0."""
        self._fit()
        return tuple(cost * factor for cost, factor in zip(self._start, self._factors.tolist(), strict=True))

    @property
    def is_known(self) -> bool:
        """Whether estimates rest on enough samples, or on a calibration."""
        return self._n_samples >= KNOWN_AFTER_SAMPLES

    def estimate(self, sizes: Sequence[float]) -> Estimate:
        """How long something of these sizes takes. Never negative, and never less for larger sizes."""
        self._fit()
        scale, split = self._shares(sizes)
        shares = np.array(split)
        ratio = float(shares @ self._factors)
        # Of a new observation: its own error, that of the fitted factors, and that of the start where it is all there
        # is. `unseen`: 1 where no sample says anything about these sizes, next to 0 where one does.
        leverage = max(0.0, float(shares @ np.linalg.solve(self._information, shares)))
        unseen = leverage * _START_EVIDENCE
        seen_error = ratio * self._miss * math.sqrt(1 + leverage * (1 - unseen))
        deviation = math.hypot(seen_error, self._miss_unseen * math.sqrt(unseen))
        return Estimate(scale * ratio, scale * deviation, self.is_known, 1 / leverage if leverage > 0 else math.inf)

    def seconds_by_last_fit(self, sizes: Sequence[float]) -> float:
        """The same duration by what was known when somebody last asked for an estimate: cheap, and a little old."""
        scale, shares = self._shares(sizes)
        return scale * float(np.dot(shares, self._factors))

    def observe(self, sizes: Sequence[float], seconds: float) -> None:
        """Learns that something of these sizes took so long. What is no duration (negative, not a number), or is one of
        nothing, is ignored."""
        scale, shares = self._shares(sizes)
        if seconds >= 0 and scale > 0:
            self._samples.append((shares, min(_RATIO_MAX, min(seconds, SECONDS_MAX) / scale)))
            self._n_samples += 1
            self._is_fitted = False

    def _shares(self, sizes: Sequence[float]) -> tuple[float, list[float]]:
        """What the start says of these sizes, in seconds, and which part of that each size has."""
        # Written so that what is not a number counts as 0.
        costs = [
            cost * (min(size, SIZE_MAX) if size > 0 else 0.0) for cost, size in zip(self._start, sizes, strict=True)
        ]
        scale = math.fsum(costs)
        return scale, [cost / scale if scale > 0 else 0.0 for cost in costs]

    def _fit(self) -> None:
        if self._is_fitted:
            return
        self._is_fitted = True
        shares = np.array([shares for shares, _ in self._samples])
        ratios = np.array([ratio for _, ratio in self._samples])
        ages = _KEEP ** np.arange(len(ratios) - 1, -1, -1, dtype=np.float64)
        levels, trust = np.maximum(ratios, max(np.median(ratios), _RATIO_MIN)), np.ones(len(ratios))
        for _ in range(_ROUNDS):
            self._factors = _non_negative_fit(shares, ratios, ages * trust / levels**2)
            predicted = shares @ self._factors
            levels = np.maximum(predicted, np.maximum(ratios / 20, _RATIO_MIN))
            misses = np.abs(ratios - predicted) / levels
            # The deviation of a normal distribution from its median absolute error.
            self._miss = max(_MISS_MIN, 1.4826 * _weighted_median(misses, ages))
            trust = np.minimum(1.0, _HUBER * self._miss / np.maximum(misses, _MISS_MIN))
        self._information = (shares * ages[:, None]).T @ shares + _START_EVIDENCE * np.eye(len(self._start))


def _non_negative_fit(shares: Floats, ratios: Floats, weights: Floats) -> Floats:
    """The factors of the weighted least squares with a little weight on 1, [k]. A factor that would be negative is 0,
    and the others are fitted without it."""
    n_factors = shares.shape[1]
    weights = weights / weights.mean()
    matrix = (shares * weights[:, None]).T @ shares + _START_WEIGHT * np.eye(n_factors)
    vector = shares.T @ (weights * ratios) + _START_WEIGHT
    kept = np.arange(n_factors)
    while True:
        fitted = np.linalg.solve(matrix[np.ix_(kept, kept)], vector[kept])
        if fitted.min() >= 0 or len(kept) == 1:
            break
        kept = np.delete(kept, fitted.argmin())
    factors = np.zeros(n_factors)
    factors[kept] = np.maximum(0.0, fitted)
    return factors


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    upto = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(upto, upto[-1] / 2)]])
