"""What goes wrong while a run is hostile: each kind of fault comes at random times, at its rate, and ends by itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

import numpy as np

from kvpeer.model import AgentId
from kvpeer.sim.agent import Agent
from kvpeer.sim.engine import Engine
from kvpeer.sim.memory import Header, SlotState
from kvpeer.sim.transfer import Answer
from kvpeer.sim.world import World
from kvpeer.wire.messages import Holders

__all__ = ["OUTAGE_S_MAX", "Faults", "Hosts", "Liars"]

AGENTS_MIN = 3
"""So many keep running: fewer have nobody to talk to."""

OUTAGE_S_MAX = 3.5
"""Who comes back does so by then. It moves partitions once more, and those who lost them keep the records readable for
a while, which must be over when the directory is checked."""


class Hosts(Protocol):
    """What faults are done to."""

    def agents(self) -> list[Agent]: ...
    def engines(self) -> list[Engine]: ...
    def crash(self, agent: Agent, back_after_s: float | None) -> None: ...
    def restart_engine(self, engine: Engine, after_s: float) -> None: ...
    def leave(self, agent: Agent, back_after_s: float | None) -> None: ...


class Liars:
    """Hosts whose agents do not tell the truth, for a while."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = random.Random(world.rng.random())  # noqa: S311 - a run must repeat
        self._hosts: dict[int, None] = {}

    def begin(self, host: int) -> None:
        self._hosts[host] = None

    def end(self, host: int) -> None:
        self._hosts.pop(host, None)

    def page(self, host: int, answer: Answer, run_id: AgentId) -> Answer:
        """Other bytes, an older use of the slot, another page, or a slot that changed meanwhile."""
        before = answer.before
        if host not in self._hosts or before is None or answer.after is None:
            return answer
        self._world.liars.add(run_id)
        self._world.note("lie", host)
        lie = self._rng.randrange(5)
        if lie == 0:
            return Answer(before, bytes(reversed(answer.payload)), answer.after)
        if lie == 1:
            return Answer(before, answer.payload[:-1] + bytes([answer.payload[-1] ^ 1]), answer.after)
        if lie == 2:
            return _with_headers(answer, before._replace(generation=before.generation - 1))
        if lie == 3:
            return _with_headers(answer, before._replace(key=bytes(reversed(before.key))))
        return Answer(before, answer.payload, before._replace(state=SlotState.WRITING))

    def holders(self, host: int, answer: Holders) -> Holders:
        """Other slots, no holders, or columns that do not fit."""
        if host not in self._hosts:
            return answer
        self._world.note("lie", host)
        lie = self._rng.randrange(3)
        if lie == 0:
            other = np.frombuffer(answer.holders, dtype=np.uint8).copy()
            other[4::20] ^= 3
            return Holders(answer.statuses, answer.counts, answer.agents, other.tobytes())
        if lie == 1:
            return Holders(b"\1" * len(answer.statuses), b"\0" * len(answer.counts), b"", b"")
        return Holders(answer.statuses, answer.counts[:-1], answer.agents, answer.holders)


class Faults:
    """Schedules all faults of a run."""

    def __init__(self, world: World, hosts: Hosts, liars: Liars) -> None:
        self._world = world
        self._hosts = hosts
        self._liars = liars
        self._rng = random.Random(world.rng.random())  # noqa: S311 - a run must repeat

    def start(self) -> None:
        """From now on until the network heals."""
        profile = self._world.profile
        kinds: list[tuple[float, Callable[[], None]]] = [
            (profile.crashes, self._crash),
            (profile.freezes, self._freeze),
            (profile.partitions, self._partition),
            (profile.resets, self._reset),
            (profile.slow_hosts, self._slow_down),
            (profile.leaves, self._leave),
            (profile.liars, self._lie),
            (profile.scribbles, self._scribble),
            (profile.memory_shortages, self._shorten_memory),
            (profile.engine_deaths, self._kill_engine),
            (profile.cohort_resets, self._reset_cohort),
            (profile.clock_jumps, self._jump_clock),
            (profile.clock_stops, self._stop_clock),
        ]
        for rate, fault in kinds:
            if rate:
                self._schedule(rate * profile.n_agents / 16, fault)

    def _schedule(self, rate: float, fault: Callable[[], None]) -> None:
        def happen() -> None:
            if self._world.is_hostile:
                fault()
                self._schedule(rate, fault)

        self._world.later(self._rng.expovariate(rate), happen)

    # ---- faults of processes

    def _crash(self) -> None:
        agents = self._hosts.agents()
        if len(agents) > AGENTS_MIN:
            agent = self._rng.choice(agents)
            is_for_good = agent.host >= AGENTS_MIN and self._rng.random() < 0.15
            back_after_s = None if is_for_good else min(0.05 + self._rng.expovariate(1.0), OUTAGE_S_MAX)
            self._hosts.crash(agent, back_after_s)

    def _leave(self) -> None:
        agents = [agent for agent in self._hosts.agents() if agent.host >= AGENTS_MIN]
        if len(agents) > 1:
            back_after_s = None if self._rng.random() < 0.3 else OUTAGE_S_MAX - 1 + self._rng.random()
            self._hosts.leave(self._rng.choice(agents), back_after_s)

    def _freeze(self) -> None:
        agent = self._any_agent()
        self._world.note("freeze", agent.name)
        agent.process.freeze()
        self._world.later(0.2 + self._rng.expovariate(1 / 1.5), agent.process.thaw)

    def _kill_engine(self) -> None:
        engines = self._hosts.engines()
        if engines:
            engine = self._rng.choice(engines)
            self._world.note("kill", engine.process.name)
            engine.kill()
            self._hosts.restart_engine(engine, 0.1 + self._rng.random())

    def _jump_clock(self) -> None:
        agent = self._any_agent()
        seconds = self._rng.choice((0.05, 0.5, 3.0, 20.0)) * self._rng.random()
        self._world.note("jump", agent.name, round(seconds, 3))
        agent.process.jump(seconds)

    def _stop_clock(self) -> None:
        agent = self._any_agent()
        self._world.note("stop clock", agent.name)
        agent.process.stop_clock()
        self._world.later(0.1 + self._rng.expovariate(1.0), agent.process.start_clock)

    # ---- faults of the network

    def _partition(self) -> None:
        n = self._world.profile.n_agents
        side = set(self._rng.sample(range(n), self._rng.randrange(1, n // 2 + 1)))
        other = [host for host in range(n) if host not in side]
        is_one_way = self._rng.random() < 0.4
        ways = [(here, there) for here in sorted(side) for there in other]
        if not is_one_way:
            ways += [(there, here) for here, there in ways]
        self._world.note("partition", sorted(side), is_one_way)
        for way in ways:
            self._world.network.cut(*way)

        def mend() -> None:
            if self._world.is_hostile:
                for way in ways:
                    self._world.network.mend(*way)

        self._world.later(0.2 + self._rng.expovariate(1 / 2.0), mend)

    def _reset(self) -> None:
        agent = self._any_agent()
        links = [link for peer in agent.links.peers.values() for link in peer.links]
        if links:
            link = self._rng.choice(links)
            self._world.note("reset", agent.name, link.peer.name)
            link.reset_both()
        if agent.server.connections and self._rng.random() < 0.5:
            agent.server.close(self._rng.choice(agent.server.connections))

    def _slow_down(self) -> None:
        host = self._any_agent().host
        self._world.note("slow", host)
        self._world.network.slow_down(host, 0.02 + 0.4 * self._rng.random())
        self._world.later(0.5 + 3 * self._rng.random(), lambda: self._world.network.slow_down(host, 0.0))

    # ---- faults of memory and of words

    def _lie(self) -> None:
        host = self._any_agent().host
        self._liars.begin(host)
        self._world.later(0.5 + 2 * self._rng.random(), lambda: self._liars.end(host))

    def _scribble(self) -> None:
        agent = self._any_agent()
        memory = agent.pool.memory
        committed: list[tuple[int, Header]] = [
            (slot, header) for slot, header in memory.headers.items() if header.state is SlotState.COMMITTED
        ]
        if committed:
            slot, header = self._rng.choice(committed)
            at = memory.address(slot) + self._rng.randrange(header.length)
            memory.payload[at] ^= 1 << self._rng.randrange(8)
            self._world.tainted.add((agent.agent_id, slot, header.generation))
            self._world.note("scribble", agent.name, slot, header.generation)

    def _shorten_memory(self) -> None:
        pool = self._any_agent().pool
        pool.is_short = True

        def end() -> None:
            pool.is_short = False

        self._world.later(0.5 + 2 * self._rng.random(), end)

    def _reset_cohort(self) -> None:
        engines = self._hosts.engines()
        if engines:
            engine = self._rng.choice(engines)
            self._world.note("reset cohort", engine.process.name)
            engine.agent.process.post(lambda: engine.agent.pool.reset(engine.cohort))

    def _any_agent(self) -> Agent:
        return self._rng.choice(self._hosts.agents())


def _with_headers(answer: Answer, header: Header) -> Answer:
    return Answer(header, answer.payload, header)
