"""From a machine to a plan: a NIC for each rank, an address for each port, nodes for the pool, CPUs for its threads.

The same machine and the same request always give the same plan: agents of one host, and a person who runs
`kvpeer doctor` beside them, agree.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvpeer.core.topology.distance import Proximity, proximity, separation
from kvpeer.core.topology.machine import NODE_UNKNOWN, Gpu, Machine, pci_order
from kvpeer.core.topology.problems import Problem, ProblemName, Severity, collect
from kvpeer.core.topology.rails import Found, Rail, usable_rails

__all__ = ["RANKS_MAX", "Plan", "PlanRequest", "RankPlan", "plan"]

RANKS_MAX = 64
"""As many parts as a page may have: more ranks cannot share a pool."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is asked for. `n_ranks` 0: one for each GPU of the container, one where there is none. `gpus`: PCI addresses
    by rank, empty for those whose device files are in the container. `devices`: NICs to use, empty for all."""

    n_ranks: int = 0
    gpus: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    requires_rdma: bool = False


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's GPU, NIC and node. None, or NODE_UNKNOWN, where there is none or nobody knows."""

    rank: int
    gpu: Gpu | None
    rail: Rail | None
    node: int
    proximity: Proximity


@dataclass(frozen=True, slots=True)
class Plan:
    """`rails`: all ports that carry pages. `pool_nodes`: where the pool's memory goes, in equal shares; empty: wherever
    the kernel puts it. `cpus`: where the agent's threads run; empty: where they may already."""

    rails: tuple[Rail, ...]
    ranks: tuple[RankPlan, ...]
    pool_nodes: tuple[int, ...]
    cpus: tuple[int, ...]
    problems: tuple[Problem, ...]

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong; notes do not count."""
        return all(problem.severity is Severity.NOTE for problem in self.problems)


def plan(machine: Machine, request: PlanRequest) -> Plan:
    """The plan for this machine. Every rank has a rail if there is any; no rail serves two ranks more than another."""
    found: Found = [(ProblemName.SYSFS_UNREADABLE, path) for path in machine.unread]
    rails = usable_rails(machine, request.devices, found)
    gpus = _gpus(machine, request, found)
    ranks = _ranks(machine, gpus, rails, min(request.n_ranks or max(1, len(gpus)), RANKS_MAX))
    found += [
        (ProblemName.NIC_ON_OTHER_NODE, f"rank {rank.rank}") for rank in ranks if rank.proximity is Proximity.OTHER_NODE
    ]
    pool_nodes = _pool_nodes(machine, ranks, rails, found)
    cpus = _cpus(machine, pool_nodes, found)
    problems = collect(found, requires_rdma=request.requires_rdma)
    return Plan(rails, ranks, pool_nodes, cpus, problems)


def _gpus(machine: Machine, request: PlanRequest, found: Found) -> list[Gpu]:
    """By rank: as named, or those of the container in the order of their addresses, which is the engines' own."""
    if not request.gpus:
        return sorted((gpu for gpu in machine.gpus if gpu.is_visible), key=lambda gpu: pci_order(gpu.address))
    by_address = {gpu.address: gpu for gpu in machine.gpus}
    found += [(ProblemName.GPU_UNKNOWN, name) for name in request.gpus if name.lower() not in by_address]
    return [by_address[name.lower()] for name in request.gpus if name.lower() in by_address]


def _ranks(machine: Machine, gpus: list[Gpu], rails: tuple[Rail, ...], n_ranks: int) -> tuple[RankPlan, ...]:
    """Ranks beyond the GPUs have none; with fewer ranks than GPUs, the last GPUs have no rank."""
    of_rank: list[Gpu | None] = [gpus[rank] if rank < len(gpus) else None for rank in range(n_ranks)]
    chosen = _share_out(machine, of_rank, rails)
    return tuple(_rank_plan(rank, gpu, chosen.get(rank)) for rank, gpu in enumerate(of_rank))


def _rank_plan(rank: int, gpu: Gpu | None, rail: Rail | None) -> RankPlan:
    nodes = [part.node for part in (gpu, rail.device if rail else None) if part is not None]
    node = next((node for node in nodes if node != NODE_UNKNOWN), NODE_UNKNOWN)
    near = proximity(gpu, rail.device) if gpu and rail else Proximity.UNKNOWN
    return RankPlan(rank, gpu, rail, node, near)


def _share_out(machine: Machine, gpus: list[Gpu | None], rails: tuple[Rail, ...]) -> dict[int, Rail]:
    """The nearest pairs first, as long as no rail gets more than one rank above another. O(ranks * rails)."""
    if not rails:
        return {}
    least, n_larger = divmod(len(gpus), len(rails))
    pairs = sorted(
        (_separation(machine, gpu, rail), rank, idx) for rank, gpu in enumerate(gpus) for idx, rail in enumerate(rails)
    )
    chosen: dict[int, Rail] = {}
    n_of_rail: Counter[int] = Counter()
    for _, rank, idx in pairs:
        has_place = n_of_rail[idx] < least or (n_of_rail[idx] == least and n_larger > 0)
        if rank in chosen or not has_place:
            continue
        n_larger -= n_of_rail[idx] == least
        n_of_rail[idx] += 1
        chosen[rank] = rails[idx]
    return chosen


def _separation(machine: Machine, gpu: Gpu | None, rail: Rail) -> tuple[int, int, int]:
    """For a rank without a GPU, NICs on the nodes of the container's CPUs are the nearest."""
    if gpu is not None:
        return separation(machine, gpu, rail.device)
    own_nodes = {node.number for node in machine.host_nodes if node.cpus & machine.cpus_allowed}
    return (Proximity.NODE if rail.device.node in own_nodes else Proximity.OTHER_NODE, 0, 0)


def _pool_nodes(
    machine: Machine, ranks: tuple[RankPlan, ...], rails: tuple[Rail, ...], found: Found
) -> tuple[int, ...]:
    """Every page has parts of all ranks, so the pool lies on all their nodes. Where nobody knows the GPUs, on those of
    the NICs. On a machine with one node there is nothing to choose."""
    host_nodes = {node.number for node in machine.host_nodes}
    if len(host_nodes) < 2:
        return ()
    has_gpus = any(rank.gpu is not None for rank in ranks)
    nodes = {rank.node for rank in ranks} if has_gpus else {rail.device.node for rail in rails}
    wanted = sorted(nodes & host_nodes)
    found += [
        (ProblemName.MEMORY_NODE_FORBIDDEN, f"node {node}") for node in wanted if node not in machine.nodes_allowed
    ]
    return tuple(node for node in wanted if node in machine.nodes_allowed)


def _cpus(machine: Machine, pool_nodes: tuple[int, ...], found: Found) -> tuple[int, ...]:
    cpus: set[int] = set()
    for node in machine.host_nodes:
        if node.number in pool_nodes:
            cpus |= node.cpus & machine.cpus_allowed
    if pool_nodes and not cpus:
        found += [(ProblemName.NO_CPU_NEAR, f"node {node}") for node in pool_nodes]
    return tuple(sorted(cpus))
