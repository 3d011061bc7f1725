"""What a producer and an owner agree on: the columns of a stream and the limits of its messages.

A stream is one producer's messages to one owner. Apply takes one number per op, Repair and Synced one each; the numbers
are consecutive in the order of sending. Whatever is numbered lower than the owner expects is old and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpeer.core.directory_table import U1, U2, U4, EntryColumns, Op
from kvpeer.model import KEY_BYTES, RemoteProtocolError
from kvpeer.wire import packing
from kvpeer.wire.messages import Apply, Repair, StaleReport

__all__ = [
    "APPLY_OPS_MAX",
    "LOOKUP_KEYS_MAX",
    "REPAIR_ENTRIES_MAX",
    "OpColumns",
    "pack_apply",
    "pack_repair",
    "unpack_apply",
    "unpack_entries",
    "unpack_keys",
    "unpack_stale",
]

APPLY_OPS_MAX = 8192
"""Ops of one Apply: 260 kB, a few milliseconds of the owner's loop."""

REPAIR_ENTRIES_MAX = 65_536
"""Entries of one Repair: 1.9 MB, within a frame. A producer's own table must not hold more in a partition."""

LOOKUP_KEYS_MAX = 8192
"""Keys of one Lookup, asked or answered: the answer with the most holders a key then stays below the largest frame.
More are asked for in several."""


@dataclass(frozen=True, slots=True, eq=False)
class OpColumns:
    """n ops of one producer, in order, as the table takes them; `keys` is [n, 16]."""

    ops: U1
    keys: U1
    partitions: U2
    slots: U4
    generations: U4
    lengths: U4
    tiers: U1

    def __len__(self) -> int:
        return len(self.ops)

    def columns(self) -> tuple[U1, U1, U2, U4, U4, U4, U1]:
        """Returns the columns in the order of `DirectoryTable.apply`."""
        return self.ops, self.keys, self.partitions, self.slots, self.generations, self.lengths, self.tiers

    def select(self, chosen: slice | npt.NDArray[np.bool_]) -> OpColumns:
        """Returns some of the ops, in the same order."""
        return OpColumns(
            self.ops[chosen],
            self.keys[chosen],
            self.partitions[chosen],
            self.slots[chosen],
            self.generations[chosen],
            self.lengths[chosen],
            self.tiers[chosen],
        )

    @staticmethod
    def join(parts: Sequence[OpColumns]) -> OpColumns:
        """Returns the ops of at least one part, one after another."""
        return OpColumns(
            np.concatenate([part.ops for part in parts]),
            np.concatenate([part.keys for part in parts]),
            np.concatenate([part.partitions for part in parts]),
            np.concatenate([part.slots for part in parts]),
            np.concatenate([part.generations for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.tiers for part in parts]),
        )


def unpack_keys(keys: bytes, n_max: int) -> U1:
    """Returns packed keys as [n, 16], a view.

    Raises:
        RemoteProtocolError: the length is no multiple of a key's, or there are more than `n_max`.
    """
    n = packing.count(keys, KEY_BYTES, "keys")
    if n > n_max:
        raise RemoteProtocolError(f"keys: {n} in one message, {n_max} are allowed")
    return np.frombuffer(keys, dtype=np.uint8).reshape(n, KEY_BYTES)


def unpack_apply(message: Apply) -> OpColumns:
    """Returns the ops of an Apply as views of its columns.

    Raises:
        RemoteProtocolError: too many ops, an unknown op, a partition that does not exist, or lengths that differ.
    """
    keys = unpack_keys(message.keys, APPLY_OPS_MAX)
    n = len(keys)
    ops = packing.unpack(message.ops, packing.U1, n, "ops")
    if n and not (ops.min() >= Op.PUT and ops.max() <= Op.REMOVE):
        raise RemoteProtocolError(f"ops: {sorted(set(ops.tolist()))}, but only {[int(op) for op in Op]} exist")
    return OpColumns(
        ops=ops,
        keys=keys,
        partitions=packing.unpack_partitions(message.partitions, n),
        slots=packing.unpack(message.slots, packing.U4, n, "slots"),
        generations=packing.unpack(message.generations, packing.U4, n, "generations"),
        lengths=packing.unpack(message.lengths, packing.U4, n, "lengths"),
        tiers=packing.unpack(message.tiers, packing.U1, n, "tiers"),
    )


def pack_apply(sequence: int, ops: OpColumns) -> Apply:
    """Returns the Apply of these ops; `sequence` is the number of the first."""
    return Apply(sequence, *(column.tobytes() for column in ops.columns()))


def pack_repair(sequence: int, partition: int, entries: EntryColumns) -> Repair:
    """Returns the Repair that makes these entries all of the partition."""
    return Repair(sequence, partition, *(column.tobytes() for column in entries))


def unpack_entries(message: Repair) -> EntryColumns:
    """Returns the entries of a Repair as views of its columns.

    Raises:
        RemoteProtocolError: too many entries, or lengths that differ.
    """
    keys = unpack_keys(message.keys, REPAIR_ENTRIES_MAX)
    n = len(keys)
    return (
        keys,
        packing.unpack(message.slots, packing.U4, n, "slots"),
        packing.unpack(message.generations, packing.U4, n, "generations"),
        packing.unpack(message.lengths, packing.U4, n, "lengths"),
        packing.unpack(message.tiers, packing.U1, n, "tiers"),
    )


def unpack_stale(message: StaleReport) -> OpColumns:
    """Returns a report as the REMOVE ops that it amounts to.

    Raises:
        RemoteProtocolError: too many locations, a partition that does not exist, or lengths that differ.
    """
    keys = unpack_keys(message.keys, LOOKUP_KEYS_MAX)
    n = len(keys)
    return OpColumns(
        ops=np.full(n, Op.REMOVE, dtype=np.uint8),
        keys=keys,
        partitions=packing.unpack_partitions(message.partitions, n),
        slots=packing.unpack(message.slots, packing.U4, n, "slots"),
        generations=packing.unpack(message.generations, packing.U4, n, "generations"),
        lengths=np.zeros(n, dtype=np.uint32),
        tiers=np.zeros(n, dtype=np.uint8),
    )
