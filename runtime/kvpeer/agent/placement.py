"""Puts the agent's memory and threads where the plan wants them, and knows what came of it.

Nothing here stops an agent: what the kernel refuses is a problem by name, in the log and in the metrics.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from kvpeer.agent.config import HUGEPAGE_BYTES, AgentConfig, TopologySettings
from kvpeer.agent.facts import read_facts
from kvpeer.agent.numa import bind_memory, pages_by_node
from kvpeer.agent.pool import HEADROOM_BYTES
from kvpeer.agent.sysfs import read_machine
from kvpeer.core.topology import (
    Plan,
    PlanRequest,
    PoolNeeds,
    Problem,
    ProblemName,
    Severity,
    collect,
    judge,
    number_list,
    plan,
)
from kvpeer.metrics import Metrics
from kvpeer.native import Pool

__all__ = ["Placement", "plan_request", "pool_needs"]

_log = logging.getLogger(__name__)


def plan_request(settings: TopologySettings, *, requires_rdma: bool = False) -> PlanRequest:
    """What the settings ask of the planner."""
    return PlanRequest(settings.ranks, settings.gpus, settings.devices, requires_rdma)


def pool_needs(config: AgentConfig) -> PoolNeeds:
    """What the host has to allow."""
    pool, is_placed = config.pool, config.topology.numa == "auto"
    return PoolNeeds(pool.size_bytes, HUGEPAGE_BYTES[pool.hugepages], HEADROOM_BYTES, is_placed)


class Placement:
    """The plan of this machine, and its execution for one agent. `extent_opened` is called on the thread that opens
    extents, one at a time; all else on the event loop's."""

    def __init__(self, plan: Plan, *, is_on: bool, host_problems: Iterable[Problem] = ()) -> None:
        self.plan = plan
        self._is_on = is_on
        self._problems = [*plan.problems, *host_problems]  # replaced, never changed: two threads look at it
        self._is_logged = False
        self._is_blind = False
        self._pool: tuple[int, int, int] | None = None  # address, bytes of an extent, bytes of a page
        self._pages_by_node: Counter[int] = Counter()  # replaced as a whole, never changed: another thread reads it

    @classmethod
    def of_machine(cls, config: AgentConfig, root: Path = Path("/")) -> Placement:
        """The placement on this machine, and what this host does not allow. Blocks for some 10 ms."""
        request = plan_request(config.topology, requires_rdma=config.transport.rdma == "require")
        made = plan(read_machine(root), request)
        host_problems = judge(read_facts(), pool_needs(config), made)
        return cls(made, is_on=config.topology.numa == "auto", host_problems=host_problems)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is wrong, with the topology or with what was tried; notes among them."""
        return tuple(self._problems)

    def pin_threads(self) -> None:
        """Keeps this thread, and all that it starts from now on, on the CPUs of the plan. Call it first."""
        if not (self._is_on and self.plan.cpus):
            return
        try:
            os.sched_setaffinity(0, self.plan.cpus)
        except OSError as error:
            self._found(ProblemName.AFFINITY_REFUSED, str(error))

    def bind_pool(self, pool: Pool, hugepage_bytes: int) -> None:
        """Tells the kernel where the pool's memory is to be; call it before any of it is touched. Where the kernel
        refuses, the pool still lies near the pinned thread that opens its extents, if the plan has one node."""
        self._pool = (pool.payload_address, pool.extent_bytes, hugepage_bytes or mmap.PAGESIZE)
        if not (self._is_on and self.plan.pool_nodes):
            return
        try:
            bind_memory(pool.payload_address, pool.payload_bytes, self.plan.pool_nodes)
        except OSError as error:
            self._found(ProblemName.MBIND_REFUSED, str(error))

    def extent_opened(self, extent: int) -> None:
        """Looks where the memory of an extent came to lie."""
        if self._pool is None or self._is_blind:
            return
        address, extent_bytes, page_bytes = self._pool
        try:
            found = pages_by_node(address + extent * extent_bytes, extent_bytes, page_bytes)
        except OSError as error:
            self._is_blind = True
            if self._is_on and self.plan.pool_nodes:
                self._found(ProblemName.MOVE_PAGES_REFUSED, str(error))
            return
        self._pages_by_node = self._pages_by_node + found
        elsewhere = sorted(set(found) - set(self.plan.pool_nodes))
        if self._is_on and self.plan.pool_nodes and elsewhere:
            self._found(ProblemName.POOL_ON_OTHER_NODE, f"nodes {number_list(elsewhere)}")

    def observe(self, metrics: Metrics) -> None:
        """Brings the metrics up to date."""
        counted = {problem.name: problem for problem in self._problems if problem.severity is Severity.PROBLEM}
        for name in ProblemName:
            n = len(counted[name].subjects) if name in counted else 0
            metrics.gauge("kvpeer_topology_problems").labels(problem=name.value).set(n)
        metrics.gauge("kvpeer_topology_rails").set(len(self.plan.rails))
        for node, n_pages in self._pages_by_node.items():
            metrics.gauge("kvpeer_pool_numa_pages").labels(node=str(node)).set(n_pages)

    def log(self) -> None:
        """Says what was planned and done, and what is wrong."""
        made = self.plan
        for rank in made.ranks:
            if rank.rail is not None:
                gid = rank.rail.gid
                _log.info("rank %d: %s, gid %d %s, node %d", rank.rank, rank.rail.name, gid.index, gid, rank.node)
        if not self._is_on:
            _log.info("topology.numa is none: memory and threads are wherever the kernel puts them")
        elif made.pool_nodes:
            cpus = number_list(made.cpus) or "any"
            _log.info("the pool goes to nodes %s, threads to cpus %s", number_list(made.pool_nodes), cpus)
        _log_problems(self._problems)
        self._is_logged = True

    def _has(self, name: ProblemName) -> bool:
        return any(problem.name is name for problem in self._problems)

    def _found(self, name: ProblemName, subject: str) -> None:
        """Once for each name: that a call is refused may be known before it is made."""
        if self._has(name):
            return
        found = collect([(name, subject)], requires_rdma=False)
        self._problems = [*self._problems, *found]
        if self._is_logged:
            _log_problems(found)


def _log_problems(problems: Iterable[Problem]) -> None:
    for problem in problems:
        level = logging.WARNING if problem.severity is Severity.PROBLEM else logging.INFO
        subjects = ", ".join(problem.subjects)
        _log.log(level, "%s: %s. %s %s", problem.name.value, subjects, problem.meaning, problem.fix)
