"""Builders for tests of the shard and the publisher: agents, pages and messages from plain lists."""

from __future__ import annotations

import hashlib

import numpy as np
from kvpeer.core.directory import DirectoryShard
from kvpeer.core.directory_stream import OpColumns, pack_apply, pack_repair
from kvpeer.core.directory_table import Op
from kvpeer.core.ring import Ring
from kvpeer.model import KEY_BYTES, AgentId
from kvpeer.wire.messages import Digests, Lookup, Synced
from kvpeer.wire.packing import unpack_holders
from oracles.directory_oracle import DirectoryOracle

OWN, ALPHA, BETA, GAMMA = (AgentId(bytes([number]) * 16) for number in (9, 1, 2, 3))

Row = tuple[str, int, int, int]
"""page name, partition, slot, generation"""


def key_of(page: str) -> bytes:
    return hashlib.sha256(page.encode()).digest()[:KEY_BYTES]


def op_columns(*rows: Row, op: Op = Op.PUT) -> OpColumns:
    n = len(rows)
    numbers = np.array([row[1:] for row in rows], dtype=np.uint32).reshape(n, 3)
    return OpColumns(
        ops=np.full(n, op, dtype=np.uint8),
        keys=np.frombuffer(b"".join(key_of(row[0]) for row in rows), dtype=np.uint8).reshape(n, KEY_BYTES),
        partitions=numbers[:, 0].astype(np.uint16),
        slots=numbers[:, 1].copy(),
        generations=numbers[:, 2].copy(),
        lengths=np.full(n, 4096, dtype=np.uint32),
        tiers=np.full(n, 2, dtype=np.uint8),
    )


def put(sequence: int, *rows: Row):
    return pack_apply(sequence, op_columns(*rows))


def remove(sequence: int, *rows: Row):
    return pack_apply(sequence, op_columns(*rows, op=Op.REMOVE))


def repair(sequence: int, partition: int, *rows: Row):
    ops = op_columns(*rows)
    return pack_repair(sequence, partition, (ops.keys, ops.slots, ops.generations, ops.lengths, ops.tiers))


def synced(sequence: int, partitions=range(4096)):
    return Synced(sequence, np.array(list(partitions), dtype=np.uint16).tobytes())


def digests_of(*rows: Row, partitions: list[int]) -> Digests:
    """What a producer with exactly these pages would send."""
    table = DirectoryOracle()
    table.apply(0, *op_columns(*rows).columns())
    named = np.array(partitions, dtype=np.uint16)
    digests, counts = table.digests(0, named)
    return Digests(named.tobytes(), digests.tobytes(), counts.tobytes())


def shard_with(*alive: AgentId, owners: tuple[AgentId, ...] = (OWN,), **limits) -> DirectoryShard:
    """The shard of OWN in a ring of `owners`, with OWN and `alive` alive. OWN holds nothing and has said so."""
    table = DirectoryOracle(limits.pop("partition_records_max", 1000))
    shard = DirectoryShard(OWN, table, **limits)
    shard.members_changed(Ring.build(owners), {OWN, *alive})
    shard.synced(OWN, synced(0))
    return shard


def ask(shard: DirectoryShard, *pages: tuple[str, int]):
    """Status and {(agent, slot, generation)} of each (page, partition)."""
    partitions = np.array([partition for _, partition in pages], dtype=np.uint16)
    answer = shard.lookup(Lookup(b"".join(key_of(page) for page, _ in pages), partitions.tobytes()))
    statuses, counts, holders = unpack_holders(answer, len(pages))
    parts = np.split(holders, np.cumsum(counts, dtype=np.int64)[:-1])
    return [
        (status, {(answer.agents[row[0] * 16 : row[0] * 16 + 16], row[1], row[2]) for row in part.tolist()})
        for status, part in zip(statuses.tolist(), parts, strict=True)
    ]


def numbers(packed: bytes) -> list[int]:
    return np.frombuffer(packed, dtype="<u2").tolist()
