"""The directory table as nested dicts: what the native table must equal. The rules stand in `core.directory_table`."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np
from kvpeer.core.directory_table import ApplyResult, Op
from kvpeer.model import HOLDER_DTYPE, KEY_BYTES, N_PARTITIONS

HOLDERS_MAX = 16
HAND_OVERS_MAX = 16

_WORD = (1 << 64) - 1

Entry = tuple[int, int, int, int]
"""slot, generation, length, tier"""


@dataclass(frozen=True)
class OracleStats:
    records: int
    holders: int
    bytes: int
    full_rejections: int
    dropped_holders: int


@dataclass
class Record:
    """`holders`: agent -> entry. `borne_since` grows with time."""

    bearer: int
    borne_since: int
    holders: dict[int, Entry]


Partition = dict[bytes, Record]


class DirectoryOracle:
    """`DirectoryTable` with partition -> key -> record."""

    def __init__(self, partition_records_max: int = 1 << 20, makes_room: bool = True) -> None:
        self.partition_records_max = partition_records_max
        self.makes_room = makes_room
        self.partitions: list[Partition] = [{} for _ in range(N_PARTITIONS)]
        self.full_rejections = 0
        self.dropped_holders = 0
        self.latest_dropped: list[tuple[int, int]] = []
        self.time = itertools.count()

    def apply(self, agent, ops, keys, partitions, slots, generations, lengths, tiers):
        self.latest_dropped = []
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
                for agent, entry in self._holders(partition, key).items()
                if agent < len(alive) and alive[agent]
            ]
            counts.append(len(live))
            holders += live
        return np.array(counts, dtype=np.uint8), np.array(holders, dtype=HOLDER_DTYPE)

    def digests(self, agent, partitions):
        digests = np.zeros(len(partitions), dtype=np.uint64)
        counts = np.zeros(len(partitions), dtype=np.uint32)
        for idx, partition in enumerate(partitions.tolist()):
            for key, record in self.partitions[partition].items():
                if agent in record.holders:
                    digests[idx] ^= np.uint64(entry_digest(key, record.holders[agent]))
                    counts[idx] += 1
        return digests, counts

    def dropped(self):
        agents, partitions = np.array(self.latest_dropped, dtype=np.uint16).reshape(-1, 2).T.copy()
        return agents, partitions

    def n_records(self, partitions):
        return np.array([len(self.partitions[partition]) for partition in partitions.tolist()], dtype=np.uint32)

    def dump(self, agent, partition):
        records = self.partitions[partition]
        held = [(key, records[key].holders[agent]) for key in held_by(agent, records)]
        keys = np.frombuffer(b"".join(key for key, _ in held), dtype=np.uint8).reshape(-1, KEY_BYTES)
        columns = np.array([entry for _, entry in held], dtype=np.uint32).reshape(-1, 4)
        slots, generations, lengths = (np.ascontiguousarray(columns[:, idx]) for idx in range(3))
        return keys, slots, generations, lengths, columns[:, 3].astype(np.uint8)

    def replace(self, agent, partition, keys, slots, generations, lengths, tiers):
        self.latest_dropped = []
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
            for key in held_by(agent, records):
                self._take(records, key, agent)
                n += 1
        return n

    def stats(self):
        records = [record.holders for partition in self.partitions for record in partition.values()]
        return OracleStats(len(records), sum(map(len, records)), 0, self.full_rejections, self.dropped_holders)

    def _holders(self, partition, key):
        record = self.partitions[partition].get(key)
        return record.holders if record else {}

    def _put(self, agent, partition, key, entry):
        records = self.partitions[partition]
        record = records.get(key)
        if record is None:
            if len(records) >= self.partition_records_max and not (
                self.makes_room and self._make_room(agent, partition)
            ):
                self.full_rejections += 1
                return ApplyResult.FULL
            records[key] = Record(agent, next(self.time), {agent: entry})
            return ApplyResult.APPLIED
        if record.holders.get(agent) == entry:
            return ApplyResult.UNCHANGED
        if agent not in record.holders and len(record.holders) >= HOLDERS_MAX:
            self.full_rejections += 1
            return ApplyResult.HOLDERS_FULL
        record.holders[agent] = entry
        if record.bearer == agent:
            record.borne_since = next(self.time)
        return ApplyResult.APPLIED

    def _remove(self, agent, partition, key, slot, generation):
        if self._holders(partition, key).get(agent, ())[:2] != (slot, generation):
            return ApplyResult.UNCHANGED
        self._take(self.partitions[partition], key, agent)
        return ApplyResult.APPLIED

    def _take(self, records, key, agent):
        record = records[key]
        if record.bearer == agent and len(record.holders) > 1:
            self._pass_on(record, lightest_taker(record, records))
        del record.holders[agent]
        if not record.holders:
            del records[key]

    def _pass_on(self, record, taker):
        record.bearer = taker
        record.borne_since = next(self.time)

    def _make_room(self, agent, partition):
        records = self.partitions[partition]
        n_handed_over = 0
        while True:
            places = places_of(records)
            most = min(places, key=lambda other: (-places[other], other))
            giver = most if places[most] >= places[agent] + 2 else agent
            if not places[giver]:
                return False
            key = held_by(giver, records)[0]
            record = records[key]
            taker = lightest_taker(record, records) if len(record.holders) > 1 else None
            if taker is None or places[giver] < places[taker] + 2 or n_handed_over == HAND_OVERS_MAX:
                self.latest_dropped += [(holder, partition) for holder in record.holders]
                self.dropped_holders += len(record.holders)
                del records[key]
                return True
            self._pass_on(record, taker)
            n_handed_over += 1


def held_by(agent: int, records: Partition) -> list[bytes]:
    """Keys of the records that the agent bears, from the oldest on, and then of the others that it holds."""
    held = [key for key, record in records.items() if agent in record.holders]
    return sorted(held, key=lambda key: (records[key].bearer != agent, records[key].borne_since))


def places_of(records: Partition) -> Counter[int]:
    return Counter(record.bearer for record in records.values())


def lightest_taker(record: Record, records: Partition) -> int:
    places = places_of(records)
    return min(record.holders.keys() - {record.bearer}, key=lambda agent: (places[agent], agent))


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
