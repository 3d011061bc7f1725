"""From whom pages may be pulled now: what is known of producers, and what a pull learns of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpeer.core.breaker import Breakers
from kvpeer.core.located import LocatedPages
from kvpeer.core.negative import NegativeCache
from kvpeer.core.sources import Holding
from kvpeer.core.view import ClusterView
from kvpeer.model import KEY_BYTES, AgentId

__all__ = ["Producers"]


@dataclass(frozen=True, slots=True, eq=False)
class Producers:
    """Not thread-safe. `breakers`: of the producers that pages are pulled from. `negative`: where a fetch failed a
    moment ago. `in_flight`: how many fetches from each producer are under way."""

    view: ClusterView
    breakers: Breakers
    negative: NegativeCache
    in_flight: Mapping[AgentId, int]

    def may_ask(self, producer: AgentId, now: float) -> bool:
        """Whether pages may be pulled from this agent: it is alive, and its breaker lets a fetch through."""
        return self.view.info(producer) is not None and self.breakers.is_usable(producer, now)

    def lot_name(self, request: str, keys: bytes) -> str:
        """What lots are drawn for: the request, or, where the engine names none, this agent and the first of the packed
        keys. With one name for all of them, all readers would draw the same holder."""
        return request or f"{self.view.own_id.hex()} {keys[:KEY_BYTES].hex()}"

    def holding(
        self,
        located: LocatedPages,
        positions: npt.NDArray[np.int64],
        keys: bytes,
        now: float,
        avoided: Collection[AgentId] = (),
    ) -> Holding:
        """Who holds which of these located pages and may be asked, but for `avoided`; pages by indices into
        `positions`."""

        def is_usable(agent: AgentId) -> bool:
            return agent not in avoided and self.may_ask(agent, now)

        return located.holding(positions, keys, is_usable, self.negative, self.in_flight, now)

    def remember_failed(self, producer: AgentId, keys: bytes, holders: npt.NDArray[np.void], now: float) -> None:
        """Nobody pulls these pages from there for a while: [n] packed keys and holders of this producer."""
        locations = holders.copy()
        locations["agent"] = 0
        self.negative.add_locations(keys, locations, producer, now)
