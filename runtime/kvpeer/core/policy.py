"""Whether to reload pages from the own pool, to pull pages from peers, or to do neither: one pure function.

The engine's own (local) hit comes first and costs nothing. Pages in the own pool come next: a reload is always allowed.
A pull takes time that recomputing might beat, so it has to lengthen the usable prefix by at least
`min_cached_token_delta` tokens beyond both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvpeer.core.reasons import DecisionReason
from kvpeer.model import ConfigError, LocalProtocolError

__all__ = [
    "Action",
    "Decision",
    "Located",
    "Mode",
    "PolicySettings",
    "RequestFacts",
    "decide",
    "located_tokens",
    "pull_wait_s",
]


class Mode(str, Enum):
    """Whether pulls are made at all. Reloads from the own pool do not depend on it."""

    OFF = "off"
    ON = "on"


class Action(str, Enum):
    NONE = "none"
    RELOAD = "reload"
    PULL = "pull"


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What is known of a request. `page_tokens`: tokens in a page.

    Raises:
        LocalProtocolError: a number is out of range.
    """

    request: str
    prompt_tokens: int
    page_tokens: int

    def __post_init__(self) -> None:
        if self.prompt_tokens < 0 or self.page_tokens < 1:
            raise LocalProtocolError(
                f"request {self.request!r}: a prompt of {self.prompt_tokens} tokens in pages of {self.page_tokens}"
            )


@dataclass(frozen=True, slots=True)
class Located:
    """How far the prompt's prefix reaches, in tokens from its beginning: `resident_tokens` with the engine's own pages
    and those of the own pool, `reachable_tokens` with those of peers as well."""

    resident_tokens: int
    reachable_tokens: int


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """When a pull is worth it and how long it may take.

    Raises:
        ConfigError: a value makes no sense; the message names it.
    """

    mode: Mode = Mode.OFF
    min_cached_token_delta: int = 512
    """Tokens by which a pull must lengthen the prefix. A cautious fixed floor, as long as nothing measures what a pull
    and a recompute cost here."""
    pull_base_s: float = 0.05
    """Granted to every pull: locating, connecting, queueing."""
    pull_s_per_token: float = 0.0005
    """Granted for each pulled token: twice what a slow prefill of 4,000 tokens a second needs to recompute it."""
    max_pull_wait_s: float = 5.0
    """No pull may take longer, however long the prompt. 0 allows none."""

    def __post_init__(self) -> None:
        if self.min_cached_token_delta < 1:
            raise ConfigError(f"policy.min_cached_token_delta must be at least 1, not {self.min_cached_token_delta}")
        for name in ("pull_base_s", "pull_s_per_token", "max_pull_wait_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"policy.{name} must be a number of at least 0, not {value}")


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do. `n_tokens` beyond the engine's own tokens are to be made available, `wait_s` at most is to be waited
    for pulled pages (0 unless a pull). `reason` says why not more."""

    action: Action
    n_tokens: int
    wait_s: float
    reason: DecisionReason


def decide(
    request: RequestFacts,
    local_tokens: int,
    located: Located,
    settings: PolicySettings,
    *,
    can_reload: bool = True,
    can_pull: bool = True,
) -> Decision:
    """The decision for one request whose engine has the first `local_tokens` tokens itself.

    can_reload, can_pull: whether one more would be begun soon; what would have to queue for long is computed instead.

    At least one token of the prompt is always left to compute, because the engine needs its logits; so whole pages up
    to `prompt_tokens - 1` count. More pages at peers never make the decision bring fewer tokens. (More pages in the own
    pool can: what is left to pull may then not be worth a pull.)
    """
    usable_tokens = _whole_pages(request.prompt_tokens - 1, request.page_tokens)
    resident_tokens = max(min(located.resident_tokens, usable_tokens), local_tokens)
    reachable_tokens = max(min(located.reachable_tokens, usable_tokens), resident_tokens)
    gain_tokens = reachable_tokens - resident_tokens
    wait_s = pull_wait_s(gain_tokens, settings)
    refusal = _pull_refusal(gain_tokens, wait_s, settings)
    if refusal is None and not can_pull:
        refusal = DecisionReason.BUSY
    if refusal is None:
        return Decision(Action.PULL, reachable_tokens - local_tokens, wait_s, DecisionReason.PULL)
    if resident_tokens > local_tokens:
        if not can_reload:
            return Decision(Action.NONE, 0, 0.0, DecisionReason.BUSY)
        reason = DecisionReason.RELOAD if refusal is DecisionReason.NOTHING_FOUND else refusal
        return Decision(Action.RELOAD, resident_tokens - local_tokens, 0.0, reason)
    if refusal is DecisionReason.NOTHING_FOUND and local_tokens >= usable_tokens:
        refusal = DecisionReason.LOCAL_HIT
    return Decision(Action.NONE, 0, 0.0, refusal)


def pull_wait_s(n_tokens: int, settings: PolicySettings) -> float:
    """How long a pull of this many tokens may take. The place where a model of costs belongs once there is one."""
    return min(settings.max_pull_wait_s, settings.pull_base_s + settings.pull_s_per_token * n_tokens)


def located_tokens(statuses: npt.NDArray[np.uint8], local_tokens: int, page_tokens: int) -> Located:
    """What the statuses of a locate (0 miss, 1 own pool, 2 at peers) mean in tokens. `statuses` are of the pages that
    follow the `local_tokens` (whole pages); what lies behind the first miss is of no use."""
    n_resident, n_reachable = _n_leading(statuses == 1), _n_leading(statuses != 0)
    return Located(local_tokens + n_resident * page_tokens, local_tokens + n_reachable * page_tokens)


def _pull_refusal(gain_tokens: int, wait_s: float, settings: PolicySettings) -> DecisionReason | None:
    if gain_tokens <= 0:
        return DecisionReason.NOTHING_FOUND
    if settings.mode is Mode.OFF:
        return DecisionReason.MODE_OFF
    if gain_tokens < settings.min_cached_token_delta:
        return DecisionReason.BELOW_FLOOR
    return DecisionReason.NO_TIME if wait_s <= 0 else None


def _whole_pages(n_tokens: int, page_tokens: int) -> int:
    return max(0, n_tokens) // page_tokens * page_tokens


def _n_leading(mask: npt.NDArray[np.bool_]) -> int:
    """How many of the first elements are all true."""
    return len(mask) if mask.all() else int(mask.argmin())
