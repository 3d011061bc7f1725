"""What the directory shard and the publisher need of a table of records.

`kvpeer.native.DirectoryTable` is the one that runs; the tests hold a plain Python model of the same promises. Arrays
are C-contiguous with exactly the dtypes named here; `keys` is u1 of shape [n, 16]. A table keeps no array it was given.

A partition has places for `partition_records_max` records, and each record is borne by one of its holders: by its first
one, and when that goes, by the one of the others that bears the fewest. A table that makes room shares a full partition
between the agents, so that none crowds the others out:

- A new record drops the oldest of the agent that bears most; the oldest of its own agent, unless another agent bears at
  least two more. So nobody is pushed below an equal share, and an agent that has its share renews it.
- Oldest is what its bearer has borne for longest; a page that was published again elsewhere counts as new.
- A record that is to be dropped and has a holder who bears at least two fewer than its bearer is handed over to that
  one instead, and the search goes on (up to 16 times; then the record goes with all its holders).
- An agent that bears nothing gets a place while anybody bears two; beyond, a partition is full for it.

It costs a pass over the agents of the partition, at most 17 times, and none over its records.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["ApplyResult", "DirectoryTable", "DirectoryTableStats", "EntryColumns", "Op"]

U1: TypeAlias = npt.NDArray[np.uint8]
U2: TypeAlias = npt.NDArray[np.uint16]
U4: TypeAlias = npt.NDArray[np.uint32]
U8: TypeAlias = npt.NDArray[np.uint64]

EntryColumns: TypeAlias = tuple[U1, U4, U4, U4, U1]
"""keys [n, 16], slots, generations, lengths, tiers: one producer's entries of one partition."""


class Op(IntEnum):
    """What an op of a producer's stream does. Values equal the native enum and the wire."""

    PUT = 1
    REMOVE = 2


class ApplyResult(IntEnum):
    """What became of one op. Values equal the native enum."""

    APPLIED = 0
    UNCHANGED = 1
    FULL = 2
    HOLDERS_FULL = 3


class DirectoryTableStats(Protocol):
    """Sizes of a table; `bytes` is all memory that it holds. `full_rejections`: entries that a limit kept out;
    `dropped_holders`: entries that made room for others."""

    @property
    def records(self) -> int: ...
    @property
    def holders(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def full_rejections(self) -> int: ...
    @property
    def dropped_holders(self) -> int: ...


class DirectoryTable(Protocol):
    """Records in `N_PARTITIONS` independent partitions; each record lists its holders. Not thread-safe."""

    @property
    def partition_records_max(self) -> int: ...

    def apply(
        self, agent: int, ops: U1, keys: U1, partitions: U2, slots: U4, generations: U4, lengths: U4, tiers: U1
    ) -> U1:
        """Applies one producer's ops in order and returns an `ApplyResult` for each.

        PUT replaces the agent's holder of the key; REMOVE takes it away if slot and generation are equal.
        """

    def lookup(self, keys: U1, partitions: U2, alive: U1) -> tuple[U1, npt.NDArray[Any]]:
        """Returns the number of holders of each key (u1 [n]) and the holders one after another (`HOLDER_DTYPE`).

        Both arrays are the caller's own.
        Only holders whose `alive[agent]` is not zero count; agents beyond the array are dead.
        """

    def digests(self, agent: int, partitions: U2) -> tuple[U8, U4]:
        """Returns digest and count of the agent's entries in each of these partitions."""

    def dropped(self) -> tuple[U2, U2]:
        """Returns agent and partition of each entry that the latest `apply` or `replace` dropped to make room."""

    def n_records(self, partitions: U2) -> U4:
        """Returns how many records each of these partitions has."""

    def dump(self, agent: int, partition: int) -> EntryColumns:
        """Returns all entries of the agent in the partition: of the records that it bears, from the oldest on, first.

        `replace` with them keeps their order.
        """

    def replace(self, agent: int, partition: int, keys: U1, slots: U4, generations: U4, lengths: U4, tiers: U1) -> None:
        """Makes these the agent's entries in the partition. Those that a limit keeps out are counted, not stored."""

    def drop_partition(self, partition: int) -> int:
        """Frees a partition and returns how many records it had."""

    def sweep(self, agent: int, first_partition: int, n_partitions: int) -> int:
        """Removes the agent from partitions [first, first + n) and returns how many holders went."""

    def stats(self) -> DirectoryTableStats:
        """Returns the sizes of the table."""
