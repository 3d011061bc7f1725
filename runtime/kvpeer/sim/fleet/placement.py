"""Which engine a request goes to: models of the published routers' scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol, TypeVar

from kvpeer.sim.fleet.cache import PrefixCache
from kvpeer.sim.fleet.workload import Request

__all__ = ["Placement", "by_load", "by_prefix"]

QUEUE_WEIGHT, DEVICE_WEIGHT, PREFIX_WEIGHT = 2.0, 2.0, 3.0
"""The scorers of the published `epp-affinity`: prefix 3, queue 2, use of the device 2, and the highest sum is taken."""

LOAD_QUEUE_WEIGHT = 3.0
"""Of the published `epp-load`: queue 3, use of the device 2, and an engine is drawn in proportion to the sum."""


class Endpoint(Protocol):
    """An engine, as a router sees it. The published routers see it as it was up to 50 ms ago; here it is as it is."""

    @property
    def n_waiting(self) -> int: ...
    @property
    def device_use(self) -> float: ...
    @property
    def device(self) -> PrefixCache: ...


E = TypeVar("E", bound=Endpoint)

Placement = Callable[[Request, Sequence[E], Random], E]


def by_load(_: Request, engines: Sequence[E], rng: Random) -> E:
    """An engine drawn in proportion to how little it has to do."""
    queues = _queue_scores(engines)
    scores = [
        LOAD_QUEUE_WEIGHT * queue + DEVICE_WEIGHT * (1 - engine.device_use)
        for queue, engine in zip(queues, engines, strict=True)
    ]
    if sum(scores) <= 0:
        return rng.choice(engines)
    return rng.choices(engines, scores)[0]


def by_prefix(request: Request, engines: Sequence[E], rng: Random) -> E:
    """The engine that has most of the prefix, unless others have much less to do."""
    queues = _queue_scores(engines)

    def score(idx: int) -> tuple[float, float]:
        engine = engines[idx]
        has = engine.device.tokens(request.prefix) / request.prompt_tokens
        return PREFIX_WEIGHT * has + QUEUE_WEIGHT * queues[idx] + DEVICE_WEIGHT * (1 - engine.device_use), rng.random()

    return engines[max(range(len(engines)), key=score)]


def _queue_scores(engines: Sequence[Endpoint]) -> list[float]:
    """1 for the shortest queue, 0 for the longest; 1 for all where they are equal."""
    queues = [engine.n_waiting for engine in engines]
    least, most = min(queues), max(queues)
    return [1.0 if most == least else (most - n_waiting) / (most - least) for n_waiting in queues]
