"""Whether to reload pages from the own pool, to pull pages from peers, or to do neither: one pure function.

The engine's own (local) hit comes first and costs nothing. Pages in the own pool come next: a reload is always allowed.
A pull takes time that recomputing might beat, so it has to lengthen the usable prefix by at least the floor beyond
both, and once the costs of both are known, recomputing has to take longer than the pull by the margin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpeer.core.policy.fit import Estimate
from kvpeer.core.policy.sampling import lot
from kvpeer.core.policy.settings import Mode, PolicySettings
from kvpeer.core.reasons import DecisionReason
from kvpeer.model import LocalProtocolError

__all__ = [
    "AUTO_FLOOR_TOKENS",
    "PREFIX_BAND_PAGES",
    "Action",
    "Candidate",
    "Costs",
    "Decision",
    "Estimates",
    "Load",
    "Located",
    "RequestFacts",
    "decide",
    "located_tokens",
    "pull_wait_s",
]

PREFIX_BAND_PAGES = 1
"""Producers whose prefix is at most this much shorter than the longest are as good: the last page is often just being
published."""

AUTO_FLOOR_TOKENS = 512
"""The floor of Auto as long as costs are not known."""


class Action(str, Enum):
    NONE = "none"
    RELOAD = "reload"
    PULL = "pull"


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What is known of a request. `page_tokens`: tokens in a page; `page_bytes`: its bytes, all ranks together.

    Raises:
        LocalProtocolError: a number is out of range.
    """

    request: str
    prompt_tokens: int
    page_tokens: int
    page_bytes: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 0 or self.page_tokens < 1 or self.page_bytes < 0:
            raise LocalProtocolError(
                f"request {self.request!r}: a prompt of {self.prompt_tokens} tokens in pages of {self.page_tokens} "
                f"tokens, {self.page_bytes} bytes"
            )


@dataclass(frozen=True, slots=True)
class Located:
    """How far the prompt's prefix reaches, in tokens from its beginning: `resident_tokens` with the engine's own pages
    and those of the own pool, `reachable_tokens` with those of peers as well."""

    resident_tokens: int
    reachable_tokens: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A producer that has pages beyond the resident ones: with its pages alone the prefix reaches `reachable_tokens`.

    n_in_flight: pulls from it that this engine has under way. n_waiting: how many wait for it in all, as far as anybody
    here knows. is_held_off: the guard turned it off. may_be_tried: nothing was pulled from it for so long that a pull
    may be made to see whether it pays by now.
    """

    producer: bytes
    reachable_tokens: int
    n_in_flight: int = 0
    n_waiting: int = 0
    is_held_off: bool = False
    may_be_tried: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """The engine's state. can_reload, can_pull: whether one more would be begun soon; what would have to queue for long
    is computed instead. is_held_off, may_try: what the engine's guard says. is_control: this request is to be computed,
    to learn how long that takes."""

    can_reload: bool = True
    can_pull: bool = True
    is_held_off: bool = False
    may_try: bool = False
    is_control: bool = False


class Costs(Protocol):
    """What a pull and a recompute of the same tokens would take."""

    def pull(self, producer: bytes, n_bytes: int, n_in_flight: int) -> Estimate: ...
    def prefill(self, n_tokens: int, n_context: int) -> Estimate: ...


@dataclass(frozen=True, slots=True)
class Estimates:
    """What pulling `n_tokens` would take, and computing them behind `n_context` others."""

    n_tokens: int
    n_context: int
    n_bytes: int
    pull: Estimate
    prefill: Estimate

    @property
    def are_known(self) -> bool:
        """Whether both rest on measurements."""
        return self.pull.is_known and self.prefill.is_known

    @property
    def saved_s(self) -> float:
        """What the pull would save, negative if it would lose time."""
        return self.prefill.seconds - self.pull.seconds


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do. `n_tokens` beyond the engine's own tokens are to be made available, `wait_s` at most is to be waited
    for pulled pages (0 unless a pull). `reason` says why not more. `producer`: the first to ask for what is pulled,
    empty if its name is not known. `estimates`: of the pull that was made or refused, None where there was none to
    think of or nothing is estimated."""

    action: Action
    n_tokens: int
    wait_s: float
    reason: DecisionReason
    producer: bytes = b""
    estimates: Estimates | None = None


def decide(
    request: RequestFacts,
    local_tokens: int,
    located: Located,
    settings: PolicySettings,
    candidates: Sequence[Candidate] = (),
    costs: Costs | None = None,
    load: Load | None = None,
) -> Decision:
    """The decision for one request whose engine has the first `local_tokens` tokens itself.

    candidates: whose pages are the reachable ones; without, they are of one producer whose name is not known.

    At least one token of the prompt is always left to compute, because the engine needs its logits; so whole pages up
    to `prompt_tokens - 1` count. More pages at peers never make the decision bring fewer tokens. (More pages in the own
    pool can: what is left to pull may then not be worth a pull.)
    """
    load = load or Load()
    usable_tokens = _whole_pages(request.prompt_tokens - 1, request.page_tokens)
    resident_tokens = max(min(located.resident_tokens, usable_tokens), local_tokens)
    reachable_tokens = max(min(located.reachable_tokens, usable_tokens), resident_tokens)
    prefix = _Prefix(local_tokens, resident_tokens, reachable_tokens)
    option = _best_option(request, prefix, settings, candidates, costs)
    estimates, reason = option.estimates, _final_reason(option.refusal, option.source, settings, load)
    if reason in _PULLS:
        n_tokens = option.reachable_tokens - local_tokens
        return Decision(Action.PULL, n_tokens, option.wait_s, reason, option.source.producer, estimates)
    if resident_tokens > local_tokens:
        if not load.can_reload:
            return Decision(Action.NONE, 0, 0.0, DecisionReason.BUSY)
        reason = DecisionReason.RELOAD if reason is DecisionReason.NOTHING_FOUND else reason
        return Decision(Action.RELOAD, resident_tokens - local_tokens, 0.0, reason, b"", estimates)
    if reason is DecisionReason.NOTHING_FOUND and local_tokens >= usable_tokens:
        reason = DecisionReason.LOCAL_HIT
    return Decision(Action.NONE, 0, 0.0, reason, b"", estimates)


def pull_wait_s(
    n_tokens: int, settings: PolicySettings, prefill: Estimate | None = None, *, n_reload_tokens: int = 0
) -> float:
    """How long a pull of this many tokens may take: no longer than computing them surely takes, where that is known.
    What is reloaded before them has time of its own."""
    granted_s = settings.pull_s_per_token * n_tokens
    if prefill is not None and prefill.is_known:
        granted_s = min(granted_s, prefill.seconds + 2 * prefill.deviation_s)
    granted_s += settings.pull_s_per_token * n_reload_tokens
    return min(settings.max_pull_wait_s, settings.pull_base_s + granted_s)


def located_tokens(statuses: npt.NDArray[np.uint8], local_tokens: int, page_tokens: int) -> Located:
    """What the statuses of a locate (0 miss, 1 own pool, 2 at peers) mean in tokens. `statuses` are of the pages that
    follow the `local_tokens` (whole pages); what lies behind the first miss is of no use."""
    n_resident, n_reachable = _n_leading(statuses == 1), _n_leading(statuses != 0)
    return Located(local_tokens + n_resident * page_tokens, local_tokens + n_reachable * page_tokens)


# ---- inside

_PULLS = frozenset({DecisionReason.PULL, DecisionReason.PROBE})


@dataclass(frozen=True, slots=True)
class _Prefix:
    """How far a prompt's prefix reaches, in usable tokens; each at least as far as the one before."""

    local_tokens: int
    resident_tokens: int
    reachable_tokens: int

    def up_to(self, candidates: Sequence[Candidate]) -> _Prefix:
        """With the pages of these producers only."""
        reach = max((each.reachable_tokens for each in candidates), default=0)
        return replace(self, reachable_tokens=max(self.resident_tokens, min(self.reachable_tokens, reach)))


@dataclass(frozen=True, slots=True)
class _Option:
    """A pull that might be made, and why it must not be."""

    source: Candidate
    reachable_tokens: int
    wait_s: float
    estimates: Estimates | None
    refusal: DecisionReason | None


def _best_option(
    request: RequestFacts,
    prefix: _Prefix,
    settings: PolicySettings,
    candidates: Sequence[Candidate],
    costs: Costs | None,
) -> _Option:
    """The pull from the source that is drawn, or, where that does not pay, from one of those that surely do."""
    option = _weigh(request, prefix, settings, candidates, costs)
    if option.refusal is not DecisionReason.NOT_WORTH_IT or option.source.may_be_tried:
        return option
    paying = [
        each
        for each in candidates
        if not each.is_held_off and _surely_pays(_weigh(request, prefix.up_to([each]), settings, [each], costs))
    ]
    second = _weigh(request, prefix.up_to(paying), settings, paying, costs)
    return second if _surely_pays(second) else option


def _surely_pays(option: _Option) -> bool:
    return option.refusal is None and option.estimates is not None and option.estimates.are_known


def _weigh(
    request: RequestFacts,
    prefix: _Prefix,
    settings: PolicySettings,
    candidates: Sequence[Candidate],
    costs: Costs | None,
) -> _Option:
    resident_tokens = prefix.resident_tokens
    source, reachable_tokens, refusal = _choose_source(
        request, candidates, resident_tokens, prefix.reachable_tokens, settings.pulls_per_source_max
    )
    gain_tokens = reachable_tokens - resident_tokens
    if settings.mode is Mode.OFF or gain_tokens < (settings.min_cached_token_delta or 1):
        costs = None  # they would not matter
    estimates = _estimate(request, source, resident_tokens, reachable_tokens, costs)
    prefill = estimates.prefill if estimates is not None else None
    wait_s = pull_wait_s(gain_tokens, settings, prefill, n_reload_tokens=resident_tokens - prefix.local_tokens)
    refusal = _floor_refusal(gain_tokens, wait_s, settings, estimates) or refusal or _cost_refusal(settings, estimates)
    return _Option(source, reachable_tokens, wait_s, estimates, refusal)


def _choose_source(
    request: RequestFacts,
    candidates: Sequence[Candidate],
    resident_tokens: int,
    reachable_tokens: int,
    in_flight_max: int,
) -> tuple[Candidate, int, DecisionReason | None]:
    """The source to ask first, how far the prefix reaches with it, and why it must not be pulled from.

    One of those with the longest prefix, within a band of a page. While some producer is left out, what only it has is
    out of reach.
    """
    having = [each for each in candidates if each.reachable_tokens > resident_tokens]
    if not having:
        return Candidate(b"", reachable_tokens), reachable_tokens, None
    trusted = [each for each in having if not each.is_held_off]
    free = [each for each in trusted if each.n_in_flight < in_flight_max]
    # Without those to be tried, a producer that was turned off would stay so as long as another one has a page.
    choosable = free + [each for each in having if each.is_held_off and each.may_be_tried] or trusted or having
    if len(choosable) < len(having):
        reachable_tokens = min(reachable_tokens, max(each.reachable_tokens for each in choosable))
    longest = min(max(each.reachable_tokens for each in choosable), reachable_tokens)
    band = [e for e in choosable if e.reachable_tokens + PREFIX_BAND_PAGES * request.page_tokens >= longest]
    chosen = min(band, key=lambda each: lot(request.request, each.producer, max(each.n_waiting, each.n_in_flight)))
    refusal = DecisionReason.SOURCE_BUSY if chosen.n_in_flight >= in_flight_max else None
    return chosen, reachable_tokens, DecisionReason.PAIR_GUARDED if chosen.is_held_off else refusal


def _estimate(
    request: RequestFacts, source: Candidate, resident_tokens: int, reachable_tokens: int, costs: Costs | None
) -> Estimates | None:
    n_tokens = reachable_tokens - resident_tokens
    if costs is None or n_tokens <= 0:
        return None
    n_bytes = n_tokens // request.page_tokens * request.page_bytes
    return Estimates(
        n_tokens,
        resident_tokens,
        n_bytes,
        costs.pull(source.producer, n_bytes, source.n_in_flight),
        costs.prefill(n_tokens, resident_tokens),
    )


def _floor_refusal(
    gain_tokens: int, wait_s: float, settings: PolicySettings, estimates: Estimates | None
) -> DecisionReason | None:
    """Why so many tokens are not pulled whatever the state of the engine and of producers."""
    if gain_tokens <= 0:
        return DecisionReason.NOTHING_FOUND
    if settings.mode is Mode.OFF:
        return DecisionReason.MODE_OFF
    floor_tokens = settings.min_cached_token_delta
    if floor_tokens is None:
        floor_tokens = 1 if estimates is not None and estimates.are_known else AUTO_FLOOR_TOKENS
    if gain_tokens < floor_tokens:
        return DecisionReason.BELOW_FLOOR
    return DecisionReason.NO_TIME if wait_s <= 0 else None


def _cost_refusal(settings: PolicySettings, estimates: Estimates | None) -> DecisionReason | None:
    if estimates is None or not estimates.are_known:
        return None
    pays = estimates.prefill.seconds > estimates.pull.seconds * (1 + settings.margin)
    return None if pays else DecisionReason.NOT_WORTH_IT


def _final_reason(
    refusal: DecisionReason | None, source: Candidate, settings: PolicySettings, load: Load
) -> DecisionReason:
    """The reason once the engine's state is looked at too; PULL or PROBE for a pull."""
    may_try = refusal in (DecisionReason.PAIR_GUARDED, DecisionReason.NOT_WORTH_IT) and source.may_be_tried
    if load.is_held_off and refusal in (None, DecisionReason.PAIR_GUARDED, DecisionReason.NOT_WORTH_IT):
        refusal, may_try = DecisionReason.ENGINE_GUARDED, load.may_try
    if not load.can_pull and (may_try or refusal in (None, DecisionReason.SOURCE_BUSY)):
        return DecisionReason.BUSY
    if refusal is not None and not may_try:
        return refusal
    if settings.mode is Mode.SHADOW:
        return refusal or DecisionReason.SHADOW
    if may_try:
        return DecisionReason.PROBE
    return DecisionReason.CONTROL if load.is_control else DecisionReason.PULL


def _whole_pages(n_tokens: int, page_tokens: int) -> int:
    return max(0, n_tokens) // page_tokens * page_tokens


def _n_leading(mask: npt.NDArray[np.bool_]) -> int:
    """How many of the first elements are all true."""
    return len(mask) if mask.all() else int(mask.argmin())
