"""What the host and the container allow the agent, judged for its pool."""

from __future__ import annotations

from dataclasses import dataclass

from kvpeer.core.topology.plan import Plan
from kvpeer.core.topology.problems import Problem, ProblemName, collect

__all__ = ["SHM_BYTES_MIN", "HostFacts", "PoolNeeds", "judge"]

SHM_BYTES_MIN = 1 << 30
"""Containers have 64 MiB unless told otherwise; engines with several ranks and NCCL want hundreds."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """As this process finds them. None: nobody can say, or there is no limit. `refused`: system calls of placement that
    the kernel refuses, by name. `memory_bytes`: the container's limit, or the host's memory; `memory_left_bytes`:
    what is left of it, which an agent that runs already has less of. `hugepages`: reserved, by size in bytes."""

    memlock_bytes: int | None
    has_ipc_lock: bool
    memory_bytes: int | None
    memory_left_bytes: int | None
    shm_bytes: int | None
    is_memfd_sealable: bool
    refused: frozenset[str]
    hugepages: tuple[tuple[int, int], ...]
    seccomp: str


@dataclass(frozen=True, slots=True)
class PoolNeeds:
    """What the configuration asks for. `hugepage_bytes` 0: ordinary pages. `headroom_bytes`: memory that the
    pool leaves to everybody else. `is_placed`: topology.numa is not none."""

    size_bytes: int
    hugepage_bytes: int
    headroom_bytes: int = 0
    is_placed: bool = True


def judge(facts: HostFacts, pool: PoolNeeds, plan: Plan, *, requires_rdma: bool = False) -> tuple[Problem, ...]:
    """What will keep the agent from doing as planned: problems of the host, after those of the topology."""
    found: list[tuple[ProblemName, str]] = []
    size = f"pool.size {_gib(pool.size_bytes)}"
    uses_rdma, n_rails = bool(plan.rails) or requires_rdma, max(1, len(plan.rails))  # each rail locks the pool anew
    if uses_rdma and not facts.has_ipc_lock and _is_below(facts.memlock_bytes, pool.size_bytes * n_rails):
        rails = f", {n_rails} rails" if n_rails > 1 else ""
        found.append((ProblemName.MEMLOCK_LOW, f"limit {_gib(facts.memlock_bytes or 0)}, {size}{rails}"))
    if not pool.hugepage_bytes and _is_below(facts.memory_bytes, pool.size_bytes + pool.headroom_bytes):
        found.append((ProblemName.MEMORY_LIMIT_LOW, f"limit {_gib(facts.memory_bytes or 0)}, {size}"))
    if pool.hugepage_bytes:
        n_reserved = dict(facts.hugepages).get(pool.hugepage_bytes, 0)
        n_needed = pool.size_bytes // pool.hugepage_bytes
        if n_reserved < n_needed:
            kind = f"{pool.hugepage_bytes >> 20} MiB"
            found.append((ProblemName.HUGEPAGES_SHORT, f"{n_reserved} of {kind} reserved, {n_needed} needed"))
    if not facts.is_memfd_sealable:
        found.append((ProblemName.MEMFD_UNSEALABLE, "memfd_create"))
    if pool.is_placed and plan.pool_nodes:
        found += [(_REFUSALS[call], f"seccomp {facts.seccomp}") for call in _REFUSALS if call in facts.refused]
    if _is_below(facts.shm_bytes, SHM_BYTES_MIN):
        found.append((ProblemName.SHM_SMALL, _gib(facts.shm_bytes or 0)))
    return collect(found, requires_rdma=requires_rdma)


_REFUSALS = {
    "mbind": ProblemName.MBIND_REFUSED,
    "move_pages": ProblemName.MOVE_PAGES_REFUSED,
    "sched_setaffinity": ProblemName.AFFINITY_REFUSED,
}


def _is_below(value: int | None, least: int) -> bool:
    return value is not None and value < least


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 30):.2f} GiB"
