"""One run from its seed: the cluster under faults, the quiet after it, and what was found."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass

from kvpeer.sim.checks import (
    check_directory,
    check_limits,
    check_members,
    check_pulls,
    check_readers,
    check_rest,
    report_the_past,
)
from kvpeer.sim.cluster import START_S, Cluster
from kvpeer.sim.profile import Profile

__all__ = ["RunResult", "simulate"]

LIMITS_INTERVAL_S = 2.0
REPORTS_S = 0.1
"""For reports of stale locations to arrive, and less than from one comparison of digests to the next."""

READER_S, READER_STEP_S = 4.0, 0.01
"""For the last questions and pulls of each agent, and how often it is looked whether they are done."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """`digest` names what happened: equal for equal seeds and profiles. `simulated_s`: virtual seconds."""

    seed: int
    profile: Profile
    violations: tuple[str, ...]
    digest: str
    simulated_s: float
    n_events: int
    counts: Counter[str]
    lines: tuple[str, ...]

    @property
    def is_green(self) -> bool:
        return not self.violations


def simulate(seed: int, profile: Profile, n_lines: int = 0) -> RunResult:
    """Runs one seed. Never raises for what the machines do: an error of theirs is a violation. `n_lines`: how much of
    the trace to keep."""
    cluster = Cluster(seed, profile)
    world = cluster.world
    try:
        _run(cluster)
    except Exception:  # noqa: BLE001 - the root of a run: whatever a machine raises is a finding, and is told
        world.violate("an error", traceback.format_exc().strip())
    finally:
        world.kernel.close()
    return RunResult(
        seed, profile, tuple(world.violations), world.trace.digest(), world.kernel.now, world.kernel.n_events,
        world.trace.counts, tuple(world.trace.lines(n_lines)),
    )  # fmt: skip


def _run(cluster: Cluster) -> None:
    world, profile = cluster.world, cluster.world.profile
    run_until = world.kernel.run_until
    cluster.start()
    quiet_at = START_S + profile.hostile_s
    while world.kernel.now < quiet_at:
        run_until(min(world.kernel.now + LIMITS_INTERVAL_S, quiet_at))
        check_limits(cluster)
        if world.violations:
            return
    cluster.end_faults()
    run_until(quiet_at + profile.members_agree_s)
    check_members(cluster)
    run_until(quiet_at + profile.quiet_s - REPORTS_S)
    report_the_past(cluster)
    run_until(quiet_at + profile.quiet_s)
    check_directory(cluster)
    check_rest(cluster)
    check_limits(cluster)
    for check in (check_readers, check_pulls):
        for agent in cluster.agents():  # one after another: what one pulls may evict what another would find
            task = agent.process.spawn(check(cluster, agent))
            ends_at = world.kernel.now + READER_S
            while not task.is_done and world.kernel.now < ends_at:
                run_until(world.kernel.now + READER_STEP_S)
            if not task.is_done:
                world.violate("a reader did not get its answers", agent.name)
            run_until(world.kernel.now + READER_STEP_S)  # what it published is on its way
    cluster.calls.check()
    world.note("end", sum(len(agent.pool.table._residents.by_key) for agent in cluster.agents()))
