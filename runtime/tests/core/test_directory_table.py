"""The native directory table equals a dict, whatever is done to it."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kvpeer.model import HOLDER_DTYPE, N_PARTITIONS
from kvpeer.native import DirectoryTable
from oracles.directory_oracle import DirectoryOracle

PARTITIONS = (0, 5, N_PARTITIONS - 1)
KEYS = [hashlib.sha256(bytes([number])).digest()[:16] for number in range(40)]
N_AGENTS = 20
AGENTS = [*range(N_AGENTS), 65535]

agents = st.sampled_from(AGENTS)
partitions = st.sampled_from(PARTITIONS)
small = st.integers(0, 2)
entries = st.tuples(st.sampled_from(KEYS), small, small, st.sampled_from([0, 4096, 2**32 - 1]), st.sampled_from([2, 4]))
ops = st.lists(st.tuples(st.sampled_from([1, 1, 2]), partitions, entries), max_size=60)


def key_rows(keys):
    return np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 16)


def entry_columns(rows):
    keys, *columns = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    dtypes = (np.uint32, np.uint32, np.uint32, np.uint8)
    return key_rows(keys), *(np.array(column, dtype=dtype) for column, dtype in zip(columns, dtypes, strict=True))


def by_key(table, keys, partition_column, alive):
    """Lookup as {agent: entry} for each key: the order of holders is not promised."""
    counts, holders = table.lookup(keys, partition_column, alive)
    assert holders.dtype == HOLDER_DTYPE
    assert len(holders) == counts.sum()
    found = [{row[0]: row for row in part.tolist()} for part in np.split(holders, np.cumsum(counts)[:-1])]
    assert [len(row) for row in found] == counts.tolist()
    return found


class TableEqualsDict(RuleBasedStateMachine):
    @initialize(partition_records_max=st.sampled_from([1, 7, 25, 1000]), makes_room=st.booleans())
    def create(self, partition_records_max, makes_room):
        self.table = DirectoryTable(partition_records_max, makes_room=makes_room)
        self.oracle = DirectoryOracle(partition_records_max, makes_room)

    def both(self, name, *arguments):
        return getattr(self.table, name)(*arguments), getattr(self.oracle, name)(*arguments)

    @rule(agent=agents, batch=ops)
    def apply(self, agent, batch):
        keys, slots, generations, lengths, tiers = entry_columns([entry for _, _, entry in batch])
        kinds = np.array([kind for kind, _, _ in batch], dtype=np.uint8)
        places = np.array([partition for _, partition, _ in batch], dtype=np.uint16)
        real, expected = self.both("apply", agent, kinds, keys, places, slots, generations, lengths, tiers)
        assert real.tolist() == expected.tolist()
        self.same_dropped()

    @rule(holders=st.sets(agents, min_size=10), partition=partitions, entry=entries)
    def many_agents_publish_the_same_page(self, holders, partition, entry):
        for agent in sorted(holders):
            self.apply(agent, [(1, partition, entry)])

    @rule(batches=st.lists(st.tuples(st.sampled_from([0, 0, 0, 1, 2]), st.lists(entries, max_size=10)), max_size=8))
    def few_agents_fill_a_partition(self, batches):
        """They share pages, and one of them publishes more than the others: records change their bearers."""
        for agent, batch in batches:
            self.apply(agent, [(1, PARTITIONS[0], entry) for entry in batch])

    @rule(agent=agents, partition=partitions, rows=st.lists(entries, max_size=60))
    def replace(self, agent, partition, rows):
        self.both("replace", agent, partition, *entry_columns(rows))
        self.same_dropped()

    @rule(agent=agents, origin=partitions, partition=partitions)
    def copy_a_partition(self, agent, origin, partition):
        """Dump and replace fit together."""
        entries_there = self.table.dump(agent, origin)
        self.both("replace", agent, partition, *entries_there)

    @rule(partition=partitions)
    def drop_partition(self, partition):
        real, expected = self.both("drop_partition", partition)
        assert real == expected

    @rule(agent=agents, part=st.sampled_from([(0, N_PARTITIONS), (0, 5), (5, 1), (6, N_PARTITIONS - 6), (0, 0)]))
    def sweep(self, agent, part):
        real, expected = self.both("sweep", agent, *part)
        assert real == expected

    @rule(alive=st.lists(st.integers(0, 1), max_size=N_AGENTS + 2))
    def lookup(self, alive):
        keys = key_rows(KEYS * len(PARTITIONS))
        places = np.repeat(np.array(PARTITIONS, dtype=np.uint16), len(KEYS))
        flags = np.array(alive, dtype=np.uint8)
        assert by_key(self.table, keys, places, flags) == by_key(self.oracle, keys, places, flags)

    @invariant()
    def same_content(self):
        if not hasattr(self, "table"):
            return
        places = np.array(PARTITIONS, dtype=np.uint16)
        for agent in AGENTS:
            for real, expected in zip(*self.both("digests", agent, places), strict=True):
                assert real.tolist() == expected.tolist()
            for partition in PARTITIONS:
                real, expected = self.both("dump", agent, partition)
                assert entry_set(real) == entry_set(expected)
                n_borne = sum(record.bearer == agent for record in self.oracle.partitions[partition].values())
                assert real[0][:n_borne].tolist() == expected[0][:n_borne].tolist(), "another order of age"
        real, expected = self.both("n_records", places)
        assert real.tolist() == expected.tolist()
        real, expected = self.both("stats")
        assert (real.records, real.holders, real.full_rejections, real.dropped_holders) == (
            expected.records,
            expected.holders,
            expected.full_rejections,
            expected.dropped_holders,
        )

    def same_dropped(self):
        """Who lost how many entries where; the order within one record is not promised."""
        real, expected = (
            Counter(zip(*(column.tolist() for column in dropped), strict=True)) for dropped in self.both("dropped")
        )
        assert real == expected


def entry_set(columns):
    keys, *numbers = columns
    rows = list(zip([key.tobytes() for key in keys], *(column.tolist() for column in numbers), strict=True))
    assert len(set(rows)) == len(rows)
    return set(rows)


TestTableEqualsDict = TableEqualsDict.TestCase
TestTableEqualsDict.settings = settings(max_examples=min(60, settings().max_examples), stateful_step_count=25)
