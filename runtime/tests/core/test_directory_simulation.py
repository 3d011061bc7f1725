"""Publishers and shards of a whole cluster in one thread, and a network that loses, delays, reorders and repeats.

Agents come, crash and are wrongly believed dead. Once it is quiet, the directory says exactly what is true. A failing
seed repeats exactly.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from kvpeer.core.directory import PREVIOUS_OWNER_S, DirectoryShard
from kvpeer.core.owner_stream import RETRY_MAX_S
from kvpeer.core.publisher import Publisher
from kvpeer.core.ring import Ring
from kvpeer.model import KEY_BYTES, LookupStatus, PeerUnavailableError
from kvpeer.wire.messages import Apply, Digests, Lookup, Repair, StaleReport, Synced
from kvpeer.wire.packing import unpack_holders
from oracles.directory_oracle import DirectoryOracle

pytestmark = pytest.mark.long

ANTI_ENTROPY_S = 2.0
REQUEST_TIMEOUT_S = 0.3
KEYS = [hashlib.sha256(bytes([number])).digest()[:KEY_BYTES] for number in range(60)]
# Few partitions, so that pages share them and change owners together.
PARTITION_OF = {key: (key[0] % 12) * 341 for key in KEYS}

Place = tuple[int, int]
"""slot, generation"""


@dataclass
class Node:
    node_id: bytes
    publisher: Publisher
    shard: DirectoryShard
    view: set[bytes] = field(default_factory=set)
    pages: dict[bytes, Place] = field(default_factory=dict)
    past: list[tuple[bytes, Place]] = field(default_factory=list)
    generation: int = 0


class Cluster:
    def __init__(self, seed: int, partition_records_max: int = 1 << 20) -> None:
        self.partition_records_max = partition_records_max
        self.random = random.Random(seed)
        self.now = 0.0
        self.order = itertools.count()
        self.events: list = []
        self.nodes: dict[bytes, Node] = {}
        self.ended: dict[bytes, Node] = {}
        self.is_hostile = True
        self.sent: list[type] = []

    # ---- time ------------------------------------------------------------------------------------------------------

    def later(self, delay_s: float, action, *arguments) -> None:
        heapq.heappush(self.events, (self.now + delay_s, next(self.order), action, arguments))

    def run_until(self, time: float) -> None:
        while self.events and self.events[0][0] <= time:
            self.now, _, action, arguments = heapq.heappop(self.events)
            action(*arguments)
        self.now = time

    def delay(self) -> float:
        return self.random.expovariate(20) if self.is_hostile else 0.001

    def chance(self, probability: float) -> bool:
        return self.is_hostile and self.random.random() < probability

    # ---- the network -----------------------------------------------------------------------------------------------

    def perform(self, node: Node, effects) -> None:
        for effect in effects:
            self.sent.append(type(effect.message))
            outcome = {"is_known": False}
            self.later(REQUEST_TIMEOUT_S, self.time_out, node, effect, outcome)
            if not self.chance(0.15):
                self.later(self.delay(), self.deliver, node, effect, outcome)
            if self.chance(0.1):
                self.later(self.delay() * 10, self.deliver, node, effect, {"is_known": True})

    def deliver(self, node: Node, effect, outcome) -> None:
        owner = self.nodes.get(effect.owner)
        if owner is None:
            return
        handle = {
            Apply: owner.shard.apply,
            Repair: owner.shard.repair,
            Synced: owner.shard.synced,
            Digests: owner.shard.digests,
        }
        try:
            answer = handle[type(effect.message)](node.node_id, effect.message)
        except PeerUnavailableError:
            return  # not a member in the owner's view: the producer finds its request unanswered
        if not self.chance(0.15):
            self.later(self.delay(), self.answer, node, effect, answer, outcome)

    def answer(self, node: Node, effect, answer, outcome) -> None:
        if not outcome["is_known"] and node.node_id in self.nodes:
            outcome["is_known"] = True
            self.perform(node, node.publisher.acknowledged(effect.owner, effect.message, answer, self.now))

    def time_out(self, node: Node, effect, outcome) -> None:
        if not outcome["is_known"] and node.node_id in self.nodes:
            outcome["is_known"] = True
            node.publisher.failed(effect.owner, effect.message, self.now)

    # ---- members ---------------------------------------------------------------------------------------------------

    def join(self) -> None:
        node_id = self.random.randbytes(16)
        node = Node(
            node_id,
            Publisher(node_id, DirectoryOracle(makes_room=False), ANTI_ENTROPY_S),
            DirectoryShard(node_id, DirectoryOracle(self.partition_records_max)),
        )
        self.nodes[node_id] = node
        self.see(node, {node_id})
        for other in self.nodes.values():
            self.later(self.delay(), self.learn, other, node_id, True)
            self.later(self.delay(), self.learn, node, other.node_id, True)
        self.later(0.0, self.tick, node)

    def crash(self, node: Node) -> None:
        del self.nodes[node.node_id]
        self.ended[node.node_id] = node
        for other in self.nodes.values():
            self.later(self.delay() * 5, self.learn, other, node.node_id, False)

    def suspect_wrongly(self, node: Node, suspect: bytes) -> None:
        self.learn(node, suspect, False)
        self.later(self.delay() * 20, self.learn, node, suspect, True)

    def learn(self, node: Node, subject: bytes, is_alive: bool) -> None:
        if node.node_id not in self.nodes or subject == node.node_id or (is_alive and subject in self.ended):
            return
        self.see(node, node.view | {subject} if is_alive else node.view - {subject})

    def see(self, node: Node, view: set[bytes]) -> None:
        if view != node.view:
            node.view = view
            ring = Ring.build(view)
            node.shard.members_changed(ring, view)
            self.perform(node, node.publisher.ring_changed(ring, self.now))

    def tick(self, node: Node) -> None:
        if node.node_id in self.nodes:
            self.perform(node, node.publisher.tick(self.now))
            node.shard.sweep(700, self.now)
            self.later(0.2, self.tick, node)

    # ---- pages -----------------------------------------------------------------------------------------------------

    def publish(self, node: Node, keys: list[bytes]) -> None:
        """Also publishes again what is there already: in a new slot, and withdraws the old one afterwards."""
        before = {key: node.pages[key] for key in keys if key in node.pages}
        for key in keys:
            node.generation += 1
            node.pages[key] = (self.random.randrange(8), node.generation)
            node.past.append((key, node.pages[key]))
        places = [node.pages[key] for key in keys]
        self.perform(node, node.publisher.published(*columns(keys, places), np.full(len(keys), 4096, np.uint32)))
        self.perform(node, node.publisher.withdrawn(*columns(list(before), list(before.values()))))

    def withdraw(self, node: Node, keys: list[bytes]) -> None:
        places = [node.pages.pop(key) for key in keys]
        self.perform(node, node.publisher.withdrawn(*columns(keys, places)))

    def report_stale(self, node: Node) -> None:
        """Also about pages that are fine: a reader may be wrong."""
        producer = self.random.choice([*self.nodes.values(), *self.ended.values()])
        if producer.past:
            keys, places = zip(*self.random.choices(producer.past, k=5), strict=True)
            packed, *rest = columns(list(keys), list(places))
            node.shard.stale(StaleReport(producer.node_id, packed, *(column.tobytes() for column in rest)))

    # ---- what happens ----------------------------------------------------------------------------------------------

    def step(self) -> None:
        node = self.random.choice(list(self.nodes.values()))
        draw = self.random.random()
        if draw < 0.5:
            self.publish(node, self.random.sample(KEYS, self.random.randint(1, 8)))
        elif draw < 0.8:
            held = list(node.pages)
            self.withdraw(node, self.random.sample(held, self.random.randint(0, len(held))))
        elif draw < 0.88:
            self.report_stale(node)
        elif draw < 0.92 and len(self.nodes) < 6:
            self.join()
        elif draw < 0.95 and len(self.nodes) > 2:
            self.crash(node)
        elif draw < 0.98:
            self.suspect_wrongly(node, self.random.choice(sorted(node.view)))
        self.check_answers(self.random.choice(list(self.nodes.values())))
        self.run_until(self.now + self.random.expovariate(10))

    def quieten(self) -> None:
        """The network heals, everybody learns the truth, and time passes."""
        self.is_hostile = False
        for node in self.nodes.values():
            for subject in self.nodes:
                self.later(1.0, self.learn, node, subject, True)
            for subject in self.ended:
                self.later(1.0, self.learn, node, subject, False)
        # False suspicions are taken back, then the longest retry pause ends, and lost partitions are dropped.
        self.run_until(self.now + 2.0 + RETRY_MAX_S + PREVIOUS_OWNER_S + 2 * ANTI_ENTROPY_S)

    # ---- what must be true -----------------------------------------------------------------------------------------

    def look(self, node: Node) -> dict[bytes, tuple[int, set[tuple[bytes, Place]]]]:
        partitions = np.array([PARTITION_OF[key] for key in KEYS], dtype=np.uint16)
        answer = node.shard.lookup(Lookup(b"".join(KEYS), partitions.tobytes()))
        statuses, counts, holders = unpack_holders(answer, len(KEYS))
        ids = [answer.agents[first : first + 16] for first in range(0, len(answer.agents), 16)]
        found, start = {}, 0
        for key, status, count in zip(KEYS, statuses.tolist(), counts.tolist(), strict=True):
            rows = holders[start : start + count].tolist()
            found[key] = status, {(ids[row[0]], (row[1], row[2])) for row in rows}
            start += count
        return found

    def check_answers(self, node: Node) -> None:
        """At any time: only members of the owner's view appear, and only with what they published once."""
        for key, (status, held) in self.look(node).items():
            assert (status == LookupStatus.KNOWN) == bool(held)
            for holder, place in held:
                assert holder in node.view
                assert (key, place) in (self.nodes | self.ended)[holder].past

    def check_quiet(self) -> None:
        ring = Ring.build(set(self.nodes))
        truth = self.truth()
        for node_id, node in self.nodes.items():
            assert node.view == set(self.nodes)
            owned = ring.owned_by(node_id)
            n_owned_holders = 0
            for key, (status, held) in self.look(node).items():
                if owned[PARTITION_OF[key]]:
                    assert held == truth[key]
                    assert status == (LookupStatus.KNOWN if held else LookupStatus.MISS)
                    n_owned_holders += len(held)
                else:
                    assert (status, held) == (LookupStatus.UNSURE, set())
            assert node.shard.stats().holders == n_owned_holders, "records that nobody can find"
            assert all(isinstance(stream.outstanding, Digests | None) for stream in node.publisher.streams.values())

    def check_full_partitions(self) -> int:
        """What is known is true, and all of it is known where there is room. Returns how many partitions are full."""
        ring, truth, n_full = Ring.build(set(self.nodes)), self.truth(), 0
        for node_id, node in self.nodes.items():
            found = self.look(node)
            for partition in {PARTITION_OF[key] for key in KEYS if ring.owned_by(node_id)[PARTITION_OF[key]]}:
                keys = [key for key in KEYS if PARTITION_OF[key] == partition]
                n_records = sum(bool(found[key][1]) for key in keys)
                assert n_records <= self.partition_records_max
                assert all(found[key][1] <= truth[key] for key in keys)
                if n_records < self.partition_records_max:
                    assert all(found[key][1] == truth[key] for key in keys)
                n_full += any(found[key][1] < truth[key] for key in keys)
        return n_full

    def truth(self) -> dict[bytes, set[tuple[bytes, Place]]]:
        return {
            key: {(node_id, node.pages[key]) for node_id, node in self.nodes.items() if key in node.pages}
            for key in KEYS
        }


def columns(keys: list[bytes], places: list[Place]):
    slots, generations = np.array(places, dtype=np.uint32).reshape(-1, 2).T.copy()
    return b"".join(keys), np.array([PARTITION_OF[key] for key in keys], dtype=np.uint16), slots, generations


def simulate(seed: int, n_steps: int, **limits: int) -> Cluster:
    cluster = Cluster(seed, **limits)
    for _ in range(4):
        cluster.join()
    for _ in range(n_steps):
        cluster.step()
    cluster.quieten()
    return cluster


@pytest.mark.parametrize("seed", range(8))
def test_once_it_is_quiet_owners_know_exactly_what_is_held(seed):
    simulate(seed, n_steps=150).check_quiet()


@pytest.mark.parametrize("seed", range(4))
def test_what_full_partitions_keep_out_is_missing_and_nothing_else_is_wrong(seed):
    assert simulate(seed, n_steps=100, partition_records_max=3).check_full_partitions()


@pytest.mark.parametrize("partition_records_max", [3, 1 << 20], ids=["full", "roomy"])
def test_a_quiet_cluster_only_compares_digests(partition_records_max):
    cluster = simulate(seed=99, n_steps=50, partition_records_max=partition_records_max)
    assert (cluster.check_full_partitions() > 0) == (partition_records_max == 3)
    cluster.sent.clear()
    cluster.run_until(cluster.now + 3 * ANTI_ENTROPY_S)
    assert set(cluster.sent) == {Digests}
    n_pairs = len(cluster.nodes) ** 2
    assert len(cluster.sent) <= 4 * n_pairs * -(-2 * 4096 // (1024 * len(cluster.nodes)))


def test_the_simulation_is_as_hostile_as_it_says():
    """A cluster without trouble would prove nothing."""
    cluster = simulate(seed=1, n_steps=150)
    shards = [node.shard.counters for node in [*cluster.nodes.values(), *cluster.ended.values()]]
    assert cluster.ended
    assert sum(shard.n_gaps for shard in shards) > 0
    assert sum(shard.n_old_messages for shard in shards) > 10
    assert sum(shard.n_stale_removed for shard in shards) > 0
