"""Whom to ask for each key of a batch, in order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpeer.core.ring import Ring
from kvpeer.model import AgentId

__all__ = ["PREVIOUS_RING_S", "Candidates", "LocateRings"]

PREVIOUS_RING_S = 10.0
"""How long after an epoch change the previous ring's owners are asked as well: by then the new owners are repaired."""

_NOBODY = -2
"""Index of an agent that is no member: equal to no owner, nor to the -1 of a missing one."""


@dataclass(frozen=True, slots=True, eq=False)
class LocateRings:
    """Whom to ask: the current ring, the one before it (None, or when it ended more than PREVIOUS_RING_S ago), this
    agent's id, and agents to leave alone (breaker open)."""

    current: Ring
    previous: Ring | None
    self_id: AgentId
    avoided: Collection[AgentId] = ()


class Candidates:
    """Whom to ask for each key, in order. Agents are numbered: members of the current ring first, as the ring does.

    The first owners are all that most batches need, so that the rest is worked out only when a key moves on.
    """

    def __init__(self, partitions: npt.NDArray[np.uint16], rings: LocateRings) -> None:
        self._partitions = partitions
        self._rings = rings
        self._agents: Sequence[AgentId] = rings.current.members
        place = bisect_left(rings.current.members, rings.self_id)
        is_member = place < len(rings.current.members) and rings.current.members[place] == rings.self_id
        self._self_idx = place if is_member else _NOBODY
        self._all: npt.NDArray[np.int32] | None = None
        if rings.avoided or not rings.current.members:
            self._all = self._in_order()

    def agent(self, idx: int) -> AgentId:
        return self._agents[idx]

    def next_of(self, indices: npt.NDArray[np.intp], n_tried: npt.NDArray[np.intp]) -> npt.NDArray[np.int32]:
        """The owner to ask next for each key of which `n_tried` were asked; -1 where there is no further one."""
        if self._all is None:
            if not n_tried.any():
                ring_owners = self._rings.current.owners(self._partitions[indices])
                is_own = (ring_owners == self._self_idx).any(axis=1)
                firsts: npt.NDArray[np.int32] = np.where(is_own, np.int32(self._self_idx), ring_owners[:, 0])
                return firsts
            self._all = self._in_order()
        n_columns = self._all.shape[1]
        owners: npt.NDArray[np.int32] = self._all[indices, np.minimum(n_tried, n_columns - 1)]
        owners[n_tried >= n_columns] = -1
        return owners

    def _in_order(self) -> npt.NDArray[np.int32]:
        """[n, columns] agents without repeats and avoided ones, then -1."""
        current, previous = self._rings.current, self._rings.previous
        table = {agent_id: idx for idx, agent_id in enumerate(current.members)}
        candidates = current.owners(self._partitions)
        if previous is not None:
            numbers = [table.setdefault(member, len(table)) for member in previous.members]
            numbers.append(-1)  # what index -1 of the ring's owners picks
            later = np.array(numbers, dtype=np.int32)[previous.owners(self._partitions)]
            candidates = np.concatenate([candidates, later], axis=1)
        self._agents = list(table)
        for column in range(1, candidates.shape[1]):
            is_repeat = (candidates[:, :column] == candidates[:, column, None]).any(axis=1)
            candidates[is_repeat, column] = -1
        avoided = [table[agent_id] for agent_id in self._rings.avoided if agent_id in table]
        candidates[np.isin(candidates, avoided)] = -1
        # The own shard costs no message. As an owner of the previous ring only, it is no better than another.
        precedence = np.where(candidates < 0, 2, 1)
        precedence[:, : current.replicas][candidates[:, : current.replicas] == self._self_idx] = 0
        order = precedence.argsort(axis=1, kind="stable")
        ordered: npt.NDArray[np.int32] = np.take_along_axis(candidates, order, axis=1)
        return ordered
