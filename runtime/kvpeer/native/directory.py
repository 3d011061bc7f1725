"""`DirectoryTable`: the native table of records, behind the protocol of `kvpeer.core.directory_table`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpeer.model import HOLDER_DTYPE, HOLDERS_MAX, KEY_BYTES
from kvpeer.native._arrays import U1, U2, U4, U8, address, key_address, u1, u2, u4, u8
from kvpeer.native._errors import check
from kvpeer.native._handle import Handle
from kvpeer.native._library import DirectoryCounters, library

__all__ = ["DirectoryStats", "DirectoryTable"]


@dataclass(frozen=True, slots=True)
class DirectoryStats:
    """Sizes of a table; `bytes` is all memory that it holds. `full_rejections`: entries that a limit kept out;
    `dropped_holders`: entries that made room for others."""

    records: int
    holders: int
    bytes: int
    full_rejections: int
    dropped_holders: int


class DirectoryTable(Handle):
    """Records in 4,096 partitions; each record lists its holders. Not thread-safe. Arrays given are not kept.

    keys: u1 [n, 16]; partitions: u2 [n]; slots, generations, lengths: u4 [n]; ops, tiers: u1 [n].
    Every method raises LocalProtocolError for an array of another dtype, shape or order. A partition that has
    `partition_records_max` records is full: it refuses further ones, or, with `makes_room`, shares its room between the
    agents (see `kvpeer.core.directory_table`).

    Raises:
        CapacityError: memory is exhausted.
    """

    def __init__(self, partition_records_max: int, *, makes_room: bool) -> None:
        out = ctypes.c_void_p()
        code = library().kvp_dir_create(partition_records_max, makes_room, ctypes.byref(out))
        check(code, "create a directory table")
        super().__init__(out.value, library().kvp_dir_destroy)
        self.partition_records_max = partition_records_max

    def apply(
        self, agent: int, ops: U1, keys: U1, partitions: U2, slots: U4, generations: U4, lengths: U4, tiers: U1
    ) -> U1:
        """Applies one producer's ops in order and returns the result of each (u1 [n], enum kvp_dir_result).

        PUT replaces the agent's holder of the key; REMOVE takes it away if slot and generation are equal.
        """
        n = len(ops)
        results = np.empty(n, u1)
        code = library().kvp_dir_apply(
            self._pointer,
            agent,
            n,
            address("ops", ops, u1, n),
            key_address(keys, n),
            address("partitions", partitions, u2, n),
            *_entry_addresses(n, slots, generations, lengths, tiers),
            results.ctypes.data,
        )
        check(code, f"apply {n} operations of agent {agent}")
        return results

    def lookup(self, keys: U1, partitions: U2, alive: U1) -> tuple[U1, npt.NDArray[Any]]:
        """Returns the number of holders of each key (u1 [n]) and the holders one after another (`HOLDER_DTYPE`).

        Only holders whose `alive[agent]` is not zero count; agents beyond the array are dead.
        """
        n = len(partitions)
        counts = np.empty(n, u1)
        holders = np.empty(n * HOLDERS_MAX, HOLDER_DTYPE)
        n_holders = library().kvp_dir_lookup(
            self._pointer,
            n,
            key_address(keys, n),
            address("partitions", partitions, u2, n),
            address("alive", alive, u1, len(alive)),
            len(alive),
            counts.ctypes.data,
            holders.ctypes.data,
            len(holders),
        )
        check(n_holders, f"look {n} keys up")
        return counts, holders[:n_holders].copy()

    def digests(self, agent: int, partitions: U2) -> tuple[U8, U4]:
        """Returns digest (u8 [n]) and count (u4 [n]) of the agent's entries in each of these partitions."""
        n = len(partitions)
        digests, counts = np.empty(n, u8), np.empty(n, u4)
        code = library().kvp_dir_digests(
            self._pointer,
            agent,
            n,
            address("partitions", partitions, u2, n),
            digests.ctypes.data,
            counts.ctypes.data,
        )
        check(code, f"digest {n} partitions of agent {agent}")
        return digests, counts

    def dropped(self) -> tuple[U2, U2]:
        """Returns agent and partition (u2 [n]) of each entry that the latest `apply` or `replace` dropped."""
        n = check(library().kvp_dir_dropped(self._pointer, 0, None, None), "count the dropped entries")
        agents, partitions = np.empty(n, u2), np.empty(n, u2)
        library().kvp_dir_dropped(self._pointer, n, agents.ctypes.data, partitions.ctypes.data)
        return agents, partitions

    def n_records(self, partitions: U2) -> U4:
        """Returns how many records each of these partitions has (u4 [n])."""
        n = len(partitions)
        counts = np.empty(n, u4)
        code = library().kvp_dir_records(self._pointer, n, address("partitions", partitions, u2, n), counts.ctypes.data)
        check(code, f"count the records of {n} partitions")
        return counts

    def dump(self, agent: int, partition: int) -> tuple[U1, U4, U4, U4, U1]:
        """Returns all entries of the agent in the partition: keys [n, 16], slots, generations, lengths, tiers.

        Those of the records that the agent bears come first, from the oldest on.
        """
        action = f"dump partition {partition} of agent {agent}"
        _, counts = self.digests(agent, np.array([partition], u2))
        n = int(counts[0])
        keys = np.empty((n, KEY_BYTES), u1)
        slots, generations, lengths, tiers = np.empty(n, u4), np.empty(n, u4), np.empty(n, u4), np.empty(n, u1)
        code = library().kvp_dir_dump(
            self._pointer,
            agent,
            partition,
            n,
            keys.ctypes.data,
            *_entry_addresses(n, slots, generations, lengths, tiers),
        )
        check(code, action)
        return keys, slots, generations, lengths, tiers

    def replace(self, agent: int, partition: int, keys: U1, slots: U4, generations: U4, lengths: U4, tiers: U1) -> None:
        """Makes these the agent's entries in the partition. Those that a limit keeps out are counted, not stored."""
        n = len(slots)
        code = library().kvp_dir_replace(
            self._pointer,
            agent,
            partition,
            n,
            key_address(keys, n),
            *_entry_addresses(n, slots, generations, lengths, tiers),
        )
        check(code, f"replace partition {partition} of agent {agent}")

    def drop_partition(self, partition: int) -> int:
        """Frees a partition and returns how many records it had."""
        return check(library().kvp_dir_drop_partition(self._pointer, partition), f"drop partition {partition}")

    def sweep(self, agent: int, first_partition: int, n_partitions: int) -> int:
        """Removes the agent from partitions [first, first + n) and returns how many holders went."""
        n_removed = library().kvp_dir_sweep(self._pointer, agent, first_partition, n_partitions)
        return check(n_removed, f"sweep {n_partitions} partitions from {first_partition} of agent {agent}")

    def stats(self) -> DirectoryStats:
        """Returns the sizes of the table."""
        counters = DirectoryCounters()
        library().kvp_dir_get_stats(self._pointer, ctypes.byref(counters))
        return DirectoryStats(
            counters.records, counters.holders, counters.bytes, counters.full_rejections, counters.dropped_holders
        )


def _entry_addresses(n: int, slots: U4, generations: U4, lengths: U4, tiers: U1) -> tuple[int, int, int, int]:
    return (
        address("slots", slots, u4, n),
        address("generations", generations, u4, n),
        address("lengths", lengths, u4, n),
        address("tiers", tiers, u1, n),
    )
