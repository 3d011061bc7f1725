"""Which agents own which partitions of the directory: consistent hashing, as an immutable snapshot.

Every agent has `virtual_nodes` points on a circle of 2**64 positions, the partitions lie at equal distances on it, and
a partition is owned by the first `replicas` distinct agents clockwise. The result depends on nothing but the set of
members and the two numbers, so agents that know the same members agree without talking.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvpeer.model import AGENT_ID_BYTES, N_PARTITIONS, AgentId, LocalProtocolError

__all__ = ["EPOCH_BYTES", "REPLICAS", "VIRTUAL_NODES", "Ring"]

EPOCH_BYTES = 16

REPLICAS = 2
"""Owners of each record: one may be late or gone without losing what it knows."""

VIRTUAL_NODES = 160
"""Points of an agent on the circle: its share of the partitions then varies by about a tenth."""

_CACHED_AGENTS_MAX = 4096
"""Agents whose points are remembered (160 points are 1.3 kB); beyond, they are computed again."""

_POINT_DOMAIN = b"kvpeer point 1"
_EPOCH_DOMAIN = b"kvpeer epoch 1"
"""blake2b's `person` (16 bytes at most): points and epochs of another version never equal these."""

_PARTITION_POINTS = np.arange(N_PARTITIONS, dtype=np.uint64) * np.uint64((1 << 64) // N_PARTITIONS)


class Ring:
    """The assignment of partitions under one set of members. Immutable; safe to share between threads.

    Attributes:
        members: the agent ids, sorted. Owner indices refer to it.
        epoch: 16 bytes, equal exactly for equal members, replicas and virtual nodes.
        replicas: owners of a partition, where there are that many members.
    """

    __slots__ = ("_index", "_owners", "epoch", "members", "replicas")

    def __init__(self, members: tuple[AgentId, ...], epoch: bytes, owners: npt.NDArray[np.int32]) -> None:
        """Use `Ring.build`. `owners`: [N_PARTITIONS, replicas], becomes the ring's own and read-only."""
        owners.setflags(write=False)
        self.members = members
        self.epoch = epoch
        self.replicas: int = owners.shape[1]
        self._owners = owners
        self._index = {member: idx for idx, member in enumerate(members)}

    def __repr__(self) -> str:
        return f"<Ring {self.epoch.hex()[:8]}: {len(self.members)} members, {self.replicas} replicas>"

    @classmethod
    def build(cls, members: Collection[AgentId], replicas: int = REPLICAS, virtual_nodes: int = VIRTUAL_NODES) -> Ring:
        """Returns the ring of these members, in whatever order they come and however often.

        O(members * virtual_nodes * log); about 2 ms for 64 members whose points are remembered.

        Raises:
            LocalProtocolError: an id is not 16 bytes, or one of the numbers is less than 1.
        """
        if replicas < 1 or virtual_nodes < 1:
            raise LocalProtocolError(f"a ring needs replicas and virtual nodes, not {replicas} and {virtual_nodes}")
        ordered = tuple(sorted(set(members)))
        for member in ordered:
            if len(member) != AGENT_ID_BYTES:
                raise LocalProtocolError(f"an agent id is {AGENT_ID_BYTES} bytes, not {len(member)}")
        owners = _assign(ordered, replicas, virtual_nodes)
        return cls(ordered, _epoch(ordered, replicas, virtual_nodes), owners)

    def owners(self, partitions: npt.NDArray[np.uint16]) -> npt.NDArray[np.int32]:
        """Returns the owners of each partition, [n, replicas] indices into `members`; -1 where members are too few.

        The order of a row is the order clockwise: the first is asked first.
        """
        return self._owners[partitions]

    def owned_by(self, agent: AgentId) -> npt.NDArray[np.bool_]:
        """Returns which of the `N_PARTITIONS` partitions the agent owns; none when it is not a member."""
        idx = self._index.get(agent)
        if idx is None:
            return np.zeros(N_PARTITIONS, dtype=np.bool_)
        owned: npt.NDArray[np.bool_] = (self._owners == idx).any(axis=1)
        return owned


def _assign(members: tuple[AgentId, ...], replicas: int, virtual_nodes: int) -> npt.NDArray[np.int32]:
    owners = np.full((N_PARTITIONS, replicas), -1, dtype=np.int32)
    if not members:
        return owners
    points = np.concatenate([_points(member, virtual_nodes) for member in members])
    point_members = np.repeat(np.arange(len(members), dtype=np.int32), virtual_nodes)
    clockwise = np.lexsort((point_members, points))
    point_members = point_members[clockwise]
    cursor = np.searchsorted(points[clockwise], _PARTITION_POINTS)
    for replica in range(min(replicas, len(members))):
        chosen = owners[:, :replica]
        candidates = point_members[cursor % len(points)]
        while (taken := (chosen == candidates[:, None]).any(axis=1)).any():
            cursor[taken] += 1
            candidates = point_members[cursor % len(points)]
        owners[:, replica] = candidates
    return owners


@lru_cache(maxsize=_CACHED_AGENTS_MAX)
def _points(member: AgentId, virtual_nodes: int) -> npt.NDArray[np.uint64]:
    packed = b"".join(
        hashlib.blake2b(member + node.to_bytes(4, "big"), digest_size=8, person=_POINT_DOMAIN).digest()
        for node in range(virtual_nodes)
    )
    return np.frombuffer(packed, dtype=">u8").astype(np.uint64)


def _epoch(members: tuple[AgentId, ...], replicas: int, virtual_nodes: int) -> bytes:
    digest = hashlib.blake2b(digest_size=EPOCH_BYTES, person=_EPOCH_DOMAIN)
    digest.update(replicas.to_bytes(4, "big") + virtual_nodes.to_bytes(4, "big"))
    for member in members:
        digest.update(member)
    return digest.digest()
