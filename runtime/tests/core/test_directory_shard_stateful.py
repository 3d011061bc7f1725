"""The shard against a model of what each producer said last: holders, trust, and what is asked back."""

from __future__ import annotations

import pytest
from directory_actors import (
    ALPHA,
    BETA,
    OWN,
    Row,
    ask,
    digests_of,
    key_of,
    numbers,
    op_columns,
    put,
    remove,
    repair,
    synced,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvpeer.core.directory import DirectoryShard
from kvpeer.core.ring import Ring
from kvpeer.model import LookupStatus, PeerUnavailableError
from kvpeer.wire.messages import StaleReport
from oracles.directory_oracle import DirectoryOracle

PARTITIONS = [0, 7, 4095]
PAGES = {f"page {number}": PARTITIONS[number % 3] for number in range(9)}
PRODUCERS = [ALPHA, BETA, OWN]
AGENTS_MAX = 8
"""Each time that a producer starts anew it takes an index, and the old one is free after a sweep: few enough that they
are used again, and never too few."""

RING = Ring.build([OWN])

producers = st.sampled_from(PRODUCERS)
pages = st.lists(st.sampled_from(sorted(PAGES)), min_size=1, max_size=5, unique=True)
partitions = st.sampled_from(PARTITIONS)
steps = st.sampled_from([-3, -1, 0, 0, 0, 0, 1, 5])
"""How far a message is from the number that is expected: older, right, or behind a gap."""

Place = tuple[int, int]


class _Said:
    """What one living producer said."""

    def __init__(self) -> None:
        self.next_sequence = 0
        self.held: dict[str, Place] = {}
        self.confirmed: set[int] = set()


class ShardMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.shard = DirectoryShard(OWN, DirectoryOracle(), agents_max=AGENTS_MAX)
        self.said: dict[bytes, _Said] = {}
        self.n_places = 0
        self.n_unswept = 0
        self.members(set(PRODUCERS))

    @rule(alive=st.sets(producers))
    def members(self, alive: set[bytes]) -> None:
        """Who ends and comes back starts from nothing."""
        n_ending = len(self.said.keys() - alive - {OWN})
        if self.n_unswept + n_ending > AGENTS_MAX - len(PRODUCERS):
            while self.shard.sweep(9000, 0.0):
                pass
            self.n_unswept = 0
        self.n_unswept += n_ending
        self.shard.members_changed(RING, alive | {OWN})
        self.said = {agent: self.said.get(agent, _Said()) for agent in alive | {OWN}}

    @rule(n=st.integers(0, 9000))
    def sweep(self, n: int) -> None:
        self.shard.sweep(n, 0.0)

    def new_rows(self, names: list[str]) -> list[Row]:
        self.n_places += 1
        return [(name, PAGES[name], self.n_places, 1) for name in names]

    def accept(self, said: _Said, sequence: int, n: int) -> int:
        """How many of the message's numbers are old, after the model has taken note of it."""
        if sequence > said.next_sequence:
            said.confirmed.clear()
        n_old = min(n, max(0, said.next_sequence - sequence))
        said.next_sequence = max(said.next_sequence, sequence + n)
        return n_old

    def check_applied(self, said: _Said, answer: object) -> None:
        assert answer.next_sequence == said.next_sequence  # type: ignore[attr-defined]
        asked_back = set(numbers(answer.repair))  # type: ignore[attr-defined]
        assert asked_back & set(PARTITIONS) == set(PARTITIONS) - said.confirmed

    @rule(producer=producers, names=pages, step=steps)
    def put(self, producer: bytes, names: list[str], step: int) -> None:
        said = self.said.get(producer)
        sequence = max(0, (said.next_sequence if said else 0) + step)
        rows = self.new_rows(names)
        if said is None:
            with pytest.raises(PeerUnavailableError):
                self.shard.apply(producer, put(sequence, *rows))
            return
        answer = self.shard.apply(producer, put(sequence, *rows))
        for name, _, slot, generation in rows[self.accept(said, sequence, len(rows)) :]:
            said.held[name] = (slot, generation)
        self.check_applied(said, answer)

    @precondition(lambda self: any(said.held for said in self.said.values()))
    @rule(choice=st.randoms(use_true_random=False), is_same_place=st.booleans())
    def remove(self, choice: object, is_same_place: bool) -> None:
        """Only what lies where the message says goes."""
        producer = choice.choice(sorted(agent for agent, said in self.said.items() if said.held))  # type: ignore[attr-defined]
        said = self.said[producer]
        name = choice.choice(sorted(said.held))  # type: ignore[attr-defined]
        slot, generation = said.held[name]
        row = (name, PAGES[name], slot, generation if is_same_place else generation + 1)
        answer = self.shard.apply(producer, remove(said.next_sequence, row))
        assert self.accept(said, said.next_sequence, 1) == 0
        if is_same_place:
            del said.held[name]
        self.check_applied(said, answer)

    @rule(producer=producers, partition=partitions, names=pages, step=steps)
    def repair(self, producer: bytes, partition: int, names: list[str], step: int) -> None:
        said = self.said.get(producer)
        if said is None:
            return
        rows = [row for row in self.new_rows(names) if row[1] == partition]
        sequence = max(0, said.next_sequence + step)
        answer = self.shard.repair(producer, repair(sequence, partition, *rows))
        if self.accept(said, sequence, 1) == 0:
            kept = {name: place for name, place in said.held.items() if PAGES[name] != partition}
            said.held = kept | {name: (slot, generation) for name, _, slot, generation in rows}
            said.confirmed.add(partition)
        self.check_applied(said, answer)

    @rule(producer=producers, named=st.sets(partitions).map(sorted), step=steps)
    def synced(self, producer: bytes, named: list[int], step: int) -> None:
        said = self.said.get(producer)
        if said is None:
            return
        sequence = max(0, said.next_sequence + step)
        answer = self.shard.synced(producer, synced(sequence, named))
        if self.accept(said, sequence, 1) == 0:
            said.held = {name: place for name, place in said.held.items() if PAGES[name] not in named}
            said.confirmed |= set(named)
        self.check_applied(said, answer)

    @rule(producer=producers, named=st.sets(partitions, min_size=1).map(sorted), forgets=st.booleans())
    def digests(self, producer: bytes, named: list[int], forgets: bool) -> None:
        """What differs is named, loses its trust, and what is equal gains it."""
        said = self.said.get(producer)
        if said is None:
            return
        rows = [(name, PAGES[name], *place) for name, place in said.held.items() if PAGES[name] in named]
        told = rows[1:] if forgets else rows
        differing = {rows[0][1]} if forgets and rows else set()
        answer = self.shard.digests(producer, digests_of(*told, partitions=named))
        assert set(numbers(answer.differing)) == differing
        said.confirmed = (said.confirmed | set(named)) - differing

    @precondition(lambda self: any(said.held for said in self.said.values()))
    @rule(choice=st.randoms(use_true_random=False), is_right=st.booleans())
    def stale(self, choice: object, is_right: bool) -> None:
        producer = choice.choice(sorted(agent for agent, said in self.said.items() if said.held))  # type: ignore[attr-defined]
        held = self.said[producer].held
        name = choice.choice(sorted(held))  # type: ignore[attr-defined]
        slot, generation = held[name]
        columns = op_columns((name, PAGES[name], slot if is_right else slot + 1, generation))
        packed = (columns.partitions.tobytes(), columns.slots.tobytes(), columns.generations.tobytes())
        self.shard.stale(StaleReport(producer, key_of(name), *packed))
        if is_right:
            del held[name]

    @invariant()
    def answers_are_what_the_living_said(self) -> None:
        if not hasattr(self, "shard"):
            return
        answers = ask(self.shard, *PAGES.items())
        for (name, partition), (status, holders) in zip(PAGES.items(), answers, strict=True):
            expected = {(agent, *said.held[name]) for agent, said in self.said.items() if name in said.held}
            assert holders == expected
            is_confirmed = all(partition in said.confirmed for said in self.said.values())
            nothing = LookupStatus.MISS if is_confirmed else LookupStatus.UNSURE
            assert status == (LookupStatus.KNOWN if expected else nothing)


TestShard = ShardMachine.TestCase
TestShard.settings = settings(max_examples=min(40, settings().max_examples), stateful_step_count=30)
