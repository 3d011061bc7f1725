"""Faults that a dead or a frozen node causes at others."""

from __future__ import annotations

from faults.fault import EIGHT_PAGES, SMALL_PAGES, Fault, Observation, finds, publish_all, read_until_right
from faults.protocol import Read
from faults.system import BlockedError, System

__all__ = ["FAULTS"]

HEALED_S_MAX = 15.0

READ_S_MAX = 20.0
PROMPT_S_MAX = 5.0
"""A read of 1 MiB that takes longer holds up every later read of its rank; SGLang ends its own waits after seconds."""


def _poisoned_keys(system: System) -> Observation:
    heir, reader, owner = system.start(3, SMALL_PAGES)
    pages = list(range(SMALL_PAGES.n_pages))
    publish_all(owner, pages)
    finds(heir, pages)
    owner.kill()
    system.settle()
    n_listed, _ = heir.engine.ask("exist", pages)
    publish_all(heir, pages)
    n_right = read_until_right(reader, pages, HEALED_S_MAX).n_right
    text = f"{n_listed} of {len(pages)} still listed; published again elsewhere (all said to be stored), "
    return Observation(n_right < len(pages), f"{text}{n_right} can be read within {HEALED_S_MAX:g} s")


def _frozen_peer(system: System) -> Observation:
    reader, owner = system.start(2, EIGHT_PAGES)
    pages = list(range(EIGHT_PAGES.n_pages))
    publish_all(owner, pages)
    finds(reader, pages)
    with owner.frozen():
        try:
            read: Read = reader.engine.ask("read", pages, seconds_max=READ_S_MAX)
        except BlockedError:
            return Observation(True, f"the read still blocks after {READ_S_MAX:g} s")
    return Observation(
        read.seconds > PROMPT_S_MAX, f"the read returns after {read.seconds:.2f} s, {read.n_missed} missed"
    )


FAULTS = [
    Fault(
        "dead owner poisons keys",
        "The node that published 64 pages is killed; when the others have noticed, one of them publishes the same "
        "pages and a third reads them",
        _poisoned_keys,
    ),
    Fault(
        "frozen peer hangs a read",
        "A reader is told where 8 pages are; their node is stopped (SIGSTOP); the reader reads",
        _frozen_peer,
    ),
]
