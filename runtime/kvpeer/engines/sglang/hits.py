"""How much of a prompt can be restored when some pools have only some of its pages. Pure.

A *stop* is a number of leading pages after which a prompt can go on: every pool has what it needs there. Pools with
states of a window (SWA, Mamba) have them at few places, so 5 pages may be a stop where 4 and 3 are not.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["leading", "stops_with_all_pages", "stops_with_trailing_pages"]

Presence = npt.NDArray[np.bool_]


def leading(present: Presence) -> int:
    """Returns how many pages are present before the first that is not."""
    missing = np.flatnonzero(~present)
    return int(missing[0]) if len(missing) else len(present)


def stops_with_all_pages(present: Presence) -> Presence:
    """Returns for 0 to n pages whether a pool that needs every page of a prefix can stop there, bool [n + 1]."""
    return np.arange(len(present) + 1) <= leading(present)


def stops_with_trailing_pages(present: Presence, window: int) -> Presence:
    """The same for a pool that needs the last `window` pages of a prefix, or all of a shorter one."""
    counts = np.concatenate([[0], np.cumsum(present)])
    stops = np.arange(len(present) + 1)
    starts = np.maximum(0, stops - max(1, window))
    complete: Presence = counts[stops] - counts[starts] == stops - starts
    return complete
