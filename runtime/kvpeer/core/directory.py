"""One owner's shard of the directory: who holds which pages, and how far the answers can be trusted.

Each producer is the only writer of its own entries. Its stream is ordered (see `directory_stream`), so an old message
never undoes a newer one and replicas need no agreement. What the shard may have missed shows as a gap in the numbers:
the ops behind a gap are taken, because they are the producer's newest, and all of its partitions count as unconfirmed
until they are repaired or their digests are found equal. Every answer to a producer names its unconfirmed partitions,
so that a lost answer heals with the next one.

A key without a holder is a miss only in a partition that this shard owns and that every living producer has confirmed;
elsewhere the answer is unsure. Entries of producers that are not alive are void at once and freed later, in slices.

A partition that is full shares its room between the producers (see `directory_table`); what it keeps out, or drops, is
not asked for again before there is room (see `full_partitions`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpeer.core.directory_stream import (
    LOOKUP_KEYS_MAX,
    OpColumns,
    unpack_apply,
    unpack_entries,
    unpack_keys,
    unpack_stale,
)
from kvpeer.core.directory_table import ApplyResult, DirectoryTable, DirectoryTableStats, Op
from kvpeer.core.full_partitions import FullPartitions
from kvpeer.core.ring import Ring
from kvpeer.model import N_PARTITIONS, AgentId, CapacityError, LookupStatus, PeerUnavailableError
from kvpeer.wire import packing
from kvpeer.wire.messages import (
    Applied,
    Apply,
    Digests,
    DigestsChecked,
    Holders,
    Lookup,
    Repair,
    StaleReport,
    Synced,
)

__all__ = [
    "AGENTS_MAX",
    "ANSWER_HOLDERS_MAX",
    "PREVIOUS_OWNER_S",
    "DirectoryShard",
    "DirectoryTable",
    "ShardCounters",
]

AGENTS_MAX = 4096
"""Producers at a time, living ones and those whose entries are still being freed. 8 kB each for what they confirmed."""

ANSWER_HOLDERS_MAX = 131_072
"""Holders in one answer (2.6 MB, within a frame). Beyond, each key lists fewer of its holders, never none."""

PREVIOUS_OWNER_S = 10.0
"""How long a partition stays readable after this shard lost it: readers ask the previous owner meanwhile, because the
new one may still wait for repairs."""

_Flags = npt.NDArray[np.bool_]


_KNOWN, _MISS, _UNSURE = (np.uint8(status) for status in LookupStatus)


@dataclass(slots=True)
class ShardCounters:
    """What happened since the start; only ever grows."""

    n_gaps: int = 0
    n_old_messages: int = 0
    n_stale_removed: int = 0
    n_rejected: int = 0


@dataclass(slots=True)
class _Producer:
    """A living producer. `confirmed`: partitions in which the shard has all that it holds, but for what limits keep
    out."""

    idx: int
    next_sequence: int = 0
    confirmed: _Flags = field(default_factory=lambda: np.zeros(N_PARTITIONS, dtype=np.bool_))


@dataclass(slots=True)
class _Sweep:
    """The entries of an ended producer, freed up to `next_partition`. Its index is not used again before the end."""

    idx: int
    next_partition: int = 0


class DirectoryShard:
    """The records that agent `own_id` keeps for the partitions it owns. Not thread-safe; no call blocks.

    Messages of agents that are not alive members are refused with PeerUnavailableError: they may send again once
    membership knows them, and what an ended one left in a socket cannot come back to life.
    """

    def __init__(self, own_id: AgentId, table: DirectoryTable, agents_max: int = AGENTS_MAX) -> None:
        """The table is empty and from now on the shard's own."""
        self.own_id = own_id
        self.counters = ShardCounters()
        self._table = table
        self._producers: dict[AgentId, _Producer] = {}
        self._without_index: set[AgentId] = set()
        self._ids = [AgentId(b"")] * agents_max
        self._free_indices = list(range(agents_max - 1, -1, -1))
        self._alive = np.zeros(agents_max, dtype=np.uint8)
        self._sweeps: deque[_Sweep] = deque()
        self._owned = np.zeros(N_PARTITIONS, dtype=np.bool_)
        self._synced: _Flags | None = None
        self._held = np.zeros(N_PARTITIONS, dtype=np.bool_)
        self._full = FullPartitions(table)
        self._drop_at = np.full(N_PARTITIONS, np.inf)

    # ---- readers ---------------------------------------------------------------------------------------------------

    def lookup(self, message: Lookup) -> Holders:
        """Returns the living holders of each key, and what it means where there are none.

        Raises:
            RemoteProtocolError: the message's columns do not fit together, or it has more than LOOKUP_KEYS_MAX keys.
        """
        keys = unpack_keys(message.keys, LOOKUP_KEYS_MAX)
        partitions = packing.unpack_partitions(message.partitions, len(keys))
        counts, holders = self._table.lookup(keys, partitions, self._alive)
        statuses = np.where(counts > 0, _KNOWN, np.where(self._synced_partitions()[partitions], _MISS, _UNSURE))
        counts, holders = _trim(counts, holders)
        named = np.bincount(holders["agent"]) > 0
        holders["agent"] = (np.cumsum(named) - 1)[holders["agent"]]
        return Holders(
            statuses=statuses.tobytes(),
            counts=counts.tobytes(),
            agents=b"".join(self._ids[idx] for idx in np.flatnonzero(named).tolist()),
            holders=holders.tobytes(),
        )

    def stale(self, message: StaleReport) -> None:
        """Removes the locations that a reader found stale, each only if slot and generation are the reported ones.

        Nothing is remembered: the producer's word counts more. If it still holds the page there, its stream or the next
        comparison of digests puts the entry back, in a full partition too.

        Raises:
            RemoteProtocolError: the message's columns do not fit together.
        """
        reported = unpack_stale(message)
        producer = self._producers.get(AgentId(message.producer))
        if producer is not None:
            removed = self._apply_ops(producer, reported) == ApplyResult.APPLIED
            self._full.admit(producer.idx, reported.partitions[removed])
            self.counters.n_stale_removed += int(removed.sum())

    # ---- producers -------------------------------------------------------------------------------------------------

    def apply(self, producer: AgentId, message: Apply) -> Applied:
        """Applies the part of the message that is new.

        Raises:
            RemoteProtocolError: the message's columns do not fit together.
            PeerUnavailableError: the producer is not an alive member here, or not yet.
            CapacityError: there are more than AGENTS_MAX producers.
        """
        ops = unpack_apply(message)
        state = self._alive_producer(producer)
        n_old = self._accept(state, message.sequence, len(ops))
        if n_old < len(ops):
            self._apply_ops(state, ops.select(slice(n_old, None)))
        return self._applied(state)

    def repair(self, producer: AgentId, message: Repair) -> Applied:
        """Makes the message's entries all that the shard has of the producer in this partition.

        Raises:
            RemoteProtocolError, PeerUnavailableError, CapacityError: as `apply`.
        """
        entries = unpack_entries(message)
        state = self._alive_producer(producer)
        if self._accept(state, message.sequence, 1) == 0:
            partition = np.array([message.partition], dtype=np.uint16)
            n_before = self._count(state, partition)
            self._full.admit(state.idx, partition)
            self._table.replace(state.idx, message.partition, *entries)
            n_after = self._count(state, partition)
            if n_after < n_before:
                self._full.freed(partition)
            if n_after < len(entries[0]):
                self._full.keep_out(state.idx, partition)
            self._full.note_dropped()
            self._held[partition] = True
            self._confirm(state, partition)
        return self._applied(state)

    def synced(self, producer: AgentId, message: Synced) -> Applied:
        """Confirms that the producer holds nothing in these partitions, and forgets what the shard still has there.

        Raises:
            RemoteProtocolError, PeerUnavailableError, CapacityError: as `apply`.
        """
        partitions = _partitions_of(message.partitions)
        state = self._alive_producer(producer)
        if self._accept(state, message.sequence, 1) == 0:
            _, counts = self._table.digests(state.idx, partitions)
            for partition in partitions[counts > 0].tolist():
                self._table.sweep(state.idx, partition, 1)
            self._full.freed(partitions[counts > 0])
            self._full.admit(state.idx, partitions)
            self._confirm(state, partitions)
        return self._applied(state)

    def digests(self, producer: AgentId, message: Digests) -> DigestsChecked:
        """Compares, confirms what is equal, and names what differs and should be repaired.

        Partitions in which a limit keeps entries of the producer out are never equal; they are not repaired over and
        over, but only once there was room again.

        Raises:
            RemoteProtocolError, PeerUnavailableError, CapacityError: as `apply`.
        """
        partitions = _partitions_of(message.partitions)
        given_digests = packing.unpack(message.digests, packing.U8, len(partitions), "digests")
        given_counts = packing.unpack(message.counts, packing.U4, len(partitions), "counts")
        state = self._alive_producer(producer)
        digests, counts = self._table.digests(state.idx, partitions)
        equal = (digests == given_digests) & (counts == given_counts)
        self._full.admit(state.idx, partitions[equal])
        settled = equal | self._full.keeps_out(state.idx, partitions)
        self._confirm(state, partitions[settled])
        state.confirmed[partitions[~settled]] = False
        self._synced = None
        return DigestsChecked(partitions[~settled].tobytes())

    # ---- members and time ------------------------------------------------------------------------------------------

    def members_changed(self, ring: Ring, alive: Collection[AgentId]) -> None:
        """Takes over and gives up partitions as the ring says, and voids the entries of producers that are not alive.

        `alive`: every agent that may publish, this one included. Gained partitions are unsure until every one of
        them has confirmed them. Lost ones stay readable for PREVIOUS_OWNER_S.
        """
        owned = ring.owned_by(self.own_id)
        lost = self._owned & ~owned
        for agent in [agent for agent in self._producers if agent not in alive]:
            ended = self._producers.pop(agent)
            self._alive[ended.idx] = 0
            self._sweeps.append(_Sweep(ended.idx))
        for state in self._producers.values():
            state.confirmed[lost] = False
        self._owned = owned
        self._drop_at[owned] = np.inf
        self._without_index = {agent for agent in alive if agent not in self._producers}
        self._give_indices()
        self._synced = None

    def sweep(self, n_partitions: int, now: float) -> bool:
        """Frees what is no longer needed in at most `n_partitions` steps; returns whether there is more to do now.

        To be called at least every few seconds: the time of lost partitions runs from the first call after the loss.
        """
        waiting = self._held & ~self._owned
        self._drop_at[waiting & np.isinf(self._drop_at)] = now + PREVIOUS_OWNER_S
        for partition in np.flatnonzero(waiting & (self._drop_at <= now))[:n_partitions].tolist():
            self._drop(partition)
            n_partitions -= 1
        while n_partitions > 0 and self._sweeps:
            sweep = self._sweeps[0]
            n = min(n_partitions, N_PARTITIONS - sweep.next_partition)
            if self._table.sweep(sweep.idx, sweep.next_partition, n):
                self._full.freed(np.arange(sweep.next_partition, sweep.next_partition + n, dtype=np.uint16))
            sweep.next_partition += n
            n_partitions -= n
            if sweep.next_partition == N_PARTITIONS:
                self._sweeps.popleft()
                self._full.forget(sweep.idx)
                self._free_indices.append(sweep.idx)
                self._give_indices()
        return bool(self._sweeps) or n_partitions == 0

    def stats(self) -> DirectoryTableStats:
        """Returns the sizes of the table."""
        return self._table.stats()

    def n_unsure_partitions(self) -> int:
        """Returns how many partitions of this shard not every living producer has confirmed."""
        return int((self._owned & ~self._synced_partitions()).sum())

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _alive_producer(self, agent: AgentId) -> _Producer:
        state = self._producers.get(agent)
        if state is not None:
            return state
        if agent in self._without_index:
            raise CapacityError(
                f"agent {agent.hex()}: {len(self._ids)} producers are known here, and more are not served"
            )
        raise PeerUnavailableError(f"agent {agent.hex()} is not an alive member here: send again once it is")

    def _give_indices(self) -> None:
        while self._free_indices and self._without_index:
            agent = min(self._without_index)
            self._without_index.remove(agent)
            idx = self._free_indices.pop()
            self._ids[idx] = agent
            self._alive[idx] = 1
            self._producers[agent] = _Producer(idx)
            self._synced = None

    def _accept(self, state: _Producer, sequence: int, n: int) -> int:
        """Returns how many of n numbers from `sequence` on are old, and expects what follows them."""
        if sequence > state.next_sequence:
            self.counters.n_gaps += 1
            state.confirmed[:] = False
            self._full.admit(state.idx, slice(None))
            self._synced = None
        n_old = min(n, max(0, state.next_sequence - sequence))
        if n_old:
            self.counters.n_old_messages += 1
        state.next_sequence = max(state.next_sequence, sequence + n)
        return n_old

    def _apply_ops(self, state: _Producer, ops: OpColumns) -> npt.NDArray[np.uint8]:
        results = self._table.apply(state.idx, *ops.columns())
        self._held[ops.partitions] = True
        self._full.withdrawn(state.idx, ops.partitions[(ops.ops == Op.REMOVE) & (results == ApplyResult.APPLIED)])
        rejected = ops.partitions[results >= ApplyResult.FULL]
        self._full.keep_out(state.idx, rejected)
        self._full.note_dropped()
        self.counters.n_rejected += len(rejected)
        return results

    def _applied(self, state: _Producer) -> Applied:
        unconfirmed = np.flatnonzero(self._owned & ~state.confirmed).astype(np.uint16)
        return Applied(state.next_sequence, unconfirmed.tobytes())

    def _confirm(self, state: _Producer, partitions: npt.NDArray[np.uint16]) -> None:
        state.confirmed[partitions] = True
        # What is not owned yet is dropped, like records, when this shard does not become the owner soon.
        self._held[partitions[~self._owned[partitions]]] = True
        self._synced = None

    def _count(self, state: _Producer, partition: npt.NDArray[np.uint16]) -> int:
        return int(self._table.digests(state.idx, partition)[1][0])

    def _drop(self, partition: int) -> None:
        self._table.drop_partition(partition)
        self._full.freed(np.array([partition], dtype=np.uint16))
        self._held[partition] = False
        self._drop_at[partition] = np.inf
        for state in self._producers.values():
            state.confirmed[partition] = False

    def _synced_partitions(self) -> _Flags:
        """Partitions whose misses are misses; computed when something changed."""
        if self._synced is None:
            self._synced = self._owned.copy()
            if self._without_index:
                self._synced[:] = False
            for state in self._producers.values():
                self._synced &= state.confirmed
        return self._synced


def _partitions_of(column: bytes) -> npt.NDArray[np.uint16]:
    return packing.unpack_partitions(column, packing.count(column, packing.U2.itemsize, "partitions"))


def _trim(counts: npt.NDArray[np.uint8], holders: npt.NDArray[Any]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]:
    """Returns the answer with so few holders a key that all of it stays within ANSWER_HOLDERS_MAX."""
    if len(holders) <= ANSWER_HOLDERS_MAX:
        return counts, holders
    per_key_max = ANSWER_HOLDERS_MAX // len(counts)
    rank = np.arange(len(holders)) - np.repeat(np.cumsum(counts, dtype=np.int64) - counts, counts)
    return np.minimum(counts, per_key_max).astype(np.uint8), holders[rank < per_key_max]
