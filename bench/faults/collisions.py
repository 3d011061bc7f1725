"""Faults by which engines with different bytes for equal tokens get each other's pages, or lose their own to them."""

from __future__ import annotations

import functools

from faults.fault import SMALL_PAGES, Fault, Observation, finds, publish_all, read_until_right
from faults.protocol import Identity
from faults.system import System

__all__ = ["FAULTS"]

PAGES = list(range(8))
OWN_S_MAX = 10.0
"""For an engine to read back what it published itself."""

BASE = Identity(cp_size=2)
OTHERS = {
    "model": (Identity("model-b", cp_size=2), "another model (name and weights) of the same shape"),
    "dtype": (Identity(dtype="float16", cp_size=2), "the same model with float16 for bfloat16"),
    "tensor parallel": (Identity(tp_size=2, cp_size=2), "rank 0 of the same model on two ranks"),
    "context parallel": (Identity(cp_rank=1, cp_size=2), "the other context-parallel rank of the same engine"),
}


def _collision(other: Identity, system: System) -> Observation:
    one, same, two = system.start(3, SMALL_PAGES, [BASE, BASE, other])
    publish_all(one, PAGES)
    finds(same, PAGES)
    control = read_until_right(same, PAGES, OWN_S_MAX)
    n_found, read = two.engine.ask("probe", PAGES)
    publish_all(two, PAGES)
    n_own = read_until_right(two, PAGES, OWN_S_MAX).n_right
    n_lost = len(PAGES) - n_own
    text = f"{n_found} of {len(PAGES)} listed for it, {read.n_wrong} read with the other's bytes; "
    text += f"after it published its own, {n_own} read right"
    return Observation(read.n_wrong > 0 or n_lost > 0 if control.n_right else None, text)


FAULTS = [
    Fault(
        f"{name} collision",
        f"An engine publishes {len(PAGES)} pages; {what} looks for the same tokens, then publishes its own",
        functools.partial(_collision, identity),
    )
    for name, (identity, what) in OTHERS.items()
]
