"""The hosts of one run: who runs where, what their engines ask for, and the course of the run."""

from __future__ import annotations

import hashlib

from kvpeer.core.chain import Chain, ChainSlice
from kvpeer.core.slot_effects import PageShape
from kvpeer.sim.agent import Agent
from kvpeer.sim.calls import Calls
from kvpeer.sim.engine import Engine
from kvpeer.sim.faults import Faults, Liars
from kvpeer.sim.pool import Cohort
from kvpeer.sim.profile import Profile
from kvpeer.sim.world import World

__all__ = ["COHORTS", "Cluster"]

START_S = 0.5
"""Within this time all agents of a new cluster start."""

CHECK_INTERVAL_S = 0.5


def _cohort(number: int, n_parts: int, part_bytes: int) -> Cohort:
    namespace = hashlib.sha256(f"simulated namespace {number}".encode()).digest()
    return Cohort(namespace, PageShape(n_parts * part_bytes, n_parts, number), part_bytes)


COHORTS = (_cohort(1, 2, 240), _cohort(2, 1, 5000))
"""Pages of two ranks that fit one slot of 4 KiB, and pages that take two: pools with both move extents between them."""


class Cluster:
    """All hosts. `hosts` has the latest agent of each, dead or not."""

    def __init__(self, seed: int, profile: Profile) -> None:
        self.world = World(seed, profile)
        self.calls = Calls(self.world)
        self.liars = Liars(self.world)
        self.faults = Faults(self.world, self, self.liars)
        self.hosts: dict[int, Agent] = {}
        self._engines: dict[int, list[Engine]] = {}
        self._n_runs: dict[int, int] = {}
        self._last_client = 0
        n_chains = max(profile.n_chains, profile.n_chains * profile.n_agents // 16)
        self.chains = {cohort.shape.cohort: self._chains_of(cohort, n_chains) for cohort in COHORTS}

    def _chains_of(self, cohort: Cohort, n_chains: int) -> list[ChainSlice]:
        chains = []
        for number in range(n_chains):
            chain = Chain(cohort.namespace)
            n_pages = self.world.rng.randrange(1, self.world.profile.chain_pages_max + 1)
            chain.extend(f"{number} {page}".encode() for page in range(n_pages))
            chains.append(chain.slice(0, n_pages))
        return chains

    # ---- what faults ask (Hosts)

    def agents(self) -> list[Agent]:
        """Those that run, frozen or not, by host."""
        return [agent for agent in self.hosts.values() if not agent.process.is_dead]

    def engines(self) -> list[Engine]:
        """Those whose agent runs."""
        return [
            engine
            for host, engines in self._engines.items()
            for engine in engines
            if not self.hosts[host].process.is_dead and not engine.process.is_dead
        ]

    def crash(self, agent: Agent, back_after_s: float | None) -> None:
        """The agent is killed, and sometimes its engines. None: for good."""
        self.world.note("crash", agent.name, back_after_s is None)
        for engine in self._engines[agent.host]:
            if self.world.buggify():
                engine.kill()
        agent.kill()
        self._restart(agent, back_after_s)

    def leave(self, agent: Agent, back_after_s: float | None) -> None:
        """The agent leaves in an orderly way."""
        self.world.note("leave", agent.name)
        agent.process.post(agent.begin_leaving)
        self._restart(agent, back_after_s)

    def restart_engine(self, engine: Engine, after_s: float) -> None:
        """The engine comes back at its agent, as a new process."""

        def restart() -> None:
            host = engine.agent.host
            if self.hosts[host] is engine.agent and not engine.agent.process.is_dead and self.world.is_hostile:
                self._engines[host].remove(engine)
                self._start_engine(engine.agent, engine.cohort)

        self.world.later(after_s, restart)

    # ---- the course of a run

    def start(self) -> None:
        """All agents and engines, and the faults."""
        for host in range(self.world.profile.n_agents):
            self.world.later(START_S * self.world.rng.random(), lambda host=host: self._start(host))  # type: ignore[misc]
        self.world.kernel.run_until(START_S)
        self.faults.start()
        self._check_regularly()

    def end_faults(self) -> None:
        """The network heals, what was stopped goes on, nobody lies, and nothing new goes wrong."""
        self.world.note("quiet")
        self.world.network.heal()
        for host, agent in self.hosts.items():
            self.liars.end(host)
            agent.pool.is_short = False
            agent.process.start_clock()
            agent.process.thaw()

    def _check_regularly(self) -> None:
        self.calls.check()
        self.world.later(CHECK_INTERVAL_S, self._check_regularly)

    def _restart(self, agent: Agent, after_s: float | None) -> None:
        def restart() -> None:
            if self.hosts[agent.host] is agent and agent.process.is_dead:
                self._start(agent.host)

        if after_s is not None:
            self.world.later(after_s, restart)

    def _start(self, host: int) -> None:
        self._n_runs[host] = self._n_runs.get(host, 0) + 1
        agent = self.hosts[host] = Agent(self.world, host, self._n_runs[host], self.liars)
        self.world.note("start", agent.name)
        agent.start()
        self._engines[host] = []
        self._start_engine(agent, COHORTS[0])
        if host % 3 == 0:
            self._start_engine(agent, COHORTS[1])

    def _start_engine(self, agent: Agent, cohort: Cohort) -> None:
        first_client = self._last_client + 1
        self._last_client += cohort.shape.n_parts
        engine = Engine(self.world, agent, self.calls, cohort, self.chains[cohort.shape.cohort], first_client)
        self._engines[agent.host].append(engine)
        engine.start()
