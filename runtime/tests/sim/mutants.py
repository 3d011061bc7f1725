"""Mistakes put back into the machines, one a function: each patches what it names and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from kvpeer.core import residents
from kvpeer.core.directory import DirectoryShard
from kvpeer.core.directory_table import Op
from kvpeer.core.locate import LocatePlan
from kvpeer.core.owner_stream import OwnerStream
from kvpeer.core.pull import Fetch, GiveBack, PullPlan
from kvpeer.core.pull import plan as pull_plan
from kvpeer.core.resident import Resident
from kvpeer.core.ring import Ring
from kvpeer.model import Outcome
from kvpeer.sim import directory as sim_directory
from kvpeer.sim import engine, transfer
from kvpeer.sim.memory import verified

Mutant = Callable[[pytest.MonkeyPatch], None]


def never_check_generation(patch: pytest.MonkeyPatch) -> None:
    """Readers take what the slot holds now for what it held when they were told of it; so does the slot table."""

    def careless(before, payload, after, want, part=None):
        if before is None or after is None:
            return Outcome.STALE
        return verified(after, payload, after, after, part) if after.parts else Outcome.STALE

    def any_generation(self, slots, generations):
        return [self.by_slot.get(slot) for slot in slots.tolist()]

    async def read_whatever(self, slot, generation, key):
        header = self._memory.header(slot)
        return await read(self, slot, header.generation, header.key) if header else await read(self, slot, 0, b"")

    read = transfer.DataServer._read
    patch.setattr(transfer.DataServer, "_read", read_whatever)
    patch.setattr(transfer, "verified", careless)
    patch.setattr(engine, "verified", careless)
    patch.setattr(residents.Residents, "in_slots", any_generation)


def withdraw_without_compare(patch: pytest.MonkeyPatch) -> None:
    """The directory's tables remove a producer's entry whatever slot and generation the message names."""

    class Careless(sim_directory.DirectoryTable):
        def apply(self, agent, ops, keys, partitions, slots, generations, lengths, tiers):
            slots, generations = slots.copy(), generations.copy()
            held = np.ones(agent + 1, dtype=np.uint8)
            results = []
            for idx in range(len(ops)):
                one = slice(idx, idx + 1)
                if ops[idx] == Op.REMOVE:
                    _, holders = self.lookup(keys[one], partitions[one], held)
                    own = holders[holders["agent"] == agent]
                    if len(own):
                        slots[idx], generations[idx] = own["slot"][0], own["generation"][0]
                columns = (ops, keys, partitions, slots, generations, lengths, tiers)
                results.append(super().apply(agent, *(np.ascontiguousarray(column[one]) for column in columns)))
            return np.concatenate(results) if results else np.zeros(0, dtype=np.uint8)

    patch.setattr(sim_directory, "DirectoryTable", Careless)


def no_incarnation_purge(patch: pytest.MonkeyPatch) -> None:
    """The records of a run that ended stay alive in the shards."""
    members_changed = DirectoryShard.members_changed

    def keep_all(self, ring, alive):
        members_changed(self, ring, {*alive, *self._producers})

    patch.setattr(DirectoryShard, "members_changed", keep_all)


def deadline_ignored(patch: pytest.MonkeyPatch) -> None:
    """A locate waits for its owners, however long they take."""
    init = LocatePlan.__init__

    def without_deadline(self, question, rings, deadline, hedge_delay_s):
        init(self, question, rings, math.inf, hedge_delay_s)

    patch.setattr(LocatePlan, "__init__", without_deadline)


def ring_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Who asks for the owners of a partition gets those of its neighbour."""
    owners = Ring.owners
    patch.setattr(Ring, "owners", lambda self, partitions: owners(self, (partitions + 1) % 4096))


def no_anti_entropy(patch: pytest.MonkeyPatch) -> None:
    """Producers compare nothing with owners: what an owner forgot stays forgotten."""
    patch.setattr(OwnerStream, "compare", lambda self, partitions: None)


def never_sweep(patch: pytest.MonkeyPatch) -> None:
    """What ended producers and lost partitions held is never freed."""
    patch.setattr(DirectoryShard, "sweep", lambda self, n_partitions, now: False)


def reuse_under_writer(patch: pytest.MonkeyPatch) -> None:
    """A slot whose reservation expired is given away while its writer may still be copying."""
    patch.setattr(Resident, "is_held", property(lambda self: bool(self.pins)))


def commit_unverified(patch: pytest.MonkeyPatch) -> None:
    """A pull commits every page that came, whatever its verification said."""
    fetched = PullPlan.fetched

    def take_all(self, fetch, answer, now):
        answer.outcomes[answer.outcomes == Outcome.CORRUPT] = Outcome.HIT
        return fetched(self, fetch, answer, now)

    patch.setattr(PullPlan, "fetched", take_all)


def pull_deadline_ignored(patch: pytest.MonkeyPatch) -> None:
    """A pull waits for its producers, however long they take."""
    patch.setattr(pull_plan, "FETCH_MARGIN_S", -3600.0)


def give_back_under_a_fetch(patch: pytest.MonkeyPatch) -> None:
    """A pull gives its slots back while pages may still come into them."""
    reserved = PullPlan.reserved

    def give_back_at_once(self, reserve, reservation, now):
        effects = reserved(self, reserve, reservation, now)
        fetches = [effect for effect in effects if isinstance(effect, Fetch)]
        return [*effects, *(GiveBack(fetch.slots, fetch.generations) for fetch in fetches)]

    patch.setattr(PullPlan, "reserved", give_back_at_once)


NAMED: list[Mutant] = [
    never_check_generation, withdraw_without_compare, no_incarnation_purge, deadline_ignored, ring_off_by_one,
]  # fmt: skip
OWN: list[Mutant] = [
    no_anti_entropy, never_sweep, reuse_under_writer, commit_unverified, pull_deadline_ignored, give_back_under_a_fetch,
]  # fmt: skip
MUTANTS = [*NAMED, *OWN]
