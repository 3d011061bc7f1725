"""What the scheduler side remembers of a request, and what it offers to load for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpeer.core.chain import Chain, ChainSlice
from kvpeer.core.policy import Decision
from kvpeer.engines.vllm.lanes import Lane

__all__ = ["NO_OFFER", "Offer", "Tracked"]


@dataclass(frozen=True)
class Offer:
    """Pages to load: these, in this lane, within this time; so many of the first ones come out of the own pool."""

    chain: ChainSlice
    n_own_pool: int
    timeout_s: float
    lane: Lane
    decision: Decision | None = None
    n_reloads: int = 0


@dataclass
class Tracked:
    """A request from its arrival to its end. An *attempt* is the time between two preemptions, numbered by the
    request."""

    request: Any
    chain: Chain
    offer: Offer | None = None
    decided_attempt: int = -1
    """The attempt at which the decision was counted: vLLM asks again as long as the request cannot be scheduled."""
    offered_attempt: int = -1
    """The attempt at which vLLM accepted a load."""
    allocated_attempt: int = -1
    """The attempt at which the request got blocks: while it is the present one, the request holds them."""
    n_settled: int | None = None
    """Pages before this one were offered; None until the request is scheduled, which tells where computing starts."""
    has_copies: bool = False
    """Whether copies from the present blocks may still be running. Never while a load is: that comes before anything of
    the attempt is computed."""
    is_tainted: bool = False
    """Holds blocks from before a reset: what is computed on top of them is not published."""

    @property
    def holds_blocks(self) -> bool:
        return self.allocated_attempt == int(self.request.num_preemptions)


NO_OFFER = Offer(ChainSlice(0, b"", b""), n_own_pool=0, timeout_s=0.0, lane=Lane.RELOAD)
