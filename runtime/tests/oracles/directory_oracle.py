"""The directory table as nested dicts: what the native table must equal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from kvpeer.core.directory_table import ApplyResult, Op
from kvpeer.model import HOLDER_DTYPE, KEY_BYTES, N_PARTITIONS

HOLDERS_MAX = 16

_WORD = (1 << 64) - 1

Entry = tuple[int, int, int, int]
"""slot, generation, length, tier"""


@dataclass(frozen=True)
class OracleStats:
    records: int
    holders: int
    bytes: int
    full_rejections: int


class DirectoryOracle:
    """`DirectoryTable` with partition -> key -> agent -> entry."""

    def __init__(self, partition_records_max: int = 1 << 20) -> None:
        self.partition_records_max = partition_records_max
        self.partitions: list[dict[bytes, dict[int, Entry]]] = [{} for _ in range(N_PARTITIONS)]
        self.full_rejections = 0

    def apply(self, agent, ops, keys, partitions, slots, generations, lengths, tiers):
        columns = (ops, partitions, slots, generations, lengths, tiers)
        rows = zip(rows_of(keys), *(column.tolist() for column in columns), strict=True)
        results = []
        for key, op, partition, slot, generation, length, tier in rows:
            if op == Op.PUT:
                results.append(self._put(agent, partition, key, (slot, generation, length, tier)))
            else:
                results.append(self._remove(agent, partition, key, slot, generation))
        return np.array(results, dtype=np.uint8)

    def lookup(self, keys, partitions, alive):
        counts, holders = [], []
        for key, partition in zip(rows_of(keys), partitions.tolist(), strict=True):
            live = [
                (agent, *entry)
                for agent, entry in self.partitions[partition].get(key, {}).items()
                if agent < len(alive) and alive[agent]
            ]
            counts.append(len(live))
            holders += live
        return np.array(counts, dtype=np.uint8), np.array(holders, dtype=HOLDER_DTYPE)

    def digests(self, agent, partitions):
        digests = np.zeros(len(partitions), dtype=np.uint64)
        counts = np.zeros(len(partitions), dtype=np.uint32)
        for idx, partition in enumerate(partitions.tolist()):
            for key, holders in self.partitions[partition].items():
                if agent in holders:
                    digests[idx] ^= np.uint64(entry_digest(key, holders[agent]))
                    counts[idx] += 1
        return digests, counts

    def dump(self, agent, partition):
        held = [(key, holders[agent]) for key, holders in self.partitions[partition].items() if agent in holders]
        keys = np.frombuffer(b"".join(key for key, _ in held), dtype=np.uint8).reshape(-1, KEY_BYTES)
        columns = np.array([entry for _, entry in held], dtype=np.uint32).reshape(-1, 4)
        slots, generations, lengths = (np.ascontiguousarray(columns[:, idx]) for idx in range(3))
        return keys, slots, generations, lengths, columns[:, 3].astype(np.uint8)

    def replace(self, agent, partition, keys, slots, generations, lengths, tiers):
        self.sweep(agent, partition, 1)
        columns = (slots, generations, lengths, tiers)
        for key, *entry in zip(rows_of(keys), *(column.tolist() for column in columns), strict=True):
            self._put(agent, partition, key, tuple(entry))

    def drop_partition(self, partition):
        n = len(self.partitions[partition])
        self.partitions[partition] = {}
        return n

    def sweep(self, agent, first_partition, n_partitions):
        n = 0
        for records in self.partitions[first_partition : first_partition + n_partitions]:
            for key in [key for key, holders in records.items() if agent in holders]:
                self._take(records, key, agent)
                n += 1
        return n

    def stats(self):
        records = [holders for partition in self.partitions for holders in partition.values()]
        return OracleStats(len(records), sum(map(len, records)), 0, self.full_rejections)

    def _put(self, agent, partition, key, entry):
        records = self.partitions[partition]
        holders = records.get(key)
        if holders is not None and holders.get(agent) == entry:
            return ApplyResult.UNCHANGED
        if holders is None and len(records) >= self.partition_records_max:
            self.full_rejections += 1
            return ApplyResult.FULL
        if holders is not None and agent not in holders and len(holders) >= HOLDERS_MAX:
            self.full_rejections += 1
            return ApplyResult.HOLDERS_FULL
        records.setdefault(key, {})[agent] = entry
        return ApplyResult.APPLIED

    def _remove(self, agent, partition, key, slot, generation):
        records = self.partitions[partition]
        if records.get(key, {}).get(agent, ())[:2] != (slot, generation):
            return ApplyResult.UNCHANGED
        self._take(records, key, agent)
        return ApplyResult.APPLIED

    @staticmethod
    def _take(records, key, agent):
        del records[key][agent]
        if not records[key]:
            del records[key]


def rows_of(keys: np.ndarray) -> list[bytes]:
    return [row.tobytes() for row in keys]


def entry_digest(key: bytes, entry: Entry) -> int:
    slot, generation, length, tier = entry
    mixed = 0x9E3779B97F4A7C15
    words = (key[:8], key[8:], _u4(slot) + _u4(generation), _u4(length) + _u4(tier))
    for word in words:
        mixed = _scramble(mixed ^ int.from_bytes(word, "little"))
    return mixed


def _u4(value: int) -> bytes:
    return value.to_bytes(4, "little")


def _scramble(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _WORD
    return value ^ (value >> 31)
