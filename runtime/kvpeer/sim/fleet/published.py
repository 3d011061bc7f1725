"""What others measured and published of pulls between peers: what the simulated fleet is fitted to and compared with.

Source of all: llm-d, "P2P KV Cache Sharing" (its blog of 2026-08-15, the guide's benchmark results, and the measurement
record behind them), on H200 GPUs. Numbers are theirs, unrounded.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "CURVES",
    "GLM",
    "GPT_OSS",
    "GPT_OSS_EARLIER",
    "GPT_OSS_EARLIER_POOL",
    "GPT_OSS_POOL",
    "LLAMA",
    "LLAMA_POOL",
    "PeerCurve",
    "PoolRow",
    "PublishedPool",
]


@dataclass(frozen=True, slots=True)
class PeerCurve:
    """Time to first token of one request on an idle pair of engines, by the length of its prefix: computed, and pulled
    from a peer. `break_even`: what they say of where both are equal."""

    model: str
    kv_bytes_per_token: int
    tokens: tuple[int, ...]
    recompute_ms: tuple[float, ...]
    pull_ms: tuple[float, ...]
    break_even: str


GPT_OSS = PeerCurve(
    "gpt-oss-120b",
    41_500,
    (2_048, 8_192, 16_384, 32_768, 49_152),
    (78, 250, 510, 1_173, 1_988),
    (35, 57, 86, 165, 235),
    "below 2,048",
)

GPT_OSS_EARLIER = PeerCurve(
    "gpt-oss-120b, earlier stack",
    41_500,
    (2_048, 8_192, 16_384, 32_768, 49_152),
    (70.6, 205.4, 426.3, 983, 1_695),
    (49, 120.1, 196.2, 376.3, 550.5),
    "below 2,048",
)

GLM = PeerCurve(
    "GLM-5.2-FP8",
    92_600,
    (4_096, 8_192, 12_288, 16_384, 24_576),
    (672.2, 1_067.8, 1_708.5, 2_148.3, 3_338.0),
    (1_262.2, 1_170.6, 1_241.0, 1_268.9, 1_315.3),
    "around 8,700",
)

LLAMA = PeerCurve(
    "Llama-3.1-8B",
    131_072,  # 32 layers, 8 heads of 128, keys and values, 2 bytes
    (1_024, 4_096, 8_192, 16_384),
    (30, 99, 236, 503),
    (34, 59, 88, 155),
    "around 2,000",
)

CURVES = (GPT_OSS, GPT_OSS_EARLIER, GLM, LLAMA)


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One stage: offered and completed requests a second, and the median time to the last token, None where it was not
    published."""

    offered_per_s: float
    achieved_per_s: float | None
    latency_s_p50: float


@dataclass(frozen=True, slots=True)
class PublishedPool:
    """A pool of shared prefixes on one fleet, by offered rate: without and with pulls; and what the text makes of them,
    in percent: the median at the rate `median_at_per_s`, the ceiling of requests, the peak of tokens if it says so."""

    without: tuple[PoolRow, ...]
    pulls: tuple[PoolRow, ...]
    median_at_per_s: float
    median_percent: float
    ceiling_percent: float
    peak_tokens_percent: float | None = None


LLAMA_POOL = PublishedPool(
    without=(
        PoolRow(2, None, 0.94),
        PoolRow(4, None, 1.12),
        PoolRow(6, None, 1.53),
        PoolRow(8, None, 2.49),
        PoolRow(12, 9.9, 12.2),
        PoolRow(16, 10.3, 21.3),
        PoolRow(20, 10.1, 34.3),
        PoolRow(24, 10.4, 44.1),
    ),
    pulls=(
        PoolRow(2, None, 0.93),
        PoolRow(4, None, 0.93),
        PoolRow(6, None, 1.07),
        PoolRow(8, None, 1.41),
        PoolRow(12, 11.6, 2.1),
        PoolRow(16, 12.6, 7.8),
        PoolRow(20, 11.6, 24.6),
        PoolRow(24, 11.3, 36.4),
    ),
    median_at_per_s=8,
    median_percent=-43,
    ceiling_percent=22,
    peak_tokens_percent=32,
)

GPT_OSS_EARLIER_POOL = PublishedPool(
    without=(
        PoolRow(4, 3.8, 4.2),
        PoolRow(8, 6.7, 6.5),
        PoolRow(12, 9.0, 24.9),
        PoolRow(16, 8.8, 37.3),
        PoolRow(20, 9.4, 48.8),
        PoolRow(24, 9.4, 63.5),
    ),
    pulls=(
        PoolRow(4, 3.9, 2.4),
        PoolRow(8, 7.7, 1.6),
        PoolRow(12, 11.4, 2.3),
        PoolRow(16, 15.1, 3.6),
        PoolRow(20, 15.4, 15.6),
        PoolRow(24, 16.7, 30.0),
    ),
    median_at_per_s=12,
    median_percent=-91,
    ceiling_percent=78,
    peak_tokens_percent=78,
)

GPT_OSS_POOL = PublishedPool(
    without=(
        PoolRow(6, 5.59, 5.6),
        PoolRow(12, 9.02, 26.2),
        PoolRow(18, 8.58, 45.7),
        PoolRow(24, 9.01, 63.4),
        PoolRow(30, 9.21, 81.2),
    ),
    pulls=(
        PoolRow(6, 5.96, 0.64),
        PoolRow(12, 11.49, 0.98),
        PoolRow(18, 17.46, 0.67),
        PoolRow(24, 21.93, 0.70),
        PoolRow(30, 29.19, 0.73),
    ),
    median_at_per_s=12,
    median_percent=-96,  # of the rows
    ceiling_percent=217,  # of the rows
)
