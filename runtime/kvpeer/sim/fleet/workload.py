"""What clients ask of a fleet: requests that share prefixes, at the rates of stages, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from kvpeer.core.reasons import DecisionReason
from kvpeer.model import LocalProtocolError

__all__ = ["Outcome", "Request", "SharedPrefixes"]


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of a prefix that others may have too and of a question of its own; so many tokens are generated."""

    name: str
    prefix: str
    prefix_tokens: int
    question_tokens: int
    output_tokens: int
    arrived_at: float

    def __post_init__(self) -> None:
        if self.prefix_tokens < 0 or self.question_tokens < 0 or self.prompt_tokens < 1 or self.output_tokens < 1:
            raise LocalProtocolError(f"request {self.name!r} has no prompt or generates nothing")

    @property
    def prompt_tokens(self) -> int:
        return self.prefix_tokens + self.question_tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request that ended. Of its prompt, `local_tokens` were on the engine's device, `reloaded_tokens` came from its
    own host pool, `pulled_tokens` from a peer, and the rest was computed. `reason`: of the policy's last decision."""

    request: Request
    engine: int
    reason: DecisionReason
    local_tokens: int
    reloaded_tokens: int
    pulled_tokens: int
    first_token_at: float
    ended_at: float

    @property
    def computed_tokens(self) -> int:
        return self.request.prompt_tokens - self.local_tokens - self.reloaded_tokens - self.pulled_tokens

    @property
    def first_token_s(self) -> float:
        return self.first_token_at - self.request.arrived_at

    @property
    def latency_s(self) -> float:
        return self.ended_at - self.request.arrived_at


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """A pool of prefixes, drawn with equal chances for each request."""

    n_prefixes: int
    prefix_tokens: int
    question_tokens: int
    output_tokens: int

    def stage(self, stage: int, begins_at: float, per_s: float, duration_s: float, rng: Random) -> list[Request]:
        """Requests at a constant rate."""
        return [
            Request(
                f"{stage}/{idx}",
                f"prefix {rng.randrange(self.n_prefixes)}",
                self.prefix_tokens,
                self.question_tokens,
                self.output_tokens,
                begins_at + idx / per_s,
            )
            for idx in range(round(per_s * duration_s))
        ]
