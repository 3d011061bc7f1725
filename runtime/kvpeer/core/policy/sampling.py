"""Choosing one of several equally good sources: at random in effect, and always the same for the same request.

Each source draws a lot that is a function of the request's id and its own; the smallest one wins with a probability
proportional to the weight 1 / (1 + waiting). All ranks and retries of a request agree without talking, readers of a
popular prefix spread over its holders instead of all running to the best one, and when a source goes away only its own
requests choose anew (weighted rendezvous hashing).
"""

from __future__ import annotations

import hashlib
import math

__all__ = ["lot"]


def lot(request: str, source: bytes, n_waiting: int) -> float:
    """The source's lot for this request; the smallest wins. Exponentially distributed with rate 1 / (1 + n_waiting)."""
    digest = hashlib.blake2b(request.encode(), key=source, digest_size=8).digest()
    uniform = (int.from_bytes(digest, "big") + 1) / (2**64 + 1)
    return -math.log(uniform) * (1 + max(0, n_waiting))
