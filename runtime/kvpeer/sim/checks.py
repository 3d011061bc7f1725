"""What must be true once it is quiet, and what must never grow beyond its limit.

The agents' own books are compared with each other: pools with registries, registries with the shards of their owners,
and what a reader is told with all pools. Nothing here asks a machine whether it is right.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvpeer.core.breaker import BREAKERS_MAX
from kvpeer.core.locate import LocateResult
from kvpeer.core.located import REMEMBERED_MAX
from kvpeer.core.membership.settings import INDIRECT_PINGS_MAX, TOMBSTONES_MAX
from kvpeer.core.owner_stream import OWN_IDX, QUEUE_OPS_MAX
from kvpeer.core.resident import ResidentState
from kvpeer.core.ring import REPLICAS
from kvpeer.model import HOLDERS_MAX, KEY_BYTES, N_PARTITIONS, AgentId, InternalError, Outcome
from kvpeer.sim.agent import Agent
from kvpeer.sim.cluster import COHORTS, Cluster
from kvpeer.sim.links import NOTICES_MAX, REQUESTS_MAX
from kvpeer.sim.transfer import CAPABILITIES_MAX
from kvpeer.wire.messages import Digests, StaleReport

__all__ = [
    "check_directory",
    "check_limits",
    "check_members",
    "check_pulls",
    "check_readers",
    "check_rest",
    "report_the_past",
]

READ_WAIT_S = 1.0
PULLS = 2
"""Chains that each agent pulls at the end."""

_PARTITIONS = np.arange(N_PARTITIONS, dtype=np.uint16)

Place = tuple[int, int]


def check_members(cluster: Cluster) -> None:
    """Every agent sees all that run, and nobody else."""
    expected = frozenset(agent.agent_id for agent in cluster.agents())
    for agent in cluster.agents():
        if agent.view.alive != expected:
            missing = sorted(cluster.world.names[agent_id] for agent_id in expected - agent.view.alive)
            extra = sorted(cluster.world.names.get(agent_id, "?") for agent_id in agent.view.alive - expected)
            cluster.world.violate("members disagree", agent.name, f"misses {missing}, believes in {extra}")


def check_directory(cluster: Cluster) -> None:
    """Registries say what pools hold; the shards of the owners say what registries say, and nothing besides."""
    agents = cluster.agents()
    ring = cluster.world.ring_of(agent.agent_id for agent in agents)
    owners = _owners_by_hand(cluster, ring.owners(_PARTITIONS))
    crowded = _crowded_partitions(agents)
    for agent in agents:
        _check_registry(cluster, agent)
    for owner in agents:
        owned = (owners == ring.members.index(owner.agent_id)).any(axis=1)
        _check_shard(cluster, owner, owned, crowded)


def _owners_by_hand(cluster: Cluster, owners: NDArray[np.int32]) -> NDArray[np.int32]:
    """The ring's owners, after a look whether each partition has as many different ones as it must."""
    n_members = len(cluster.agents())
    n_expected = min(REPLICAS, n_members)
    n_different = np.array([len(set(row) - {-1}) for row in owners.tolist()])
    if (n_different != n_expected).any():
        n = int((n_different != n_expected).sum())
        cluster.world.violate("partitions have too few owners", n)
    return owners


def _check_registry(cluster: Cluster, agent: Agent) -> None:
    world = cluster.world
    registry = agent.directory.publisher._registry
    _, counts = registry.digests(OWN_IDX, _PARTITIONS)
    published: dict[bytes, Place] = {}
    for partition in np.flatnonzero(counts).tolist():
        keys, slots, generations, _, _ = registry.dump(OWN_IDX, partition)
        rows = [keys[idx].tobytes() for idx in range(len(slots))]
        published.update(zip(rows, zip(slots.tolist(), generations.tolist(), strict=True), strict=True))
    held = dict(_held(agent))
    if published != held:
        wrong = [key.hex()[:8] for key in sorted(published.keys() | held.keys()) if published.get(key) != held.get(key)]
        world.violate("the registry is not what the pool holds", agent.name, *wrong[:5])
    for owner, stream in agent.directory.publisher.streams.items():
        if stream.outstanding is not None and not isinstance(stream.outstanding, Digests):
            name = world.names[owner]
            world.violate("a stream is not at rest", agent.name, name, type(stream.outstanding).__name__)


def _check_shard(cluster: Cluster, owner: Agent, owned: NDArray[np.bool_], crowded: NDArray[np.bool_]) -> None:
    world, shard = cluster.world, owner.directory.shard
    producers = shard._producers
    n_holders = 0
    for producer in cluster.agents():
        state = producers.get(producer.agent_id)
        if state is None:
            world.violate("a shard does not know a producer", owner.name, producer.name)
            continue
        digests, counts = shard._table.digests(state.idx, _PARTITIONS)
        n_holders += int(counts.sum())
        true_digests, true_counts = producer.directory.publisher._registry.digests(OWN_IDX, _PARTITIONS)
        differs = owned & ((digests != true_digests) | (counts != true_counts)) & ~crowded
        differs |= ~owned & (counts != 0)
        if differs.any():
            partitions = np.flatnonzero(differs).tolist()
            world.violate("an owner's records are not the producer's", owner.name, producer.name, *partitions[:5])
    if n_holders != shard.stats().holders:
        world.violate("zombie records", owner.name, shard.stats().holders - n_holders)
    if shard.n_unsure_partitions() and not crowded.any():
        world.violate("partitions are unsure", owner.name, shard.n_unsure_partitions())


def report_the_past(cluster: Cluster) -> None:
    """Readers report what was stale long ago, of pages that are elsewhere in the same pool by now: late reports, which
    must change nothing."""
    agents = cluster.agents()
    ring = cluster.world.ring_of(agent.agent_id for agent in agents)
    for number, producer in enumerate(agents):
        reader = agents[(number + 1) % len(agents)]
        held = dict(_held(producer))
        for key, partition, slot, generation in cluster.world.past.get(producer.agent_id, ()):
            if held.get(key, (slot, generation)) == (slot, generation):
                continue
            at = np.array([partition], dtype=np.uint16)
            report = StaleReport(
                producer.agent_id, key, at.tobytes(), *(np.uint32(value).tobytes() for value in (slot, generation))
            )
            cluster.world.note("late report", reader.name, producer.name, slot, generation)
            for idx in ring.owners(at)[0].tolist():
                reader.directory.report_stale(ring.members[idx], report)


async def check_readers(cluster: Cluster, agent: Agent) -> None:
    """Every page that somebody published is found by this agent, where it is. One that more agents hold than a record
    has room for is found at some of them; when some of these let it go, the others are known after the next comparison
    of digests, so that nobody may pull while this is checked."""
    holders: dict[bytes, set[tuple[AgentId, Place]]] = {}
    for other in cluster.agents():
        for key, place in _held(other):
            holders.setdefault(key, set()).add((other.agent_id, place))
    partitions = _partition_of_keys(cluster)
    keys = sorted(holders)
    result = await agent.locator.ask(
        b"".join(keys), np.array([partitions[key] for key in keys], dtype=np.uint16),
        agent.process.clock() + READ_WAIT_S,
    )  # fmt: skip
    for key, found in zip(keys, _found(result), strict=True):
        others = {holder for holder in holders[key] if holder[0] != agent.agent_id}
        is_right = found == others if len(holders[key]) <= HOLDERS_MAX else found <= others and bool(found)
        if not is_right:
            cluster.world.violate(
                "a page is not found where it is", agent.name, key.hex()[:8], f"found {len(found)} of {len(others)}"
            )


async def check_pulls(cluster: Cluster, agent: Agent) -> None:
    """Some pages that are at peers: each is a hit, unless its bytes were changed on purpose."""
    chains = cluster.chains[COHORTS[0].shape.cohort]
    clean = {
        key
        for other in cluster.agents()
        for key, place in _held(other)
        if other is not agent and (other.agent_id, *place) not in cluster.world.tainted
    }
    tainted = {
        key
        for other in cluster.agents()
        for key, place in _held(other)
        if (other.agent_id, *place) in cluster.world.tainted
    }
    for n in range(PULLS):
        chain = chains[(agent.host * PULLS + n) % len(chains)]
        own = agent.pool.find(chain.keys).resident
        rows = [chain.keys[at : at + KEY_BYTES] for at in range(0, len(chain.keys), KEY_BYTES)]
        wanted = [idx for idx, key in enumerate(rows) if not own[idx] and key in clean and key not in tainted]
        if not wanted:
            continue
        outcomes = await agent.puller.pull(
            COHORTS[0], chain, np.array(wanted, dtype=np.int64), f"check {n}", agent.process.clock() + READ_WAIT_S
        )
        if (outcomes != Outcome.HIT).any():
            names = [Outcome(value).name for value in outcomes.tolist()]
            cluster.world.violate("what is there was not pulled", agent.name, *names)
        cluster.world.note("pulled", agent.name, outcomes.tolist())


def check_limits(cluster: Cluster) -> None:
    """Everything that holds what others send stays within its named limit."""
    for agent in cluster.agents():
        links = [link for peer in agent.links.peers.values() for link in peer.links]
        streams = agent.directory.publisher.streams.values()
        machine = agent.membership.machine
        sizes = {
            "requests of a link": (max([len(link.pending) for link in links], default=0), REQUESTS_MAX),
            "notices": (max([len(peer.notices) for peer in agent.links.peers.values()], default=0), NOTICES_MAX),
            "ops of a stream": (max([stream._n_queued for stream in streams], default=0), QUEUE_OPS_MAX),
            "located requests": (len(agent.locator.recent), REMEMBERED_MAX),
            "breakers": (max(len(agent.lookups), len(agent.fetches)), BREAKERS_MAX),
            "indirect pings": (len(machine._indirect._pings), INDIRECT_PINGS_MAX),
            "tombstones": (len(machine._table._ended), TOMBSTONES_MAX),
            "capabilities": (len(agent.server.admissions), CAPABILITIES_MAX),
        }
        for what, (size, limit) in sizes.items():
            if size > limit:
                cluster.world.violate("beyond a limit", agent.name, what, size)
        try:
            agent.pool.table.check()
        except InternalError as fault:
            cluster.world.violate("the slot table's books do not agree", agent.name, fault)


def check_rest(cluster: Cluster) -> None:
    """Nothing is held for somebody who is not there any more."""
    for agent in cluster.agents():
        stats = agent.pool.table.stats()
        n_stranded = len(agent.pool.table._residents.stranded)
        left = {
            "pulls": len(agent.puller.pulls),
            "fetches": len(agent.peers.in_flight),
            "pins": stats.n_pins,
            "reservations": stats.n_writing,
            "slots with a silent writer": n_stranded,
            "part tables": len(agent.pool._part_tables),
        }
        for what, n in left.items():
            if n:
                cluster.world.violate("something is left at rest", agent.name, what, n)


def _held(agent: Agent) -> Iterator[tuple[bytes, Place]]:
    for key, page in agent.pool.table._residents.by_key.items():
        if page.state is ResidentState.COMMITTED:
            yield key, (page.slot, page.generation)


def _crowded_partitions(agents: list[Agent]) -> NDArray[np.bool_]:
    """Partitions with a page that more agents hold than a record has room for: they are left out of comparisons."""
    n_holders: dict[bytes, int] = {}
    partition_of: dict[bytes, int] = {}
    for agent in agents:
        for key, page in agent.pool.table._residents.by_key.items():
            n_holders[key] = n_holders.get(key, 0) + 1
            partition_of[key] = page.partition
    crowded = np.zeros(N_PARTITIONS, dtype=np.bool_)
    crowded[[partition_of[key] for key, n in n_holders.items() if n > HOLDERS_MAX]] = True
    return crowded


def _partition_of_keys(cluster: Cluster) -> dict[bytes, int]:
    partitions: dict[bytes, int] = {}
    for chains in cluster.chains.values():
        for chain in chains:
            keys = [chain.keys[at : at + KEY_BYTES] for at in range(0, len(chain.keys), KEY_BYTES)]
            partitions.update(zip(keys, chain.partitions().tolist(), strict=True))
    return partitions


def _found(result: LocateResult) -> list[set[tuple[AgentId, Place]]]:
    found, start = [], 0
    rows = result.holders.tolist()
    for count in result.counts.tolist():
        chosen = rows[start : start + count]
        found.append({(result.agents[row[0]], (row[1], row[2])) for row in chosen})
        start += count
    return found
