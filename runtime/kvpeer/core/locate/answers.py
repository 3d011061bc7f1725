"""What owners answered: checked, and collected into the holders of a batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpeer.model import AGENT_ID_BYTES, HOLDER_DTYPE, HOLDERS_MAX, AgentId, LookupStatus, RemoteProtocolError
from kvpeer.wire.messages import Holders
from kvpeer.wire.packing import unpack_holders

__all__ = ["AGENTS_PER_ANSWER_MAX", "Answers", "checked"]

AGENTS_PER_ANSWER_MAX = 1024
"""Different producers in one answer: as many as a cluster has members."""


class Answers:
    """The holders found so far. Agent ids are interned: `agents` is this batch's own table."""

    def __init__(self, n: int) -> None:
        self.agents: dict[AgentId, int] = {}
        self._counts = np.zeros(n, dtype=np.uint8)
        self._keys: list[npt.NDArray[np.uint32]] = []
        self._holders: list[npt.NDArray[np.void]] = []

    def add(
        self,
        indices: npt.NDArray[np.uint32],
        counts: npt.NDArray[np.uint8],
        holders: npt.NDArray[np.void],
        agents: bytes,
        awaited: npt.NDArray[np.bool_],
        self_id: AgentId,
    ) -> npt.NDArray[np.uint8]:
        """Takes the holders of awaited keys; returns how many each key got, [n].

        What the directory says of this agent itself is dropped: its own pool knows better, and it does not have the
        page.
        """
        ids = [AgentId(agents[at : at + AGENT_ID_BYTES]) for at in range(0, len(agents), AGENT_ID_BYTES)]
        interned = np.array([self.agents.setdefault(agent_id, len(self.agents)) for agent_id in ids], dtype=np.uint32)
        holders = holders.copy()  # the message's bytes are read-only
        if self_id in ids or not awaited.all():
            is_self = np.array([agent_id == self_id for agent_id in ids], dtype=np.bool_)
            places = np.arange(len(indices)).repeat(counts)
            keep = awaited[places] & ~is_self[holders["agent"]]
            holders = holders[keep]
            counts = np.bincount(places[keep], minlength=len(indices)).astype(np.uint8)
        holders["agent"] = interned[holders["agent"]]
        self._counts[indices] += counts
        self._keys.append(indices.repeat(counts))
        self._holders.append(holders)
        return counts

    def in_key_order(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.void]]:
        """(counts [n], holders of all keys, key after key)."""
        if not self._holders:
            return self._counts, np.zeros(0, dtype=HOLDER_DTYPE)
        order = np.concatenate(self._keys).argsort(kind="stable")
        return self._counts, np.concatenate(self._holders)[order]


def checked(message: Holders, n: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[np.void]]:
    """The columns of the answer to a Lookup of n keys.

    Raises:
        RemoteProtocolError: they do not fit the ask or each other.
    """
    statuses, counts, holders = unpack_holders(message, n)
    if n and int(counts.max()) > HOLDERS_MAX:
        raise RemoteProtocolError(f"counts: {int(counts.max())} holders of one key are beyond {HOLDERS_MAX}")
    if len(message.agents) > AGENTS_PER_ANSWER_MAX * AGENT_ID_BYTES:
        raise RemoteProtocolError(f"agents: {len(message.agents)} bytes are more than {AGENTS_PER_ANSWER_MAX} ids")
    if statuses.any():  # not all known
        if int(statuses.max()) > LookupStatus.UNSURE:
            raise RemoteProtocolError(f"statuses: {int(statuses.max())} is not a status of a lookup")
        if counts[statuses != LookupStatus.KNOWN].any():
            raise RemoteProtocolError("counts: holders of a key whose status is not `known`")
    return statuses, counts, holders
