"""What a fault is, what came of trying it, and the steps that most of them take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from faults.protocol import CALL_PAGES_MAX, Read
from faults.system import Node, Shape, System, eventually

__all__ = ["EIGHT_PAGES", "SMALL_PAGES", "Fault", "Observation", "finds", "publish_all", "read_until_right"]

EIGHT_PAGES = Shape(128 << 10, 8)
SMALL_PAGES = Shape(16 << 10, 64)
"""Pools of 1 MiB, the smallest that kvpeer has, so that eviction is quick to force."""

SHARED_S_MAX = 20.0
"""For pages to be published and found while everybody lives. PeerCache needs up to 6 s after a node joined."""


@dataclass(frozen=True)
class Observation:
    """is_shown: whether the fault showed, judged by what was counted; None if it could not be tried. text: what was
    seen, with numbers."""

    is_shown: bool | None
    text: str


@dataclass(frozen=True)
class Fault:
    """A fault and how to try it. done: what is done, for the table."""

    name: str
    done: str
    run: Callable[[System], Observation]


def publish_all(node: Node, numbers: Sequence[int]) -> None:
    """Returns when the node's system says that it has all these pages."""
    for start in range(0, len(numbers), CALL_PAGES_MAX):
        batch = list(numbers[start : start + CALL_PAGES_MAX])
        eventually(
            lambda batch=batch: node.engine.ask("publish", batch) == len(batch), SHARED_S_MAX, "all pages are published"
        )


def finds(node: Node, numbers: Sequence[int]) -> None:
    """Returns when this node is told that all these pages are there."""
    wanted = list(numbers)
    eventually(lambda: node.engine.ask("exist", wanted)[0] == len(wanted), SHARED_S_MAX, "all pages are found")


def read_until_right(node: Node, numbers: Sequence[int], seconds_max: float) -> Read:
    """The last of the reads that are made until all pages come right, or the time is over."""
    deadline = time.monotonic() + seconds_max
    while True:
        last: Read = node.engine.ask("read", list(numbers))
        if last.n_right == len(numbers) or time.monotonic() > deadline:
            return last
        time.sleep(0.2)
