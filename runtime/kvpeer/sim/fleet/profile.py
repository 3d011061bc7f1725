"""What an engine and a pull cost: fitted to published curves by the policy's own fit, or computed from the hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpeer.core.policy import Calibration, Fit
from kvpeer.model import LocalProtocolError
from kvpeer.sim.fleet.published import PeerCurve

__all__ = ["EngineProfile", "LinkProfile", "fitted"]

HBM_BYTES_PER_S = 4.8e12
"""H200, from its data sheet. What a decode reads comes from there; nothing is taken off for efficiency."""

PCIE_BYTES_PER_S = 63e9
"""PCI Express 5.0 with 16 lanes, what the standard gives in one direction: a reload from the host to the device."""

STEP_TOKENS = 8192
"""vLLM's budget of a step for a server on a GPU of this size, unless it is set otherwise."""

PAGE_TOKENS = 64
"""The block size of the published fleets."""

RUNNING_MAX = 256
"""vLLM's default of `max_num_seqs` at the time; in none of the experiments it is what limits."""

FIT_ROUNDS = 9
"""How often the few rows of a curve are shown to a fit, which gives older samples less weight: as often as it keeps."""


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """An engine's costs and memory.

    A request takes `request_s` before it gets to the engine: what it takes however short it is. A step takes the
    longer of reading all weights and computing all tokens, and so much for each pair of tokens of which one attends to
    the other, and for each cached token that a decode reads.
    """

    kv_bytes_per_token: int
    request_s: float
    prefill_s_per_token: float
    prefill_s_per_pair: float
    weight_bytes: float = 0.0
    memory_bytes_per_s: float = HBM_BYTES_PER_S
    device_tokens: int = 1_000_000
    host_tokens: int = 1_000_000
    step_tokens: int = STEP_TOKENS
    page_tokens: int = PAGE_TOKENS
    running_max: int = RUNNING_MAX

    def __post_init__(self) -> None:
        if min(self.kv_bytes_per_token, self.step_tokens, self.page_tokens, self.running_max) < 1:
            raise LocalProtocolError("an engine needs bytes of a token, tokens of a step and of a page, and requests")

    def step_duration_s(self, n_tokens: int, n_pairs: float, n_read_tokens: float) -> float:
        """How long a step takes that computes so many tokens, attending to so many pairs, and whose decodes read so
        many cached tokens."""
        return (
            max(self.weight_bytes / self.memory_bytes_per_s, n_tokens * self.prefill_s_per_token)
            + n_pairs * self.prefill_s_per_pair
            + n_read_tokens * self.kv_bytes_per_token / self.memory_bytes_per_s
        )

    def prefill_s(self, n_tokens: int, n_context: int) -> float:
        """How long the steps of an idle engine take that compute a prompt's rest behind cached tokens."""
        seconds = 0.0
        for first in range(0, n_tokens, self.step_tokens):
            n_step = min(self.step_tokens, n_tokens - first)
            seconds += self.step_duration_s(n_step, n_step * (n_context + first + n_step / 2), 0)
        return seconds

    def reload_s(self, n_tokens: int) -> float:
        """How long it takes to copy so many tokens from the host to the device."""
        return n_tokens * self.kv_bytes_per_token / PCIE_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """What a pull between idle engines takes.

    by_engines: the published fleets. Peers talk in their engines' scheduling loops, so that each message waits for the
    end of a step, and who names a source knows how many requests wait at it. Without, agents of their own serve pulls:
    only the reading engine looks up between steps, and knows its own pulls alone.
    """

    floor_s: float
    s_per_byte: float
    by_engines: bool = False


def fitted(curve: PeerCurve, without_row: int | None = None) -> tuple[EngineProfile, LinkProfile]:
    """The engine and the link that a published curve describes, less one row of it if so asked.

    Both curves are times to first token of a whole request. So what any request takes, and computing the last page,
    which is always computed, are taken off the pulls.
    """
    rows = [row for row in range(len(curve.tokens)) if row != without_row]
    n_tokens = [curve.tokens[row] for row in rows]
    start = Calibration()
    request_s, per_token_s, per_pair_s = _fit(
        (start.step_s, start.prefill_s_per_token, start.prefill_s_per_pair),
        [(1, n, n * n / 2) for n in n_tokens],
        [curve.recompute_ms[row] / 1e3 for row in rows],
    )
    engine = EngineProfile(curve.kv_bytes_per_token, request_s, per_token_s, per_pair_s)
    pulled_tokens = [n - PAGE_TOKENS for n in n_tokens]
    floor_s, per_byte_s = _fit(
        (start.pull_floor_s, start.pull_s_per_byte),
        [(1, n * curve.kv_bytes_per_token) for n in pulled_tokens],
        [
            curve.pull_ms[row] / 1e3 - engine.request_s - engine.prefill_s(PAGE_TOKENS, n)
            for row, n in zip(rows, pulled_tokens, strict=True)
        ],
    )
    return engine, LinkProfile(floor_s, per_byte_s)


def _fit(start: Sequence[float], sizes: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    fit = Fit(start)
    for _ in range(FIT_ROUNDS):
        for sizes_of_row, seconds_of_row in zip(sizes, seconds, strict=True):
            fit.observe(sizes_of_row, seconds_of_row)
    return fit.costs
