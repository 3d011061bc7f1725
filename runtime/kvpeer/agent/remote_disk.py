"""Pages on the disks of peers: asks their agents to bring them into their pools, and says where they lie then."""

from __future__ import annotations

import asyncio

import numpy as np
from numpy.typing import NDArray

from kvpeer.agent.directory import PeerRequests
from kvpeer.agent.promotions import PROMOTE_PAGES_MAX
from kvpeer.core.chain import take_keys
from kvpeer.model import KEY_BYTES, AgentId, KvPeerError, Outcome, RemoteProtocolError, Tier
from kvpeer.wire.messages import Promote, Promoted
from kvpeer.wire.packing import U1, U4, unpack

__all__ = ["RemoteDisks"]

ANSWER_MARGIN_S = 0.01
"""The answer is expected this much after the time that the producer was given: a round trip and its event loop."""


class RemoteDisks:
    """The reader's side of `Promote`. Belongs to one event loop."""

    def __init__(self, links: PeerRequests) -> None:
        self._links = links

    async def promote(
        self, producer: AgentId, keys: bytes, holders: NDArray[np.void], left_s: float
    ) -> tuple[NDArray[np.uint8], NDArray[np.void]]:
        """Outcomes u8 [n], and the holders (HOLDER_DTYPE [n]) with the locations in the producer's pool where the
        outcome is HIT. Answers within `left_s` seconds; of a producer that does not, all is a TIMEOUT."""
        outcomes, moved = np.full(len(holders), Outcome.TIMEOUT, dtype=np.uint8), holders.copy()
        starts = range(0, len(holders), PROMOTE_PAGES_MAX)
        parts = [np.arange(start, min(start + PROMOTE_PAGES_MAX, len(holders))) for start in starts]
        asked = (self._ask(producer, take_keys(keys, part), left_s) for part in parts)
        for part, answer in zip(parts, await asyncio.gather(*asked), strict=True):
            if answer is not None:
                outcomes[part], moved["slot"][part], moved["generation"][part] = answer
                moved["tier"][part] = Tier.HOST
        return outcomes, moved

    async def _ask(
        self, producer: AgentId, keys: bytes, left_s: float
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint32], NDArray[np.uint32]] | None:
        """Outcomes, slots and generations; None without an answer that fits."""
        wait_ms = max(0, int((left_s - ANSWER_MARGIN_S) * 1000))
        try:
            answer = await self._links.request(producer, Promote(keys, wait_ms), max(0.001, left_s))
            return _unpacked(answer, len(keys) // KEY_BYTES)
        except KvPeerError:
            return None


def _unpacked(answer: object, n: int) -> tuple[NDArray[np.uint8], NDArray[np.uint32], NDArray[np.uint32]]:
    if not isinstance(answer, Promoted):
        raise RemoteProtocolError(f"a Promote was answered with {type(answer).__name__}")
    outcomes = unpack(answer.outcomes, U1, n, "outcomes")
    if n and int(outcomes.max()) > max(Outcome):
        raise RemoteProtocolError(f"outcomes: {int(outcomes.max())} is none")
    return outcomes, unpack(answer.slots, U4, n, "slots"), unpack(answer.generations, U4, n, "generations")
