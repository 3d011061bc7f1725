"""What a locate found, kept for a while: the fetch of the same pages follows within milliseconds, from each rank.

Between the two, producers come and go and locations turn out bad; `LocatedPages.holding` says what is left of an answer
at the moment of a pull.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpeer.core.chain import take_keys
from kvpeer.core.locate import LocateResult
from kvpeer.core.negative import NegativeCache
from kvpeer.core.sources import Holding
from kvpeer.model import KEY_BYTES, AgentId, LocalProtocolError

__all__ = ["REMEMBERED_MAX", "REMEMBERED_S", "LocatedPages", "RecentLocations"]

REMEMBERED_MAX = 512
"""Requests whose locations are kept: more than an engine has waiting at a time."""

REMEMBERED_S = 10.0
"""For this long locations are worth trying without asking again."""


@dataclass(frozen=True, slots=True, eq=False)
class LocatedPages:
    """What is known of the places of some pages. `positions` i64 [n], ascending: their indices in the chain."""

    positions: NDArray[np.int64]
    keys: bytes
    result: LocateResult
    expires: float

    def covers(self, positions: NDArray[np.int64], keys: bytes) -> NDArray[np.intp] | None:
        """Where these pages are among ours, [m]; None when one of them is missing, or is another page by now."""
        places = np.searchsorted(self.positions, positions)
        if len(places) and (places[-1] >= len(self.positions) or (self.positions[places] != positions).any()):
            return None
        ours = np.frombuffer(self.keys, dtype=np.uint8).reshape(-1, KEY_BYTES)[places]
        return places if ours.tobytes() == keys else None

    def holding(
        self,
        positions: NDArray[np.int64],
        keys: bytes,
        is_usable: Callable[[AgentId], bool],
        negative: NegativeCache,
        in_flight: Mapping[AgentId, int],
        now: float,
    ) -> Holding:
        """Who holds which of these pages and may be asked; pages by indices into `positions`.

        `is_usable`: whether an agent is alive and not avoided. `in_flight`: requests that agents have in flight.

        Raises:
            LocalProtocolError: the pages are not covered.
        """
        places = self.covers(positions, keys)
        if places is None:
            raise LocalProtocolError(f"{len(positions)} pages were asked for that were not all located")
        result = self.result
        first = np.concatenate(([0], np.cumsum(result.counts, dtype=np.int64)))
        counts = result.counts[places]
        per_holder = np.repeat(np.arange(len(places)), counts)
        # The holders of a page lie one after another: the place of each among them is its place in ours, moved.
        moved = first[places] - np.cumsum(counts, dtype=np.int64) + counts
        holders = result.holders[np.arange(len(per_holder)) + moved[per_holder]]
        return Holding(
            counts,
            holders,
            result.agents,
            usable=np.array([is_usable(agent) for agent in result.agents], dtype=np.bool_),
            failed=negative.has_locations(take_keys(keys, per_holder), holders, b"".join(result.agents), now),
            in_flight=np.array([in_flight.get(agent, 0) for agent in result.agents], dtype=np.int64),
        )


class RecentLocations:
    """The located pages of the latest REMEMBERED_MAX requests, by request id. Not thread-safe."""

    def __init__(self) -> None:
        self._by_request: OrderedDict[str, LocatedPages] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_request)

    def remember(self, request: str, located: LocatedPages) -> None:
        """Keeps this as the newest; requests without an id are not kept."""
        if not request:
            return
        self._by_request[request] = located
        self._by_request.move_to_end(request)
        while len(self._by_request) > REMEMBERED_MAX:
            self._by_request.popitem(last=False)

    def recall(self, request: str, positions: NDArray[np.int64], keys: bytes, now: float) -> LocatedPages | None:
        """What was found for this request a moment ago, if it covers these pages."""
        located = self._by_request.get(request)
        if located is None or located.expires < now or located.covers(positions, keys) is None:
            return None
        return located
