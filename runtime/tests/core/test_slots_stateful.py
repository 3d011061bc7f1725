"""The slot table against a model: bytes never overlap, pins hold, generations grow, the directory is right, room can be
made."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvpeer.core.slot_effects import Effect, PageShape, ReserveStatus
from kvpeer.core.slots import SlotSettings, SlotTable
from oracles.slot_model import EffectModel, key_of, keys_of, partitions_of

EXTENT_BYTES = 64 << 10
N_EXTENTS = 3
SHAPES = [PageShape(4000, 1, 1), PageShape(12_000, 2, 2), PageShape(30_000, 3, 3)]
CLIENTS = [1, 2, 3]
KEYS_A_SHAPE = 24
EPSILON_S = 1e-6

numbers = st.lists(st.integers(0, KEYS_A_SHAPE - 1), min_size=1, max_size=10)
clients = st.sampled_from(CLIENTS)
shapes = st.sampled_from(SHAPES)


class SlotTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.held_writes: dict[tuple[int, int, int], tuple[int, tuple[int, int]]] = {}  # -> part, bytes
        self.resting: list[
            tuple[float, tuple[int, int]]
        ] = []  # until when, bytes: after withdrawal or a writer's death
        self.pins: dict[int, tuple[int, float, list[int], list[tuple[int, int]]]] = {}

    @initialize(lease_ttl_s=st.sampled_from([0.0, 0.05]))
    def begin(self, lease_ttl_s: float) -> None:
        self.settings = SlotSettings(EXTENT_BYTES, N_EXTENTS, lease_ttl_s, 5.0, 8.0, 1.0, 20.0)
        self.table = SlotTable(self.settings)
        self.model = EffectModel(EXTENT_BYTES)
        self.perform(self.table.start())

    def perform(self, effects: list[Effect]) -> None:
        before = {key: (slot, self.model.interval(slot)) for key, (slot, _) in self.model.directory.items()}
        written = self.model.perform(effects)
        gone = before.keys() - self.model.directory.keys()
        if self.settings.lease_ttl_s:
            self.resting += [(self.now + self.settings.lease_ttl_s, before[key][1]) for key in gone]
        self.resting = [entry for entry in self.resting if entry[0] > self.now + EPSILON_S]
        for slot in written:
            start, stop = self.model.interval(slot)
            for other_start, other_stop in self.occupied():
                assert stop <= other_start or other_stop <= start, f"slot {slot} overlaps bytes that are in use"

    def occupied(self) -> list[tuple[int, int]]:
        """Bytes that somebody reads, writes, or may still be reading or writing."""
        return [
            *(interval for _, interval in self.held_writes.values()),
            *(interval for _, interval in self.resting),
            *(interval for *_, intervals in self.pins.values() for interval in intervals),
            *(self.model.interval(slot) for slot, _ in self.model.directory.values()),
        ]

    def expire_pins(self) -> None:
        self.pins = {pin: entry for pin, entry in self.pins.items() if entry[1] > self.now}

    @rule(writer=clients, shape=shapes, numbers=numbers, part=st.integers(0, 2))
    def reserve(self, writer: int, shape: PageShape, numbers: list[int], part: int) -> None:
        part %= shape.n_parts
        keys = keys_of(*(number + 1000 * shape.cohort for number in numbers))
        reservation, effects = self.table.reserve(writer, keys, partitions_of(keys), shape, part, self.now)
        self.perform(effects)
        for idx in np.flatnonzero(reservation.statuses == ReserveStatus.WRITE):
            slot, generation = int(reservation.slots[idx]), int(reservation.generations[idx])
            assert self.model.headers[slot] == ("writing", generation)
            assert self.model.interval(slot)[0] == reservation.offsets[idx]
            parts = [held[0] for name, held in self.held_writes.items() if name[1:] == (slot, generation)]
            assert part not in parts
            self.held_writes[writer, slot, generation] = (part, self.model.interval(slot))
        assert (reservation.no_room is not None) == bool((reservation.statuses == ReserveStatus.NO_ROOM).any())

    @precondition(lambda self: self.held_writes)
    @rule(choice=st.randoms(use_true_random=False), n=st.integers(1, 6), commits=st.booleans())
    def finish_writes(self, choice: object, n: int, commits: bool) -> None:
        writer, _, _ = choice.choice(sorted(self.held_writes))  # type: ignore[attr-defined]
        part = next(held[0] for name, held in sorted(self.held_writes.items()) if name[0] == writer)
        mine = [name for name, held in sorted(self.held_writes.items()) if name[0] == writer and held[0] == part][:n]
        slots = np.array([slot for _, slot, _ in mine], dtype=np.uint32)
        generations = np.array([generation for *_, generation in mine], dtype=np.uint32)
        for held in mine:
            del self.held_writes[held]
        if commits:
            _, effects = self.table.commit(writer, slots, generations, part, self.now)
        else:
            effects = self.table.abandon(writer, slots, generations, self.now)
        self.perform(effects)

    @rule(client=clients, shape=shapes, numbers=numbers)
    def pin(self, client: int, shape: PageShape, numbers: list[int]) -> None:
        names = [key_of(number + 1000 * shape.cohort) for number in numbers]
        found = self.table.pin(client, b"".join(names), self.now)
        assert found.resident.tolist() == [name in self.model.directory for name in names]
        slots = found.slots[found.resident].tolist()
        assert slots == [self.model.directory[name][0] for name in names if name in self.model.directory]
        if found.pin:
            intervals = [self.model.interval(slot) for slot in slots]
            self.pins[found.pin] = (client, self.now + self.settings.pin_ttl_s, slots, intervals)

    @precondition(lambda self: self.pins)
    @rule(choice=st.randoms(use_true_random=False))
    def release(self, choice: object) -> None:
        pin = choice.choice(sorted(self.pins))  # type: ignore[attr-defined]
        client, *_ = self.pins.pop(pin)
        self.perform(self.table.release(client, pin, self.now))

    @rule(client=clients)
    def client_ends(self, client: int) -> None:
        self.pins = {pin: entry for pin, entry in self.pins.items() if entry[0] != client}
        for held in [held for held in self.held_writes if held[0] == client]:
            _, interval = self.held_writes.pop(held)
            self.resting.append((self.now + self.settings.death_grace_s, interval))
        self.perform(self.table.gone(client, self.now))

    @rule(seconds=st.sampled_from([0.01, 0.06, 1.1, 6.0, 21.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.expire_pins()
        self.perform(self.table.tick(self.now))

    @rule()
    def extents_open(self) -> None:
        self.model.open_extents(self.table)

    @rule(cohort=st.sampled_from([shape.cohort for shape in SHAPES]))
    def reset(self, cohort: int) -> None:
        self.perform(self.table.withdraw_cohort(cohort, self.now))

    @precondition(lambda self: self.model.directory)
    @rule(choice=st.randoms(use_true_random=False))
    def a_page_is_corrupt(self, choice: object) -> None:
        key = choice.choice(sorted(self.model.directory))  # type: ignore[attr-defined]
        slot, generation = self.model.directory[key]
        columns = np.array([slot], dtype=np.uint32), np.array([generation], dtype=np.uint32)
        self.perform(self.table.quarantine(*columns, self.now))
        assert key not in self.model.directory

    @rule(shape=shapes)
    def room_is_made_when_nobody_holds_anything(self, shape: PageShape) -> None:
        for client in CLIENTS:
            self.client_ends(client)
        self.time_passes(21.0)
        keys = keys_of(999 + 1000 * shape.cohort)
        for _ in range(4):
            self.extents_open()
            reservation, effects = self.table.reserve(9, keys, partitions_of(keys), shape, 0, self.now)
            self.perform(effects)
            if reservation.statuses[0] != ReserveStatus.NO_ROOM:
                self.perform(self.table.abandon(9, reservation.slots, reservation.generations, self.now))
                return
            self.time_passes(0.06)
        raise AssertionError(f"no room for {shape}: {reservation.no_room}")

    @invariant()
    def books_balance(self) -> None:
        self.table.check()
        stats = self.table.stats()
        assert stats.used_bytes + stats.free_bytes + stats.quarantined_bytes == stats.assigned_bytes
        assert min(stats.free_bytes, stats.quarantined_bytes, stats.used_bytes) >= 0
        assert stats.n_committed == len(self.model.directory)

    @invariant()
    def pinned_pages_stay_unless_reset_or_corrupt(self) -> None:
        for _, _, slots, _ in self.pins.values():
            assert all(self.model.headers[slot][0] in {"committed", "withdrawn"} for slot in slots)


SlotTableMachine.TestCase.settings = settings(max_examples=min(60, settings().max_examples), stateful_step_count=40)
TestSlotTable = SlotTableMachine.TestCase
